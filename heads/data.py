"""Data for draft heads: a target's own greedy answers with its hidden states, in shards that a killed run keeps.

Prompts come from local JSONL files and, mostly, from the model itself: the chat template up to the user's turn and a
few words, then sampling. What shares thirteen words in a row with a prompt that heads are scored on is left out.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asdsim.capture.run import encode
from asdsim.capture.tasks import load_prompts
from asdsim.capture.tasks.gsm8k import SUFFIX
from asdsim.engines.transformers.forward import LanguageModel, left_pad
from asdsim.engines.transformers.load import load_model
from asdsim.engines.transformers.model import eos_ids_of

HELD_OUT = ("gsm8k", "humaneval", "mt-bench")
"""Tasks that heads are scored on, all of their prompts."""
CODE_FRAME = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
OVERLAP = 13
"""Words in a row that make two prompts the same for our purpose, the usual measure of contamination."""
TEMPERATURE, TOP_P, TOP_K = 0.9, 0.95, 512
PROMPT_TOKENS = 96
"""Longest user's turn that the model writes."""
SPARE = 1.3
"""More turns are begun than wanted, because some come to nothing."""
LONGEST_PROMPT = 400
"""Tokens of a prompt with the chat template; longer ones would make all others of their shard wait."""

NAMES = (
    "Anna", "Ben", "Carlos", "Dina", "Emma", "Farid", "Grace", "Hiro", "Ines", "Jack", "Kofi", "Lena", "Maria", "Nils",
    "Olga", "Pedro", "Ravi", "Sofia", "Tom", "Wendy",
)  # fmt: skip
STORIES = (
    "{} buys", "{} has", "A farmer has", "A train", "A baker makes", "{} works", "A school", "There are", "{} earns",
    "{} reads", "A tank holds", "{} is", "A shop sells", "If {}", "{} saves", "In a class of", "{} and {}", "A box of",
    "The price of", "{} drives", "A team", "{} wants to", "Each week {}", "{} spends",
)  # fmt: skip
IMPORTS = ("", "", "from typing import List\n\n\n", "from typing import List\n\n\n", "import math\n\n\n")
VERBS = (
    "count", "find", "get", "sum", "remove", "sort", "check", "filter", "is", "make", "longest", "max", "split",
    "encode", "reverse", "compute", "rotate", "merge", "next", "unique", "closest", "convert", "has", "parse", "total",
)  # fmt: skip
NOUNS = (
    "words", "numbers", "vowels", "prime", "strings", "digits", "pairs", "brackets", "list", "letters", "even",
    "elements", "intervals", "palindrome", "grades", "matrix", "factors", "sequence", "dates", "substring",
    "sorted", "primes",
)  # fmt: skip
ARGUMENTS = (
    "numbers: List[int]", "text: str", "n: int", "s: str", "words: List[str]", "a: int, b: int", "lst", "string: str",
    "values: List[float]", "x, y", "s", "arr, k", "n", "l: list", "d",
)  # fmt: skip
RETURNS = ("", "", " -> int", " -> str", " -> bool", " -> List[int]", " -> List[str]", " -> float")
DOCSTRINGS = ('\n    """ ', '\n    """', '\n    """\n    ', "\n    '''")
OPENERS = (
    "", "", "", "", "", "Write a", "Explain", "Describe", "Imagine you are", "What", "How", "Compose", "Why", "Compare",
    "Can you", "Give me", "I need", "Summarize", "Draft", "Suppose", "Discuss", "Pretend", "Provide", "Write an essay",
    "Create", "Help me", "Consider", "Given", "Design", "Which", "Is it", "Outline", "Rewrite", "Please", "A",
)  # fmt: skip
TASKS = ("Write a function to", "Write a python function to", "Write a Python program that", "Implement a")
KINDS = {"story": 0.3, "stub": 0.3, "open": 0.33, "task": 0.07}


@dataclass(frozen=True)
class Source:
    """A prompt and where it comes from, such as ``mbpp/12`` or ``self/story``."""

    name: str
    text: str


def words_of(text: str) -> list[str]:
    """Return the words of a prompt, without the frames that whole tasks share."""
    bare = text.replace(SUFFIX, " ").replace(CODE_FRAME, " ")
    return re.findall(r"\w+", bare.lower())


