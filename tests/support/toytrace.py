"""Valid random traces without a model: a toy target and a toy drafter that hash the prefix.

Both are functions of the prefix alone, as greedy decoding is, so any step of the graph can be made at will. Logits are
multiples of a quarter: ties, at the top too, are common.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from asdsim.records import NO_PARENT, RequestRecord, StepRecord
from asdsim.trace.manifest import Manifest
from asdsim.trace.writer import TraceWriter


@dataclass(frozen=True)
class ToyModel:
    """A target and a drafter over a small vocabulary.

    ``widths`` are the block lengths K that the drafter may choose at a prefix; ``agree`` the chance that a draft token
    is the target's choice. The ids in ``eos_ids`` end a request that stops naturally.
    """

    seed: int = 0
    vocab_size: int = 40
    top_k: int = 8
    widths: tuple[int, ...] = (7,)
    agree: float = 0.6
    eos_ids: tuple[int, ...] = (2, 3)
    logprobs: bool = True
    divergences: tuple[str, ...] = ()

    def logits(self, prefix: tuple[int, ...]) -> np.ndarray:
        """Return the target's logits after a prefix, float32 (V,)."""
        rng = np.random.default_rng([self.seed, 1, *prefix])
        row = np.round(rng.gumbel(0.0, 2.0, self.vocab_size) * 4) / 4
        row[list(self.eos_ids)] -= 2.0
        return row.astype(np.float32)

    def draft(self, prefix: tuple[int, ...]) -> list[int]:
        """Return the draft block at a prefix."""
        rng = np.random.default_rng([self.seed, 2, *prefix])
        block: list[int] = []
        for _ in range(int(rng.choice(self.widths))):
            row = self.logits(prefix + tuple(block))
            order = np.lexsort((np.arange(len(row)), -row))
            near = int(order[min(int(rng.geometric(0.4)), len(order) - 1)])
            block.append(int(order[0]) if rng.random() < self.agree else near)
        return block

    def step(
        self,
        request: RequestRecord,
        generated: tuple[int, ...],
        step_id: int,
        parent: tuple[int, int] = (NO_PARENT, NO_PARENT),
        wave: int = 0,
    ) -> StepRecord:
        """Return the step that stands after ``generated`` tokens."""
        prefix = request.prompt_ids + generated
        block = self.draft(prefix)
        rows = np.stack([self.logits(prefix + tuple(block[:i])) for i in range(len(block) + 1)])  # [K + 1, V]
        order = np.argsort(-rows, axis=1, kind="stable")
        drafts = np.array(block, np.int32)
        at = np.arange(len(block))
        wide = rows.astype(np.float64)
        lse = np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1)) + wide.max(1)
        logp = wide - lse[:, None]
        rng = np.random.default_rng([self.seed, 3, *prefix])
        return StepRecord(
            step_id=step_id,
            parent_step_id=parent[0],
            parent_accepted=parent[1],
            start_pos=len(generated),
            draft_ids=drafts,
            argmax_ids=order[:, 0].astype(np.int32),
            draft_logits=rows[at, drafts],
            ranks=(order[:-1] == drafts[:, None]).argmax(1).astype(np.int32),
            top_ids=order[:, : self.top_k].astype(np.int32),
            top_logits=np.take_along_axis(rows, order[:, : self.top_k], 1),
            logsumexp=lse.astype(np.float32),
            entropy=(-(np.exp(logp) * logp).sum(1)).astype(np.float32),
            draft_logprobs=-rng.random(len(block)).astype(np.float32) if self.logprobs else None,
            divergences={name: rng.random(len(block)).astype(np.float32) for name in self.divergences},
            draft_us=float(np.float32(rng.gamma(5.0, 100.0))),
            verify_us=float(np.float32(rng.gamma(9.0, 100.0))),
            select_us=float(np.float32(rng.gamma(2.0, 5.0))),
            wave=wave,
        )

    def outcomes(self, request: RequestRecord, step: StepRecord) -> list[tuple[int, tuple[int, ...], bool]]:
        """Return what a rule can make of a step: accepted drafts, tokens committed, and whether the request goes on.

        The first is what strict matching does. Written token by token, to be read against the definition.
        """
        eos = request.eos_ids if request.stop == "natural" else ()
        left = request.max_new_tokens - step.start_pos
        found: list[tuple[int, tuple[int, ...], bool]] = []
        committed: tuple[int, ...] = ()
        for i in range(step.num_draft_tokens):
            if len(committed) == left or (committed and committed[-1] in eos):
                break
            x, y = int(step.draft_ids[i]), int(step.argmax_ids[i])
            if x != y:
                found.append((i, (*committed, y), y not in eos and len(committed) + 1 < left))
            committed += (x,)
        if len(committed) == left or (committed and committed[-1] in eos):
            found.append((len(committed), committed, False))
        else:
            y = int(step.argmax_ids[-1])
            found.append((len(committed), (*committed, y), y not in eos and len(committed) + 1 < left))
        return found

    def decode(self, request: RequestRecord) -> list[StepRecord]:
        """Decode a request strictly and return its steps."""
        steps: list[StepRecord] = []
        generated: tuple[int, ...] = ()
        parent = (NO_PARENT, NO_PARENT)
        goes_on = request.max_new_tokens > 0
        while goes_on:
            steps.append(self.step(request, generated, len(steps), parent))
            accepted, tokens, goes_on = self.outcomes(request, steps[-1])[0]
            parent = (len(steps) - 1, accepted)
            generated += tokens
        return steps

    def cover(
        self, request: RequestRecord, steps: list[StepRecord], count: int, wave: int = 1, seed: int = 0
    ) -> list[StepRecord]:
        """Return up to ``count`` further steps of a request, at outcomes that no step stands at yet."""
        rng = np.random.default_rng([self.seed, 4, seed])
        prefixes: dict[int, tuple[int, ...]] = {}
        taken = {(step.parent_step_id, step.parent_accepted) for step in steps}
        free: list[tuple[int, int, tuple[int, ...]]] = []

        def open_edges(step: StepRecord) -> None:
            if step.parent_step_id == NO_PARENT:
                prefixes[step.step_id] = ()
            else:
                before = self.outcomes(request, everything[step.parent_step_id])
                tokens = next(tokens for accepted, tokens, _ in before if accepted == step.parent_accepted)
                prefixes[step.step_id] = prefixes[step.parent_step_id] + tokens
            for accepted, tokens, goes_on in self.outcomes(request, step):
                if goes_on and (step.step_id, accepted) not in taken:
                    free.append((step.step_id, accepted, prefixes[step.step_id] + tokens))

        everything = list(steps)
        for step in steps:
            open_edges(step)
        for _ in range(count):
            if not free:
                break
            parent, accepted, generated = free.pop(int(rng.integers(len(free))))
            taken.add((parent, accepted))
            new = self.step(request, generated, len(everything), (parent, accepted), wave)
            everything.append(new)
            open_edges(new)
        return everything[len(steps) :]


