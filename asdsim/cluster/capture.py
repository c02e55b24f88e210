"""``asdsim capture --ray``: a replica decodes prompts of the plan and writes their shards; the driver names them."""

from __future__ import annotations

import hashlib
import json
import socket
import time
from dataclasses import dataclass, replace
from typing import Any

from ..capture.passes import ROUNDS, PassTimes
from ..capture.run import Plan, Progress, Run, Summary, load, silent
from ..capture.tasks import Prompt
from ..capture.vocabulary import grown_vocabulary
from ..errors import CaptureError, UsageError
from ..records import RequestRecord
from ..trace.interrupt import uninterrupted
from ..trace.manifest import MANIFEST, TIMING, Manifest, Shard, first_difference
from ..trace.parts import OwnedTrace, PartWriter
from ..trace.reader import load_manifest
from ..trace.vocabulary import Vocabulary
from ..trace.writer import store_vocabulary
from .pool import LEASE_SECONDS, Item, Note, Pool, Replica, Where

NONE: frozenset[str] = frozenset()
"""One empty set that all prompts share: there may be a million of them."""


@dataclass(frozen=True)
class Outline:
    """A capture before it begins, as one replica read it.

    Attributes
    ----------
    manifest : Manifest
    notes : list of str
        What is to be said of prompts that are not taken as they stand.
    ids : list of list of str
        Of each prompt: the ids of its requests, one for each turn that is asked.
    digests : list of bytes
        Of each prompt's first turn as it is encoded.
    """

    manifest: Manifest
    notes: list[str]
    ids: list[list[str]]
    digests: list[bytes]


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt to decode.

    Attributes
    ----------
    number : int
        Its place among the prompts.
    index : int
        Place of its first request in the order of capture.
    done : frozenset of str
        Its requests that the trace holds already.
    digest : bytes
    """

    number: int
    index: int
    done: frozenset[str]
    digest: bytes


@dataclass(frozen=True)
class Decoded:
    """What a replica did: how many of its prompts it decoded, the shards of their requests, and its pass times."""

    prompts: int
    ids: list[str]
    shards: list[Shard]
    summary: Summary
    times: PassTimes


class CaptureReplica(Replica):
    """Target and drafter of a plan."""

    def load(self) -> None:
        """Load models and prompts."""
        (self.plan,) = self.job
        self.target, self.drafter, self.prompts = load(self.plan)
        self.run: Run | None = None
        self.times, self.rounds = PassTimes(self.target, self.drafter, self.plan.K), 0

    def outline(self) -> Outline:
        """Encode and check all prompts."""
        run = Run(self.target, self.drafter, self.prompts, self.plan)
        ids, digests = [], []

        def seen(prompt: Prompt, first: RequestRecord) -> None:
            later = range(2, 2 + len(prompt.later) if self.plan.turns == "all" else 0)
            ids.append([prompt.id, *(f"{prompt.id}/turn-{turn}" for turn in later)])
            digests.append(digest_of(first))

        survey = run.survey(seen)
        return Outline(survey.manifest, survey.notes, ids, digests)

    def work(self, asked: list[Asked], manifest: Manifest, number: int) -> Decoded:
        """Decode prompts until the lease ends, and write them under a number of shards."""
        self.hello()
        run = self.run or self._ready(manifest)
        until = time.monotonic() + LEASE_SECONDS
        part = PartWriter(self.plan.folder, manifest, number)
        summary, count = Summary(), 0
        for one in asked:
            for turn, request in enumerate(run.turns(one.number)):
                if turn == 0 and digest_of(request) != one.digest:
                    raise CaptureError(
                        f"prompt {request.request_id} is another one on {socket.gethostname()}",
                        fix="give all nodes the same prompts, tokenizer and release of transformers",
                    )
                if request.request_id in one.done:
                    continue
                result = run.decode(request)
                part.add_request(request, result.steps, one.index + turn)
                summary.count(result)
                self.times.note_steps(result.steps)
            if not count and self.rounds < ROUNDS:
                self.times.measure(request)
                self.rounds += 1
            count += 1
            if self.stopped.is_set() or time.monotonic() > until:
                break
        return Decoded(count, sorted(part.completed), part.finish(), summary, self.times.taken())

    def _ready(self, manifest: Manifest) -> Run:
        """Return a run that encodes prompt by prompt, once the models are known to be those of the manifest."""
        target, drafter = self.target, self.drafter
        mine = manifest.replace(
            target=target.describe(), drafter=drafter.describe(), vocab_size=target.vocab_size,
            logits_dtype=target.logits_dtype, device=target.lm.device.type,
        )  # fmt: skip
        difference = first_difference(manifest, mine)
        if difference is not None:
            name, theirs, here = difference
            raise CaptureError(
                f"{name} is {here!r} on {socket.gethostname()} and {theirs!r} on another node",
                fix="give all nodes the same models, versions and kind of device",
            )
        day = manifest.settings.get("template_date")
        plan = self.plan if day is None else replace(self.plan, template_date=day)
        self.run = Run(target, drafter, self.prompts, plan)
        return self.run

    def vocabulary(self) -> Vocabulary | None:
        """Return the text of every token id of the trace; see :func:`asdsim.capture.vocabulary.grown_vocabulary`."""
        self.hello()
        return grown_vocabulary(self.plan.folder, load_manifest(self.plan.folder)[0], self.target.tokenizer)


def digest_of(request: RequestRecord) -> bytes:
    """Return a checksum of a request's id and tokens."""
    return hashlib.blake2b(json.dumps([request.request_id, request.prompt_ids]).encode(), digest_size=8).digest()