class Guard:
    """Knows the prompts that heads are scored on, and tells what is too close to one."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.runs = {run for text in texts for run in self._runs(text)}

    @staticmethod
    def _runs(text: str) -> Iterator[tuple[str, ...]]:
        words = words_of(text)
        if len(words) < OVERLAP:
            yield tuple(words)
        for i in range(len(words) - OVERLAP + 1):
            yield tuple(words[i : i + OVERLAP])

    def refuses(self, text: str) -> bool:
        """True where ``text`` shares a run of words with a held-out prompt, or is a short one."""
        return any(run in self.runs for run in self._runs(text))


def read_given(specs: Sequence[str], guard: Guard) -> tuple[list[Source], int]:
    """Read files of ``{"turns": [..]}`` lines, ``PATH[:FROM]``; FROM skips lines.

    Returns what the guard lets pass, and how many it did not.
    """
    found, refused = [], 0
    for spec in specs:
        path, _, start = spec.partition(":")
        stem = Path(path).name.split(".")[0]
        for n, line in enumerate(Path(path).read_text("utf-8").split("\n")):
            if not line.strip() or n < int(start or 0):
                continue
            text = str(json.loads(line)["turns"][0])
            if guard.refuses(text):
                refused += 1
            else:
                found.append(Source(f"{stem}/{n}", text))
    return found, refused


def grouped_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attend for one new token a row: query heads that share keys count as queries, so no key is copied."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if query.shape[2] > 1 or attention_mask is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    rows = query.unflatten(1, (key.shape[1], -1)).flatten(2, 3)
    out = torch.nn.functional.scaled_dot_product_attention(rows, key, value, attention_mask, scale=kwargs["scaling"])
    return out.flatten(1, 2)[:, None], None


def use_grouped_attention(model: Any) -> None:
    """Make a model decode with :func:`grouped_attention`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register("grouped", grouped_attention)
    AttentionMaskInterface.register("grouped", sdpa_mask)
    model.set_attn_implementation("grouped")


def nucleus(generator: torch.Generator) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a sampler (b, V) -> (b,) at TEMPERATURE, TOP_P of the TOP_K likeliest."""

    def choose(logits: torch.Tensor) -> torch.Tensor:
        top = logits.float().div(TEMPERATURE).softmax(-1).topk(TOP_K)
        before = top.values.cumsum(-1) - top.values
        kept = top.values.masked_fill(before > TOP_P, 0.0).cpu()
        drawn = torch.multinomial(kept, 1, generator=generator).to(logits.device)
        return top.indices.gather(1, drawn)[:, 0]

    return choose


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Return the likeliest tokens (b,)."""
    return logits.argmax(-1)


@torch.inference_mode()
def decode(
    lm: LanguageModel,
    prompts: Sequence[Sequence[int]],
    limit: int,
    choose: Callable[[torch.Tensor], torch.Tensor],
    ends: Sequence[int],
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Continue unrelated prompts in one batch.

    Returns
    -------
    list of list of int
        New tokens of each, an ending one included.
    list of tensor (prompt + new - 1, taps x d), float16
        Hidden states of all tokens but the last; empty where nothing is tapped.
    """
    cache = lm.new_cache()
    tokens, mask, positions = left_pad(prompts, lm.device)
    width, total = tokens.shape[1], len(prompts)
    out: list[list[int]] = [[] for _ in prompts]
    kept = None
    alive = torch.arange(total)
    stop = torch.tensor(list(ends), device=lm.device)
    for step in range(limit):
        row = lm.run(tokens, cache, 1, mask, positions)[:, -1]
        if lm.taps:
            assert lm.states is not None
            if kept is None:
                kept = torch.zeros((total, width + limit, lm.states.shape[-1]), dtype=torch.float16)
            first = 0 if step == 0 else width + step - 1
            kept[alive, first : first + tokens.shape[1]] = lm.states.to("cpu", torch.float16)
        picked = choose(row)
        done = torch.isin(picked, stop).cpu()
        for n, token in zip(alive.tolist(), picked.tolist(), strict=True):
            out[n].append(token)
        if done.all():
            break
        if done.any():
            rest = (~done).nonzero()[:, 0]
            alive = alive[rest]
            rest = rest.to(lm.device)
            cache.batch_select_indices(rest)
            picked, mask, positions = picked[rest], mask[rest], positions[rest]
        tokens, positions = picked[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones((len(mask), 1))], dim=1)
    if kept is None:
        return out, []
    pads = [width - len(prompt) for prompt in prompts]
    return out, [kept[n, pads[n] : width + len(out[n]) - 1].clone() for n in range(total)]


def finish_story(text: str) -> str | None:
    """Return a word problem up to its last full sentence, asked as GSM8K is; None where there is none."""
    end = max(text.rfind("?"), text.rfind("."))
    if not 40 <= end + 1 <= 600 or "\n\n" in text[:end]:
        return None
    return text[: end + 1] + SUFFIX


def begin_stub(rng: random.Random) -> str:
    """Return a function's head and the quotes that open its docstring."""
    arguments = rng.choice(ARGUMENTS)
    head = rng.choice(IMPORTS[2:4] if "List" in arguments else IMPORTS)
    name = f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}"
    return f"{head}def {name}({arguments}){rng.choice(RETURNS)}:{rng.choice(DOCSTRINGS)}"