RAGGED = ToyModel(widths=(0, 1, 2, 5, 7, 16))


def toy_manifest(model: ToyModel = RAGGED, **fields: object) -> Manifest:
    """Return the manifest of a trace of a toy model."""
    base = Manifest(
        target={"name": "toy-target", "revision": "r1", "sha256": "00" * 32},
        drafter={"name": "toy-drafter", "agree": model.agree},
        vocab_size=model.vocab_size,
        num_draft_tokens=max(model.widths),
        top_k=model.top_k,
        max_new_tokens=24,
        tasks=["toy-a", "toy-b"],
        seed=model.seed,
    )
    return base.replace(**fields)


def toy_requests(model: ToyModel = RAGGED, count: int = 6, limit: int = 24, empty: bool = True) -> list[RequestRecord]:
    """Return requests: natural and fixed stops, limits that cut blocks, and (third of three) one with nothing to do."""
    found = []
    for index in range(count):
        rng = np.random.default_rng([model.seed, 5, index])
        nothing = empty and index == 2
        found.append(
            RequestRecord(
                request_id=f"toy/{index}",
                task="toy-a" if index % 2 else "toy-b",
                prompt_ids=() if nothing else tuple(int(t) for t in rng.integers(4, model.vocab_size, 3 + index % 4)),
                prompt_text=f"prompt {index} \u00e9\u2713",
                reference=None if index % 3 else f"answer {index}",
                max_new_tokens=0 if nothing else int(rng.integers(max(1, limit // 2), limit + 1)),
                eos_ids=model.eos_ids,
                stop="fixed" if index % 4 == 3 else "natural",
            )
        )
    return found


def write_toy_trace(
    path: str | os.PathLike[str],
    model: ToyModel = RAGGED,
    *,
    count: int = 6,
    limit: int = 24,
    empty: bool = True,
    cover: int = 0,
    shards: int = 1,
) -> list[tuple[RequestRecord, list[StepRecord]]]:
    """Write a toy trace and return what it holds.

    Parameters
    ----------
    count, limit : int
        Requests, and the largest token limit among them.
    empty : bool
        Whether one of the requests has nothing to do.
    cover : int
        Steps off the captured path, at most, added to each request.
    shards : int
        Shards per table (at least; the rows of ``cover`` make one more).
    """
    requests = toy_requests(model, count, limit, empty)
    content = [(request, model.decode(request)) for request in requests]
    writer = TraceWriter.create(path, toy_manifest(model, max_new_tokens=limit))
    each = -(-count // shards)
    for index, (request, steps) in enumerate(content):
        writer.add_request(request, steps)
        if shards > 1 and (index + 1) % each == 0:
            writer.flush()
    if cover:
        for request, steps in content:
            more = model.cover(request, steps, cover)
            writer.add_steps(request.request_id, more)
            steps += more
    if shards > 1:
        writer.flush()
        writer.release()
    else:
        writer.close()
    return content


RELAXED = ToyModel(widths=(5,), agree=0.4)


def relaxed_requests(count: int = 10) -> list[RequestRecord]:
    """Return requests whose strict path parts from that of a rule which accepts every draft."""
    requests = toy_requests(RELAXED, 4 * count, empty=False)
    return [one for one in requests if follow(RELAXED, one, follow(RELAXED, one, [], -1), 0)][:count]


def write_relaxed_trace(path: str | os.PathLike[str], strict_for: int) -> Path:
    """Write a trace captured under a rule that accepts every draft, with the strict path of the first requests added.

    Requests are :func:`relaxed_requests`; the strict paths of the others are not captured.
    """
    writer = TraceWriter.create(Path(path), toy_manifest(RELAXED, rule={"name": "asd", "B": "inf", "g": "inf"}))
    for n, request in enumerate(relaxed_requests()):
        steps = follow(RELAXED, request, [], -1)
        writer.add_request(request, steps + (follow(RELAXED, request, steps, 0) if n < strict_for else []))
    writer.close()
    return Path(path)


def follow(model: ToyModel, request: RequestRecord, steps: list[StepRecord], outcome: int) -> list[StepRecord]:
    """Return the missing steps of the path that takes one outcome of every step: 0 is strict, -1 accepts all drafts."""
    there = {(step.parent_step_id, step.parent_accepted): step for step in steps}
    new: list[StepRecord] = []
    place, generated, goes_on = (NO_PARENT, NO_PARENT), (), True
    while goes_on:
        if place not in there:
            number = len(steps) + len(new)
            there[place] = model.step(request, generated, number, place, wave=1 if steps else 0)
            new.append(there[place])
        accepted, tokens, goes_on = model.outcomes(request, there[place])[outcome]
        place, generated = (there[place].step_id, accepted), generated + tokens
    return new


def big_request(
    index: int,
    steps: int = 60,
    width: int = 7,
    vocab: int = 49152,
    top_k: int = 8,
    bfloat16: bool = False,
    seed: int = 0,
) -> tuple[RequestRecord, list[StepRecord]]:
    """Return a request of the size and statistics of a real one, drawn directly: for sizes and timings.

    Token ids follow Zipf's law, logits carry full random mantissas (or those of bfloat16), and the path is strict.
    """
    rng = np.random.default_rng([seed, index])
    rows = steps * (width + 1)
    weight = 1.0 / np.arange(1, vocab + 1)
    ids = rng.choice(vocab, (rows, top_k), p=weight / weight.sum())
    ids = np.stack([np.unique(np.concatenate([row, np.arange(top_k)]))[-top_k:] for row in ids])  # distinct
    ids = rng.permuted(ids, axis=1).astype(np.int32)
    falls = np.cumsum(rng.exponential(2.0, (rows, top_k - 1)) / np.arange(1, top_k) + 0.01, axis=1)
    peak = 18.0 + 3.0 * rng.standard_normal((rows, 1))
    top = np.concatenate([peak, peak - falls], axis=1).astype(np.float32)
    rank = np.where(rng.random(rows) < 0.65, 0, rng.geometric(0.3, rows)).astype(np.int32)
    far = rank >= top_k
    inside = np.minimum(rank, top_k - 1)
    at = np.arange(rows)
    draft = np.where(far, (ids.max(1) + 1 + rng.integers(0, 50, rows)) % vocab, ids[at, inside]).astype(np.int32)
    clash = far & (draft[:, None] == ids).any(1)
    draft[clash], rank[clash] = ids[clash, 0], 0
    logit = np.where(far & ~clash, top[:, -1] - rng.exponential(1.0, rows) - 0.2, top[at, np.minimum(rank, top_k - 1)])
    logit = logit.astype(np.float32)
    if bfloat16:
        top, logit = _bfloat16(top), _bfloat16(logit)
        order = np.lexsort((ids, -top), axis=1)  # rounding makes ties
        ids, top = np.take_along_axis(ids, order, 1), np.take_along_axis(top, order, 1)
        near = rank < top_k
        rank[near] = (ids == draft[:, None])[near].argmax(1)
    lse = (top[:, 0] + rng.exponential(0.7, rows)).astype(np.float32)
    entropy = np.minimum(rng.exponential(1.2, rows), 9.0).astype(np.float32)
    logprob = -rng.exponential(1.0, rows).astype(np.float32)
    found: list[StepRecord] = []
    start, parent = 0, (NO_PARENT, NO_PARENT)
    for step in range(steps):
        lo, hi = step * (width + 1), (step + 1) * (width + 1)
        block = StepRecord(
            step, *parent, start, draft[lo : hi - 1], ids[lo:hi, 0], logit[lo : hi - 1], rank[lo : hi - 1], ids[lo:hi],
            top[lo:hi], lse[lo:hi], entropy[lo:hi], logprob[lo : hi - 1], {}, *rng.gamma(9.0, 100.0, 3),
        )  # fmt: skip
        found.append(block)
        wrong = np.flatnonzero(block.draft_ids != block.argmax_ids[:-1])
        accepted = int(wrong[0]) if wrong.size else width
        parent, start = (step, accepted), start + accepted + 1
    prompt = tuple(int(token) for token in rng.integers(0, vocab, 120))
    return RequestRecord(f"big/{index}", "big", prompt, f"prompt {index} " * 20, None, start, (), "fixed"), found


def _bfloat16(values: np.ndarray) -> np.ndarray:
    """Round float32 to the nearest bfloat16 value."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)
