"""A whole capture: prompts in, a trace directory out."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..engines.processes import own_directory, rank, value_of_first
from ..engines.transformers.load import BUILT_IN, DTYPES, check_name, check_placing
from ..errors import CaptureError, Problems, UsageError, unknown_name
from ..files import names_in, reaching
from ..provenance import software
from ..records import RequestRecord
from ..rules.settings import STRICT, Policy
from ..stats import ratio_interval
from ..trace.interrupt import uninterrupted
from ..trace.join import NOTE, parse_shard, shard_path
from ..trace.manifest import MANIFEST, PLANNED, TIMING, Manifest
from ..trace.reader import load_manifest
from ..trace.schema import DIVERGENCES, MIN_TOP_K
from .drafters import check_overrides, check_spec, parse_layer_ids
from .memory import Load, Memory, check_memory, plan_memory, pretended_devices
from .prompts import Encoder, encode, parse_date, parse_template_args
from .tasks import Message, Prompt, Prompts, check_tasks, load_prompts, prompt_formats, split_tasks, without_folder
from .tasks.shots import Shots, check_shots, parse_shots

if TYPE_CHECKING:
    from .loop import Decoded

__all__ = ["Plan", "Summary", "capture", "capture_with", "encode", "make_manifest", "make_requests"]

RULES = ("strict", "asd")
STOPS = ("natural", "fixed")
TURNS = ("first", "all")
LOGITS_DTYPES = ("model", "float32")

Progress = Callable[[str, int, int, int], None]
"""Called with the activity, how much is done, how much there is in all, and the tokens so far; see :func:`capture`."""


def silent(what: str, done: int, total: int, tokens: int) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class Plan:
    """Everything that a capture is asked to do; checked on construction, before anything is loaded.

    Attributes
    ----------
    out : Path
        Trace directory.
    target, drafter, task : str
        Names as on the command line.
    draft_layer_ids, draft_rope_theta, draft_anchor : optional
        What the checkpoint of a head does not say, or says wrong; see :data:`asdsim.capture.drafters.FLAGS`.
    limit, offset : int
        Prompts of each task.
    K : int
        Draft tokens per step.
    max_new_tokens : int
        Token limit of each request.
    policy : Policy or None
        Rule that decides while capturing; None is strict.
    stop : {"natural", "fixed"}
    top_k : int
        Logits kept per row.
    divergences : tuple of str
    chat_template : bool
        Put prompts through the target's chat template, where it has one.
    chat_template_args : tuple of str
        ``NAME=VALUE`` for the template.
    template_date : str, optional
        What a template with a clock takes for today: YYYY-MM-DD.
    seed : int
    revision, dtype, device, logits_dtype, offline, trust_remote_code
        See :func:`asdsim.engines.transformers.load.load_model`.
    resume : bool
        Continue a trace that is not finished.
    flush_every : int, optional
        Store after so many requests; by default the trace writer decides by the clock.
    shard : str, optional
        ``"i/n"``: only every n-th request from the i-th on, into the directory of that shard beside ``out``.
    shuffle : int, optional
        Seed of the order of each task's prompts; they keep their own without it.
    turns : {"first", "all"}
        Whether later turns of the user are asked, each a request whose prompt holds the strict answers before.
    shots : str, optional
        ``"N"`` or ``"N:PATH"``: worked examples before each question; which are drawn, the seed decides.
    device_map, tp, quantize : optional
        How the target is laid out and rounded, see :func:`asdsim.engines.transformers.load.load_model`.
    memory : str
        ``check``: refuse to load what does not fit; ``ignore``; ``plan`` is for :func:`memory_of`.
    """

    out: Path
    target: str
    drafter: str
    task: str
    limit: int | None = None
    offset: int = 0
    K: int = 7
    max_new_tokens: int = 96
    policy: Policy | None = None
    stop: str = "natural"
    top_k: int = MIN_TOP_K
    divergences: tuple[str, ...] = ()
    chat_template: bool = True
    chat_template_args: tuple[str, ...] = ()
    template_date: str | None = None
    seed: int = 0
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    logits_dtype: str = "model"
    offline: bool = False
    trust_remote_code: bool = False
    resume: bool = False
    flush_every: int | None = None
    draft_layer_ids: str | None = None
    draft_rope_theta: float | None = None
    draft_anchor: str | None = None
    shard: str | None = None
    shuffle: int | None = None
    turns: str = "first"
    shots: str | None = None
    device_map: str | None = None
    tp: int | None = None
    quantize: str | None = None
    memory: str = "check"

    def __post_init__(self) -> None:
        problems = Problems()
        checks: list[Callable[[], object]] = [
            lambda: check_output(self.folder, resume=self.resume),
            lambda: check_name(self.target),
            self._check_drafter,
            lambda: check_tasks(self.task),
            lambda: parse_template_args(self.chat_template_args),
            lambda: parse_date(self.template_date),
            self._check_turns,
            self._check_shots,
            lambda: check_placing(self.device, self.device_map, self.tp, self.quantize),
            lambda: check_memory(self.memory),
            *(
                partial(_at_least, flag, value, lowest)
                for flag, value, lowest in (
                    ("K", self.K, 1), ("max-new-tokens", self.max_new_tokens, 1), ("top-k", self.top_k, MIN_TOP_K),
                    ("offset", self.offset, 0), ("limit", self.limit, 1), ("flush-every", self.flush_every, 1),
                )
            ),
            *(
                partial(_one_of, kind, word, known)
                for kind, word, known in (
                    ("stop rule", self.stop, STOPS), ("turns", self.turns, TURNS), ("dtype", self.dtype, DTYPES),
                    ("logits dtype", self.logits_dtype, LOGITS_DTYPES),
                    *(("divergence", item, DIVERGENCES) for item in self.divergences),
                )
            ),
        ]  # fmt: skip
        for check in checks:
            with problems.noted():
                check()
        problems.end()

    def _check_drafter(self) -> None:
        name, argument = check_spec(self.drafter)
        if name == "model":
            check_name(argument)
        check_overrides(name, self.overrides)
        if self.draft_rope_theta is not None and not 0 < self.draft_rope_theta < math.inf:
            raise UsageError(f"--draft-rope-theta {self.draft_rope_theta:g} is not a base", fix="give a number above 0")
        if self.divergences and name == "lookup":
            raise UsageError("drafter lookup gives no distribution, so no divergences", fix="leave --divergences out")

    def _check_turns(self) -> None:
        if self.turns == "all" and self.shard is not None:
            raise UsageError("--turns all and --shard: turns of one prompt cannot be parted", fix="leave one out")

    def _check_shots(self) -> None:
        if self.shots is not None:
            check_shots(parse_shots(self.shots), (task.partition(":")[0] for task in split_tasks(self.task)))

    @property
    def examples(self) -> Shots | None:
        """Worked examples before each question."""
        return parse_shots(self.shots, self.seed)

    @property
    def folder(self) -> Path:
        """Directory that is written: ``out``, or that of the shard."""
        return self.out if self.shard is None else shard_path(self.out, *parse_shard(self.shard))

    @property
    def overrides(self) -> dict[str, Any]:
        """What options say of a head besides its checkpoint; None where they say nothing."""
        layers = None if self.draft_layer_ids is None else parse_layer_ids(self.draft_layer_ids)
        return {"layer_ids": layers, "rope_theta": self.draft_rope_theta, "anchor": self.draft_anchor}

    @property
    def loading(self) -> dict[str, Any]:
        """Arguments for :func:`asdsim.engines.transformers.load.load_model` that target and drafter share."""
        return {
            "dtype": self.dtype,
            "device": self.device,
            "offline": self.offline,
            "trust_remote_code": self.trust_remote_code,
        }

    @property
    def placing(self) -> dict[str, Any]:
        """More such arguments, for the target only."""
        return {"device_map": self.device_map, "tp": self.tp, "quantize": self.quantize}


def _at_least(flag: str, value: int | None, lowest: int) -> None:
    if value is not None and value < lowest:
        raise UsageError(f"--{flag} {value} is too small", fix=f"give at least {lowest}")


def _one_of(kind: str, word: str, known: Sequence[str]) -> None:
    if word not in known:
        raise unknown_name(kind, word, list(known))


@dataclass
class Summary:
    """What a capture did.

    Attributes
    ----------
    requests, steps, drafted, accepted, completion_tokens : int
        Over the requests decoded in this run.
    skipped : int
        Requests that an earlier run had finished.
    seconds : float
        Spent decoding and recording, loading left out.
    ledger : list of float
        Regret spent by each request, in logits.
    each : list of (int, int, int)
        Steps, tokens and accepted draft tokens of each request.
    interrupted : bool
    uncovered : bool
        Whether grids that were covered are so no longer, since requests came in.
    problems : list of str
        Why step times are not to be trusted; see :mod:`asdsim.capture.passes`.
    """

    requests: int = 0
    skipped: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    ledger: list[float] = field(default_factory=list)
    each: list[tuple[int, int, int]] = field(default_factory=list)
    interrupted: bool = False
    uncovered: bool = False
    problems: list[str] = field(default_factory=list)

    def count(self, result: Decoded) -> None:
        """Add a request that was decoded."""
        accepted = sum(outcome.accepted for outcome in result.outcomes)
        self.requests += 1
        self.steps += len(result.outcomes)
        self.drafted += sum(outcome.num_draft_tokens for outcome in result.outcomes)
        self.accepted += accepted
        self.completion_tokens += len(result.tokens)
        self.ledger.append(result.ledger)
        self.each.append((len(result.outcomes), len(result.tokens), accepted))

    def row(self) -> dict[str, Any]:
        """Return plain numbers under their usual names; None where nothing was decoded.

        Intervals are 95 %, over requests; None for fewer than three.
        """

        def ratio(a: float, b: float) -> float | None:
            return a / b if b else None

        each = np.array(self.each, np.float64).reshape(-1, 3)
        return {
            "requests": self.requests,
            "skipped": self.skipped,
            "num_spec_steps": self.steps,
            "num_draft_tokens": self.drafted,
            "num_accepted_draft_tokens": self.accepted,
            "completion_tokens": self.completion_tokens,
            "mean_acceptance_length": ratio(self.completion_tokens, self.steps),
            "mean_acceptance_length_interval": ratio_interval(each[:, 1], each[:, 0]),
            "accepted_per_proposal": ratio(self.accepted, self.steps),
            "accepted_per_proposal_interval": ratio_interval(each[:, 2], each[:, 0]),
            "regret_spent_mean": ratio(math.fsum(self.ledger), len(self.ledger)),
            "seconds": round(self.seconds, 3),
            "tokens_per_second": ratio(self.completion_tokens, self.seconds),
            "interrupted": self.interrupted,
            "timing_problems": self.problems,
        }


def check_output(out: Path, *, resume: bool) -> None:
    """Refuse an output directory that holds something else; nothing is written.

    Raises
    ------
    UsageError
        If ``out`` is a file, holds a trace (unless ``resume``) or holds other files.
    """
    with reaching(out):
        there = out.exists()
    if there and not out.is_dir():
        raise UsageError("the output is a file, not a directory", where=str(out), fix="choose another -o")
    if not there or resume:
        return
    if (out / MANIFEST).exists():
        raise UsageError(
            "the output directory already holds a trace", where=str(out), fix="choose another -o, or add --resume"
        )
    if names_in(out):
        raise UsageError("the output directory is not empty", where=str(out), fix="choose another -o, or add --resume")


def encoder_of(tokenizer: Any, plan: Plan) -> Encoder:
    """Return what turns the prompts of a plan into token ids.

    A template with a clock is given the date of the trace that the run continues or is a shard of; today's otherwise.
    """
    encoder = Encoder(tokenizer, plan.chat_template, parse_template_args(plan.chat_template_args))
    if encoder.has_clock or plan.template_date:
        encoder = replace(encoder, day=parse_date(plan.template_date) or _recorded_date(plan))
    return encoder


def _recorded_date(plan: Plan) -> date | None:
    folders = [plan.folder] if plan.resume else []
    if plan.shard is not None:
        of = parse_shard(plan.shard)[1]
        folders += [shard_path(plan.out, index + 1, of) for index in range(of)]
    for folder in folders:
        if (folder / MANIFEST).is_file():
            stored = load_manifest(folder)[0]
            # Traces from before the date was recorded were encoded on the day they began.
            text = stored.settings.get("template_date") or (stored.notes.get("created") or "")[:10]
            return parse_date(text or None)
    return None


def make_requests(
    target: Any, prompts: Iterable[Prompt], plan: Plan, encoder: Encoder | None = None
) -> Iterator[RequestRecord]:
    """Turn prompts into requests with token ids, one by one.

    Raises
    ------
    CaptureError
        If the target has no tokenizer, or its chat template fails.
    """
    if target.tokenizer is None:
        raise CaptureError(
            "the target has no tokenizer", where=plan.target, fix="put tokenizer.json into the model's directory"
        )
    encoder = encoder or encoder_of(target.tokenizer, plan)
    for prompt in prompts:
        yield RequestRecord(
            request_id=prompt.id,
            task=prompt.task,
            prompt_ids=tuple(encoder.ids(prompt)),
            prompt_text=prompt.text,
            reference=prompt.reference,
            max_new_tokens=plan.max_new_tokens,
            eos_ids=target.eos_ids,
            stop=plan.stop,
        )


def make_manifest(target: Any, drafter: Any, plan: Plan, encoder: Encoder, **settings: Any) -> Manifest:
    """Return the manifest of a capture that has yet to begin; ``settings`` describe its prompts."""
    import torch

    policy = plan.policy
    rule: dict[str, Any] = {"name": "strict"}
    if policy is not None:
        rule = {"name": "asd", "B": policy.budget, "g": policy.gate, "M": policy.cap, "semantics": policy.semantics}
    versions = software("torch", "transformers", "numpy")
    if target.lm.device.type == "cuda":
        versions["gpu"] = torch.cuda.get_device_name(target.lm.device)
        versions["cuda"] = str(torch.version.cuda)
    return Manifest(
        target=target.describe(),
        drafter=drafter.describe(),
        vocab_size=target.vocab_size,
        num_draft_tokens=plan.K,
        top_k=min(plan.top_k, target.vocab_size),
        max_new_tokens=plan.max_new_tokens,
        stop=plan.stop,
        rule=rule,
        tasks=[without_folder(task) for task in check_tasks(plan.task)],
        seed=plan.seed,
        logits_dtype=target.logits_dtype,
        device=target.lm.device.type,
        settings={
            "limit": plan.limit,
            "offset": plan.offset,
            **({} if plan.shuffle is None else {"shuffle": plan.shuffle}),
            **({} if plan.examples is None else {"shots": plan.examples.count}),
            "divergences": list(plan.divergences),
            **encoder.settings(),
            **settings,
        },
        software=versions,
        notes={
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "threads": torch.get_num_threads(),
            "prompt_formats": prompt_formats(plan.task, plan.examples),
            **({"placement": target.placement} if getattr(target, "placement", None) else {}),
        },
    )


def with_later_turns(
    prompt: Prompt, first: RequestRecord, encoder: Encoder, answer: Callable[[RequestRecord], str]
) -> Iterator[RequestRecord]:
    """Yield the request of a prompt, then one for each later turn of its user.

    Parameters
    ----------
    prompt : Prompt
    first : RequestRecord
        The first turn.
    encoder : Encoder
    answer : callable
        Returns the strict answer to a request, which the prompt of the next turn holds: so prompts are the same for
        every setting and rule.
    """
    yield first
    request, messages = first, list(prompt.asked)
    for turn, text in enumerate(prompt.later, 2):
        messages += [Message("assistant", answer(request)), Message("user", text)]
        whole = "\n\n".join(message.content for message in messages)
        asked = Prompt(f"{prompt.id}/turn-{turn}", prompt.task, whole, messages=tuple(messages))
        request = replace(
            first, request_id=asked.id, prompt_ids=tuple(encoder.ids(asked)), prompt_text=whole, reference=None
        )
        yield request


def capture(
    plan: Plan,
    progress: Progress = silent,
    note: Callable[[str], None] = lambda text: None,
) -> Summary:
    """Run a capture to its end, or to Ctrl-C.

    Parameters
    ----------
    plan : Plan
    progress : callable
        Called with (``"read"``, ``"encode"`` or ``"capture"``, how many so far, how many in all, tokens so far) after
        each prompt that is read or encoded, and each request that is decoded. While prompts are read, the total is not
        known and is 0.
    note : callable
        Called with each remark on prompts that are not used as they stand.

    Returns
    -------
    Summary
        ``interrupted`` is set after Ctrl-C; what was decoded until then is kept.

    Raises
    ------
    AsdsimError
        On anything that a user can mend. Nothing is written before all prompts and models have been checked.
    """
    if rank():  # of processes that share a model only the first writes
        plan = replace(plan, out=own_directory(plan.folder).parent / plan.out.name)
    return capture_with(*load(plan, progress), plan, progress, note)


def prompts_of(plan: Plan, progress: Progress = silent) -> Prompts:
    """Load the prompts of a plan."""
    return load_prompts(
        plan.task, limit=plan.limit, offset=plan.offset, offline=plan.offline, shuffle=plan.shuffle,
        shots=plan.examples, progress=lambda number: progress("read", number, 0, 0),
    )  # fmt: skip


def load(plan: Plan, progress: Progress = silent) -> tuple[Any, Any, Prompts]:
    """Load the target, the drafter and the prompts of a plan; see :func:`capture`."""
    prompts = prompts_of(plan, progress)
    from ..engines.transformers.load import load_target
    from .drafters import check_head, make_drafter

    checkpoint = check_head(plan.drafter, num_draft_tokens=plan.K, overrides=plan.overrides, **plan.loading)
    placing = dict(plan.placing)
    if plan.memory != "ignore" and plan.target not in BUILT_IN:  # those are small
        memory = memory_of(plan, prompts, checkpoint)
        memory.refuse(plan.target)
        placing["places"] = memory.places or None
    target = load_target(plan.target, logits_dtype=plan.logits_dtype, revision=plan.revision, **plan.loading, **placing)
    drafter = make_drafter(
        plan.drafter, target, keep_logits=bool(plan.divergences), overrides=plan.overrides, checkpoint=checkpoint,
        **plan.loading,
    )  # fmt: skip
    return target, drafter, prompts


@dataclass(frozen=True)
class Survey:
    """What is known of all prompts before the first is decoded.

    Attributes
    ----------
    manifest : Manifest
        Of the whole capture, before it begins.
    notes : list of str
        Remarks on prompts that are not used as they stand.
    """

    manifest: Manifest
    notes: list[str]


class Run:
    """Models and prompts of a capture, ready to decode.

    Each prompt is encoded when it is needed: the token ids of a million prompts would take gigabytes.

    Parameters
    ----------
    target, drafter : Target, Drafter
    prompts : sequence of Prompt
    plan : Plan
    """

    def __init__(self, target: Any, drafter: Any, prompts: Sequence[Prompt], plan: Plan) -> None:
        import torch

        from .record import Recorder

        torch.manual_seed(plan.seed)
        self.target, self.drafter, self.prompts, self.plan = target, drafter, prompts, plan
        self.encoder = None if target.tokenizer is None else encoder_of(target.tokenizer, plan)
        if self.encoder is not None:
            self.encoder = replace(self.encoder, day=value_of_first(self.encoder.day))
        self.recorder = Recorder(plan.top_k, plan.divergences)
        self._known: dict[str, list[int]] = {}

    def survey(self, seen: Callable[[Prompt, RequestRecord], None]) -> Survey:
        """Encode and check all prompts, without keeping their token ids.

        Parameters
        ----------
        seen : callable
            Called with each prompt and the request of its first turn.

        Raises
        ------
        CaptureError
            See :func:`make_requests` and :func:`asdsim.capture.loop.check_request`.
        """
        from .loop import beyond, check_request, note_on_positions

        plan, first, later = self.plan, hashlib.sha256(), hashlib.sha256(b"[")
        over = talks = turns = 0
        for number, prompt in enumerate(self.prompts):
            request = self._first(prompt)
            check_request(self.target, self.drafter, request, plan.K)
            first.update(json.dumps([request.request_id, request.prompt_ids]).encode())
            later.update((", " if number else "").encode() + json.dumps(list(prompt.later)).encode())
            over += beyond(self.drafter, request, plan.K)
            talks, turns = talks + bool(prompt.later), turns + len(prompt.later)
            seen(prompt, request)
        later.update(b"]")
        settings, total = {"prompts_sha256": first.hexdigest()}, len(self.prompts)
        if plan.turns == "all":
            settings |= {"turns": "all", "later_turns_sha256": later.hexdigest()}
            total += turns
        assert self.encoder is not None  # without one, no prompt could have been encoded
        manifest = make_manifest(self.target, self.drafter, plan, self.encoder, **settings)
        notes = notes_on(self.encoder.noticed, talks, turns, asked=plan.turns == "all")
        if over:
            notes.append(note_on_positions(self.drafter, over, len(self.prompts)))
        return Survey(manifest.replace(notes={**manifest.notes, PLANNED: total}), notes)

    def _first(self, prompt: Prompt) -> RequestRecord:
        return next(make_requests(self.target, [prompt], self.plan, self.encoder))

    def turns(self, number: int) -> Iterator[RequestRecord]:
        """Yield the requests of a prompt: the first turn and, if all turns are asked, the later ones."""
        prompt = self.prompts[number]
        first = self._first(prompt)
        if self.encoder is None or self.plan.turns != "all":
            return iter((first,))
        return with_later_turns(prompt, first, self.encoder, self._answer)

    def decode(self, request: RequestRecord) -> Decoded:
        """Decode a request under the rule of the plan, and record its steps."""
        from .loop import decode

        plan = self.plan
        result = decode(self.target, self.drafter, request, plan.policy or STRICT, plan.K, self.recorder)
        if plan.policy is None and plan.turns == "all":
            self._known = {request.request_id: result.tokens}
        return result

    def _answer(self, request: RequestRecord) -> str:
        from .loop import decode

        tokens = self._known.pop(request.request_id, None)
        if tokens is None:  # captured before, or under another rule
            tokens = decode(self.target, self.drafter, request, STRICT, self.plan.K).tokens
        return str(self.target.tokenizer.decode(tokens, skip_special_tokens=True))


LONGEST = 1000
"""How many prompts, those with the most text, are searched for the one with the most tokens."""


def memory_of(plan: Plan, prompts: Prompts | None = None, checkpoint: Any = None) -> Memory:
    """Return the memory that a capture takes, before any weight is read; see :func:`.memory.plan_memory`.

    Parameters
    ----------
    plan : Plan
    prompts : Prompts, optional
        Loaded where left out.
    checkpoint : Checkpoint, optional
        The head, read where left out.
    """
    from ..engines.transformers.text import load_tokenizer
    from .drafters import check_head

    if prompts is None:
        prompts = prompts_of(plan)
    if checkpoint is None:
        checkpoint = check_head(plan.drafter, num_draft_tokens=plan.K, overrides=plan.overrides, **plan.loading)
    longest = 0
    with contextlib.suppress(CaptureError):  # no tokenizer: said once the target is loaded
        source = {"source": ""} if plan.target in BUILT_IN else {}
        encoder = encoder_of(
            load_tokenizer({"name": plan.target, "revision": plan.revision, **source}, offline=plan.offline), plan
        )
        longest = max((len(encoder.ids(prompt)) for prompt in prompts.longest(LONGEST)), default=0)
    return plan_memory(
        plan.target, plan.drafter, Load(plan.K, longest + plan.max_new_tokens + plan.K), checkpoint=checkpoint,
        devices=pretended_devices(plan.memory), revision=plan.revision, **plan.loading, **plan.placing,
    )  # fmt: skip


def capture_with(
    target: Any,
    drafter: Any,
    prompts: Sequence[Prompt],
    plan: Plan,
    progress: Progress = silent,
    note: Callable[[str], None] = lambda text: None,
) -> Summary:
    """Do what :func:`capture` does with loaded models and prompts."""
    import torch

    from ..trace.writer import TraceWriter
    from .passes import ROUNDS, PassTimes
    from .vocabulary import keep_vocabulary

    run, encoded = Run(target, drafter, prompts, plan), count(1)
    survey = run.survey(lambda *_: progress("encode", next(encoded), len(prompts), 0))
    manifest = survey.manifest
    for text in survey.notes:
        note(text)
    chosen = range(len(prompts))
    if plan.shard is not None:
        index, of = parse_shard(plan.shard)
        chosen = chosen[index - 1 :: of]
        split = {"index": index, "of": of, "requests": len(prompts)}
        manifest = manifest.replace(notes={**manifest.notes, NOTE: split, PLANNED: len(chosen)})
    total = manifest.planned
    fresh = not (plan.folder / MANIFEST).exists()
    summary, times = Summary(), PassTimes(target, drafter, plan.K)
    rounds = {round(n * (total - 1) / (ROUNDS - 1)) for n in range(ROUNDS)}
    began = time.perf_counter()
    with (TraceWriter.create if fresh else TraceWriter.resume)(plan.folder, manifest) as writer:
        done = set(writer.completed)
        try:
            for number, request in enumerate(chain.from_iterable(map(run.turns, chosen))):
                if request.request_id in done:
                    summary.skipped += 1
                else:
                    result = run.decode(request)
                    with uninterrupted():
                        if writer.manifest.grids:  # they covered the requests that were there
                            writer.update_manifest(grids=[])
                            summary.uncovered = True
                        writer.add_request(request, result.steps, number)
                        summary.count(result)
                        if plan.flush_every and summary.requests % plan.flush_every == 0:
                            writer.flush()
                    times.note_steps(result.steps)
                    if number in rounds:
                        times.measure(request)
                progress("capture", number + 1, total, summary.completion_tokens)
        except KeyboardInterrupt:
            summary.interrupted = True
        with uninterrupted():
            if (timed := times.record(torch.get_num_threads())) is not None:
                writer.update_manifest(notes={**writer.manifest.notes, TIMING: timed})
                summary.problems = timed["problems"]
            keep_vocabulary(writer, target.tokenizer)
    summary.seconds = time.perf_counter() - began
    return summary


def notes_on(noticed: Mapping[str, int], talks: int, turns: int, asked: bool) -> list[str]:
    """Return remarks on prompts that are not used as they stand.

    Parameters
    ----------
    noticed : mapping
        What the :class:`.prompts.Encoder` noticed, and how often.
    talks, turns : int
        Prompts with later turns, and how many later turns they have.
    asked : bool
        Whether later turns are asked.
    """
    counts = dict(noticed)
    if talks:
        fate = "are asked, each after the strict answers to those before" if asked else "are left out"
        counts[f"have more than one turn: {turns} later turns {fate}"] = talks
    return [f"{number} prompt{'' if number == 1 else 's'} {text}" for text, number in counts.items()]