def finish_stub(text: str) -> str | None:
    """Return a function's head and docstring, asked as HumanEval does; None where it has none worth reading."""
    quotes = '"""' if '"""' in text else "'''"
    head, _, rest = text.partition(quotes)
    doc = rest.partition(quotes)[0].rstrip()
    if not 20 <= len(doc) <= 500 or "```" in doc or "def " in doc:
        return None
    return f"{CODE_FRAME}{head}{quotes}{doc}\n    {quotes}\n\n```"


def finish_open(text: str) -> str | None:
    """Return a message; None where it is hardly one."""
    text = text.strip()
    return text if len(text) >= 12 else None


def write_prompts(lm: LanguageModel, tokenizer: Any, count: int, seed: int, guard: Guard) -> list[Source]:
    """Let the model write at most ``count`` user's turns."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    marker = "\N{OBJECT REPLACEMENT CHARACTER}"
    frame = tokenizer.apply_chat_template(
        [{"role": "user", "content": marker}], add_generation_prompt=True, tokenize=False
    ).partition(marker)[0]
    kinds = rng.choices(list(KINDS), list(KINDS.values()), k=round(count * SPARE))
    starts = []
    for kind in kinds:
        if kind == "story":
            starts.append(rng.choice(STORIES).format(*rng.sample(NAMES, 2)))
        elif kind == "stub":
            starts.append(CODE_FRAME + begin_stub(rng))
        else:
            starts.append(rng.choice(TASKS if kind == "task" else OPENERS))
    rows = [tokenizer(frame + start.rstrip(" "), add_special_tokens=False)["input_ids"] for start in starts]
    ends = [*eos_ids_of(lm.model, tokenizer), *tokenizer("<|im_start|>", add_special_tokens=False)["input_ids"]]
    ends += [i for word, i in tokenizer.get_vocab().items() if any(quotes in word for quotes in ('"""', "'''", "```"))]
    written, _ = decode(lm, rows, PROMPT_TOKENS, nucleus(generator), ends)
    found = []
    for kind, start, new in zip(kinds, starts, written, strict=True):
        ended = new[-1] in ends
        text = start.rstrip(" ") + tokenizer.decode(new[:-1] if ended else new)
        if kind == "story":
            made = finish_story(text.strip())
        elif kind == "stub":
            made = finish_stub(text.removeprefix(CODE_FRAME))
        else:
            made = finish_open(text) if ended else None
        if made is not None and not guard.refuses(made):
            found.append(Source(f"self/{kind}", made))
    return found[:count]


@dataclass(frozen=True)
class Making:
    """What a data set is made of; stored beside it, and a directory made otherwise is refused.

    Attributes
    ----------
    target, dtype : str
        Computing in bfloat16 is some three times as fast as in float32 on a CPU that knows it.
    taps : list of int
    given : list of str
        ``PATH[:FROM]`` of prompts.
    seed, batch, limit : int
        ``batch`` prompts a shard, ``limit`` tokens an answer.
    share : float
        Part of each shard that is given prompts, while there are any.
    """

    target: str
    dtype: str
    taps: list[int]
    given: list[str]
    seed: int
    batch: int
    limit: int
    share: float


def save_shard(path: Path, sources: Sequence[Source], prompts: Any, answers: Any, states: Any) -> None:
    """Write a shard under another name, then rename it: what exists is whole."""
    from safetensors.torch import save_file

    tensors = {
        "ids": torch.tensor([t for p, a in zip(prompts, answers, strict=True) for t in (*p, *a)], dtype=torch.int32),
        "prompt": torch.tensor([len(p) for p in prompts], dtype=torch.int32),
        "answer": torch.tensor([len(a) for a in answers], dtype=torch.int32),
        "states": torch.cat(states),
    }
    text = json.dumps([[source.name, source.text] for source in sources])
    part = path.with_suffix(".part")
    save_file(tensors, str(part), metadata={"sources": text})
    os.replace(part, path)


def count_answer_tokens(folder: Path) -> int:
    """Return the answer tokens in all shards of a directory."""
    from safetensors import safe_open

    total = 0
    for path in sorted(folder.glob("shard-*.safetensors")):
        with safe_open(str(path), "pt") as file:
            total += int(file.get_tensor("answer").sum())
    return total


def held_out_texts(offline: bool) -> list[str]:
    """Return all prompts of the tasks that heads are scored on."""
    return [prompt.text for prompt in load_prompts(",".join(HELD_OUT), offline=offline)]


def open_model(name: str, dtype: str, device: str, offline: bool) -> tuple[LanguageModel, Any]:
    """Load a target and its tokenizer, to decode in batches."""
    loaded = load_model(name, dtype=dtype, device=device, offline=offline)
    use_grouped_attention(loaded.model)
    return LanguageModel(loaded.model), loaded.tokenizer


def answer(lm: LanguageModel, tokenizer: Any, path: Path, sources: Sequence[Source], making: Making) -> int:
    """Write a shard of greedy answers; return their tokens. Prompts of more than LONGEST_PROMPT are left out."""
    rows = [(source, encode(tokenizer, source.text, True)) for source in sources]
    rows = [row for row in rows if len(row[1]) <= LONGEST_PROMPT]
    prompts = [ids for _, ids in rows]
    lm.tap(making.taps)
    answers, states = decode(lm, prompts, making.limit, greedy, eos_ids_of(lm.model, tokenizer))
    lm.taps = ()
    save_shard(path, [source for source, _ in rows], prompts, answers, states)
    return sum(map(len, answers))


def generate(folder: Path, making: Making, tokens: int, dev: tuple[int, int], device: str, offline: bool) -> None:
    """Write shards until there are ``tokens`` answer tokens; goes on where an earlier run ended.

    Parameters
    ----------
    folder : Path
    making : Making
    tokens : int
    dev : (offset, count)
        Prompts of each held-out task whose answers, in the target's own dtype, go into ``dev.safetensors``, which is
        never trained on.
    device : str
    offline : bool
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "making.json"
    asked = json.dumps(making.__dict__, indent=1)
    if settings.exists() and settings.read_text() != asked:
        raise SystemExit(f"{settings}: made with other settings; give another directory")
    settings.write_text(asked)
    guard = Guard(held_out_texts(offline))
    given, refused = read_given(making.given, guard)
    random.Random(making.seed).shuffle(given)
    print(f"{len(given)} given prompts, {refused} left out for overlap with held-out ones", flush=True)
    if not (folder / "dev.safetensors").exists():
        held = load_prompts(",".join(HELD_OUT), offset=dev[0], limit=dev[1], offline=offline)
        lm, tokenizer = open_model(making.target, "auto", device, offline)
        answer(lm, tokenizer, folder / "dev.safetensors", [Source(p.id, p.text) for p in held], making)
    lm, tokenizer = open_model(making.target, making.dtype, device, offline)
    have, start, fresh = count_answer_tokens(folder), time.monotonic(), 0
    done = len(list(folder.glob("shard-*.safetensors")))
    of_given = round(making.batch * making.share)
    for number in range(10**6):
        if have >= tokens:
            break
        path = folder / f"shard-{number:05d}.safetensors"
        if path.exists():
            continue
        mine = given[number * of_given : (number + 1) * of_given]
        key = hashlib.sha256(f"{making.seed}/{number}".encode()).digest()
        written = write_prompts(lm, tokenizer, making.batch - len(mine), int.from_bytes(key[:4], "little"), guard)
        new = answer(lm, tokenizer, path, [*mine, *written], making)
        done, have, fresh = done + 1, have + new, fresh + new
        rate = fresh / (time.monotonic() - start)
        print(
            f"shard {number}: {len(mine)} given, {len(written)} written prompts, {new} tokens; "
            f"{have}/{tokens}, {rate:.0f}/s, {max(0, tokens - have) / rate / 60:.0f} min left",
            flush=True,
        )


@dataclass
class Sequences:
    """Answers in memory: ids, where the answer begins, and float16 states of all tokens but the last."""

    ids: list[np.ndarray]
    begins: list[int]
    states: list[torch.Tensor]
    sources: list[Source]

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.ids)


def read_sequences(paths: Iterable[Path]) -> Sequences:
    """Read shards."""
    from safetensors import safe_open

    found = Sequences([], [], [], [])
    for path in paths:
        with safe_open(str(path), "pt") as file:
            ids, prompt, answer, states = (file.get_tensor(k) for k in ("ids", "prompt", "answer", "states"))
            sources = [Source(*pair) for pair in json.loads(file.metadata()["sources"])]
        i = j = 0
        for p, a, source in zip(prompt.tolist(), answer.tolist(), sources, strict=True):
            found.ids.append(ids[i : i + p + a].numpy())
            found.begins.append(p)
            found.states.append(states[j : j + p + a - 1])
            found.sources.append(source)
            i, j = i + p + a, j + p + a - 1
    return found