def capture_on(plan: Plan, where: Where, progress: Progress = silent, note: Note = lambda text: None) -> Summary:
    """Run a capture on a cluster, or go on with it; see :func:`asdsim.capture.run.capture`.

    The trace holds what one process would have captured, to the bit (times aside).
    """
    if plan.shard is not None:
        raise UsageError("--shard and --ray exclude each other", fix="leave --shard out")
    plan = replace(plan, resume=True)
    with Pool(where, CaptureReplica, (plan,), note) as pool:
        outline: Outline | None = pool.call("outline")
        if outline is None:
            return Summary(interrupted=True)
        for text in outline.notes:
            note(text)
        began = time.perf_counter()
        fresh = not (plan.folder / MANIFEST).exists()
        with (OwnedTrace.create if fresh else OwnedTrace.resume)(plan.folder, outline.manifest) as writer:
            assert isinstance(writer, OwnedTrace)
            summary = _capture(pool, writer, outline, plan, progress)
            summary.interrupted = pool.interrupted
            if not pool.interrupted:
                vocabulary = pool.call("vocabulary")
                if vocabulary is not None:
                    with uninterrupted():
                        store_vocabulary(writer, vocabulary)
                summary.interrupted = pool.interrupted
    summary.seconds = time.perf_counter() - began
    return summary


def _capture(pool: Pool, writer: OwnedTrace, outline: Outline, plan: Plan, progress: Progress) -> Summary:
    items, index = [], 0
    for number, (ids, digest) in enumerate(zip(outline.ids, outline.digests, strict=True)):
        done = writer.completed.intersection(ids)
        if len(done) < len(ids):
            items.append(Item(Asked(number, index, frozenset(done) if done else NONE, digest), f"prompt {ids[0]}"))
        index += len(ids)
    total = Summary(skipped=len(writer.completed))
    parts: list[tuple[int, Summary]] = []
    times = PassTimes(None, None, plan.K)

    def taken(some: list[Item], answer: Decoded) -> int:
        if answer.ids:
            changes: dict[str, Any] = {"grids": []} if writer.manifest.grids else {}
            total.uncovered |= bool(changes)  # they covered the requests that were there
            writer.take(answer.shards, answer.ids, **changes)
            times.add(answer.times)
            parts.append((some[0].payload.number, answer.summary))
            total.requests += answer.summary.requests
            total.completion_tokens += answer.summary.completion_tokens
        progress("capture", total.skipped + total.requests, index, total.completion_tokens)
        return answer.prompts

    bare = writer.manifest.replace(shards=[])
    most: dict[str, Any] = {"most": plan.flush_every} if plan.flush_every else {}
    pool.run(items, taken, lambda: (bare, writer.number()), **most)
    if (timed := times.record(pool.where.threads)) is not None:
        with uninterrupted():
            writer.update_manifest(notes={**writer.manifest.notes, TIMING: timed})
        total.problems = timed["problems"]
    for _, part in sorted(parts, key=lambda pair: pair[0]):
        total.steps += part.steps
        total.drafted += part.drafted
        total.accepted += part.accepted
        total.ledger += part.ledger
        total.each += part.each
    return total
