"""Cover and verify on tiny Transformers models: batches, pooled KV, faithful runs, other weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asdsim.capture.cover import BatchRunner
from asdsim.capture.drafters import make_drafter
from asdsim.capture.loop import decode
from asdsim.capture.record import Recorder
from asdsim.capture.reload import check_exact, check_same
from asdsim.engines.transformers.kvpool import PooledDrafter, PooledTarget
from asdsim.engines.transformers.model import HFTarget
from asdsim.errors import CaptureError
from asdsim.live.cover import cover_with
from asdsim.live.verify import verify_trace
from asdsim.rules.settings import STRICT, Grid, Policy
from asdsim.trace.graph import build_graph
from asdsim.trace.manifest import Manifest
from asdsim.trace.reader import read_trace
from asdsim.trace.tokens import edge_tokens
from asdsim.trace.writer import TraceWriter
from asdsim.walk.request import STEPS
from asdsim.walk.sweep import walk_grid

from .conftest import VOCAB, tiny_llama

K = 4
GRID = Grid.product([0, 0.5, 2, 8], [0.1, 0.5, 2], [1, 3])
COVERED = {"rule": "asd", "semantics": "paper", "B": [0, 0.5, 2, 8], "g": [0.1, 0.5, 2], "M": [1, 3]}
"""What the manifest says of it."""


def manifest_of(target: Any, drafter: Any, **fields: Any) -> Manifest:
    return Manifest(
        target=target.describe(), drafter=drafter.describe(), vocab_size=target.vocab_size, num_draft_tokens=K,
        max_new_tokens=24, tasks=["random"], **fields,
    )  # fmt: skip


@pytest.fixture(scope="module")
def pair(target: Any) -> tuple[Any, Any]:
    return target, make_drafter("layer-skip:1", target)


@pytest.fixture
def captured(pair: Any, requests: Callable[..., Any], tmp_path: Path) -> Path:
    """A strict trace of four requests."""
    path = tmp_path / "trace"
    with TraceWriter.create(path, manifest_of(*pair)) as writer:
        for request in requests(4, seed=3):
            writer.add_request(request, decode(*pair, request, STRICT, K, Recorder()).steps)
    return path


def test_covered_walks_equal_live_decoding(pair: Any, captured: Path) -> None:
    with TraceWriter.append(captured) as writer:
        progress = cover_with(writer, pair, GRID, batch=5)
    assert progress.complete and progress.steps_added > 20
    found = verify_trace(captured, models=pair)
    assert (found.pairs, found.identical, found.not_captured) == (4 * 24, 4 * 24, 0)
    assert read_trace(captured).manifest.grids == [{**COVERED, "faithful": False}]


def test_faithful_steps_equal_live_ones_to_the_bit(pair: Any, captured: Path) -> None:
    with TraceWriter.append(captured) as writer:
        progress = cover_with(writer, pair, GRID, faithful=True)
    assert progress.complete and progress.steps_added > 20
    trace = read_trace(captured)
    assert trace.manifest.grids == [{**COVERED, "faithful": True}]
    graph = build_graph(trace)
    walks = walk_grid(graph, GRID, device="cpu")
    assert walks.exact.all()
    compared = 0
    for r, request in enumerate(trace.request_records()):
        held = {}
        for step in trace.steps_of(request.request_id):
            before = held[step.parent_step_id] if step.parent_step_id >= 0 else None
            prefix = () if before is None else (
                *before[0], *before[1].draft_ids[: step.parent_accepted].tolist(),
                int(before[1].argmax_ids[step.parent_accepted]),
            )  # fmt: skip
            held[step.step_id] = (prefix, step)
        by_prefix = dict(held.values())
        for n in range(len(GRID)):
            live = decode(*pair, request, GRID.policy(n), K, Recorder())
            assert edge_tokens(trace, graph, int(walks.edge[n, r])) == live.tokens
            assert walks.counts[n, r, STEPS] == len(live.outcomes)
            assert walks.spent[n, r] == pytest.approx(live.ledger, abs=1e-3)
            for again in live.steps:
                step = by_prefix[tuple(live.tokens[: again.start_pos])]
                # Another path may have reached this prefix first, through a cache filled in other portions; its bits
                # then belong to that path. Those reached from the same parent in the same way must be equal.
                for name in ("draft_ids", "argmax_ids", "top_ids"):
                    assert np.array_equal(getattr(step, name), getattr(again, name))
                np.testing.assert_allclose(step.top_logits, again.top_logits, rtol=0, atol=1e-5)
                compared += np.array_equal(step.top_logits, again.top_logits)
    assert compared > 100


def test_resume_and_a_larger_grid_add_only_what_is_missing(pair: Any, captured: Path) -> None:
    with TraceWriter.append(captured) as writer:
        first = cover_with(writer, pair, GRID, max_steps=7)
    assert first.steps_added == 7 and not first.complete and read_trace(captured).manifest.grids == []
    with TraceWriter.append(captured) as writer:
        second = cover_with(writer, pair, GRID, group=1)
    with TraceWriter.append(captured) as writer:
        third = cover_with(writer, pair, GRID)
    assert second.complete and third.complete and third.steps_added == 0
    assert second.steps_held == third.steps_held == read_trace(captured).steps.num_rows


def test_settings_between_grid_points_are_exact_or_said_not_to_be(pair: Any, captured: Path) -> None:
    with TraceWriter.append(captured) as writer:
        cover_with(writer, pair, GRID)
    between = Grid.product([0.3, 1.1, 5], [0.2, 0.7], [1, 2, 3])
    found = verify_trace(captured, [between], models=pair)
    assert found.differences == [] and found.not_captured > 0 and found.identical > 0
    assert found.identical + found.not_captured == found.pairs == 4 * 18


def test_pooled_batches_equal_single_scores(pair: Any, requests: Callable[..., Any]) -> None:
    target, drafter = pair
    rng = np.random.default_rng(0)
    base = [list(request.prompt_ids) for request in requests(6, seed=5)]
    scorer, proposer = PooledTarget(target.lm, 1 << 30), PooledDrafter(drafter.lm, 1 << 30)
    for _ in range(4):  # prefixes grow, so that later rounds find earlier ones in the pool
        proposals = proposer.propose_many(base, K)
        rows = scorer.score_many(base, [proposal.ids for proposal in proposals])
        for prefix, proposal, logits in zip(base, proposals, rows, strict=True):
            alone = drafter.session(prefix).propose(prefix, K)
            assert alone.ids == proposal.ids
            np.testing.assert_allclose(proposal.logprobs, alone.logprobs, atol=1e-4)
            expected = target.session(prefix).score(prefix, proposal.ids)
            np.testing.assert_allclose(logits, expected, atol=1e-4)
        base = [
            [*prefix, *proposal.ids[: int(rng.integers(0, K))], int(rng.integers(VOCAB))]
            for prefix, proposal in zip(base, proposals, strict=True)
        ]


def test_a_full_pool_is_dropped_and_answers_stay(pair: Any, requests: Callable[..., Any]) -> None:
    target, _ = pair
    scorer = PooledTarget(target.lm, 20_000)
    for seed in range(6):
        prefixes = [list(request.prompt_ids) for request in requests(3, seed=seed)]
        for prefix, logits in zip(prefixes, scorer.score_many(prefixes, [[1, 2]] * 3), strict=True):
            np.testing.assert_allclose(logits, target.session(prefix).score(prefix, [1, 2]), atol=1e-4)
    assert len(scorer.pool._child) < 200


def test_drafts_of_other_lengths_share_a_batch(target: Any) -> None:
    prefixes, drafts = [[1, 2, 3], [4], [5, 6]], [[], [7, 8, 9], [10]]
    for logits, prefix, draft in zip(
        target.pooled(1 << 20).score_many(prefixes, drafts), prefixes, drafts, strict=True
    ):
        assert len(logits) == len(draft) + 1
        np.testing.assert_allclose(logits, target.session(prefix).score(prefix, draft), atol=1e-4)


def test_other_weights_are_refused_by_checksum(pair: Any, captured: Path) -> None:
    manifest = read_trace(captured).manifest
    other = HFTarget(tiny_llama(seed=1), "tiny-llama")
    with pytest.raises(CaptureError, match="target tiny-llama, weights_sha256"):
        check_same(other, make_drafter("layer-skip:1", other), manifest)
    with pytest.raises(CaptureError, match="drafter"):
        check_same(pair[0], make_drafter("layer-skip:2", pair[0]), manifest)
    check_same(*pair, manifest)


def test_a_drafter_with_memory_and_a_processor_are_refused(pair: Any) -> None:
    target, drafter = pair

    class Remembering(type(drafter)):  # type: ignore[misc]
        memoryless = False

    mindful = Remembering.__new__(Remembering)
    mindful.__dict__.update(drafter.__dict__)
    with pytest.raises(CaptureError, match="remembers more than the prefix"):
        check_exact(mindful, manifest_of(target, drafter))
    processed = manifest_of(target, drafter, settings={"logits_processors": ["temperature"]})
    with pytest.raises(CaptureError, match="after a processor"):
        check_exact(drafter, processed)


def test_verify_explains_differences(pair: Any, captured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that differs a little gives a near-tie or a real difference, told apart by the margin."""
    from asdsim.capture import verify as module

    few = Grid.product([0, 2], [0.5], [1])
    with TraceWriter.append(captured) as writer:
        cover_with(writer, pair, few)

    class Shifted:
        """The target with noise on its logits, the same at every prefix."""

        def __init__(self, scale: float) -> None:
            self.__dict__.update(pair[0].__dict__)
            self._noise = np.random.default_rng(1).normal(0, scale, VOCAB).astype(np.float32)

        def session(self, prompt_ids: Any) -> Any:
            inner = pair[0].session(prompt_ids)
            noise = self._noise

            class Session:
                def score(self, prefix: Any, draft: Any) -> Any:
                    return inner.score(prefix, draft).numpy() + noise

            return Session()

        def synchronize(self) -> None:
            return None

    large = verify_trace(captured, models=(Shifted(0.2), pair[1]))
    assert large.real and all(one.cause != "none" for one in large.differences)
    for one in large.real:
        assert one.walked != one.live and one.margin >= module.NEAR_TIE["float32"]
    all_near = verify_trace(captured, models=(Shifted(0.2), pair[1]), near_tie=1e9)
    assert not all_near.real and len(all_near.differences) == len(large.differences)
    assert verify_trace(captured, models=(Shifted(0.0), pair[1])).differences == []


def test_a_runner_left_early_has_lost_nothing(pair: Any, requests: Callable[..., Any]) -> None:
    from asdsim.capture.cover import Job, Missing

    record = requests(1, seed=9)[0]
    runner = BatchRunner(*pair, K, Recorder(), batch=2)
    jobs = [Job(record, n, 1, Missing(0, -1, -1, (n,), 1)) for n in range(5)]
    kept = [step for step, _ in zip(runner(jobs), range(3), strict=False)]
    assert [step.step_id for step in kept] == [0, 1, 2]
    assert [step.step_id for step in runner(jobs)] == [0, 1, 2, 3, 4]


def test_policy_of_a_pair_is_what_was_asked() -> None:
    assert GRID.policy(len(GRID) - 1) == Policy(8, 2, 3)
