"""Outputs of a covered trace: the very tokens, each once; how they part from strict; how close a walk came to a tie."""

from __future__ import annotations

import math

import numpy as np
import pytest

import asdsim
from asdsim.capture.loop import decode
from asdsim.capture.record import Recorder
from asdsim.evaluate.outputs import UNKNOWN
from asdsim.live.cover import cover_with
from asdsim.records import RequestRecord
from asdsim.rules.settings import STRICT, Grid
from asdsim.trace.manifest import Manifest
from asdsim.trace.tokens import first_difference
from asdsim.trace.writer import TraceWriter
from tests.support.toymodels import ToyDrafter, ToyTarget

AXES = {"B": [0, 0.5, 2, 8], "g": [0.25, 2], "M": [1, 3]}
K = 4


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory):
    """A covered toy trace, its path, models and requests."""
    target = ToyTarget(4, vocab=16)
    drafter = ToyDrafter(target, 0.6)
    path = tmp_path_factory.mktemp("toy") / "trace"
    manifest = Manifest(
        target=target.describe(), drafter=drafter.describe(), vocab_size=16, num_draft_tokens=K, max_new_tokens=20
    )
    requests = [RequestRecord(f"toy/{n}", "toy", (n, 1), "", None, 20, target.eos_ids) for n in range(5)]
    with TraceWriter.create(path, manifest) as writer:
        for request in requests:
            writer.add_request(request, decode(target, drafter, request, STRICT, K, Recorder()).steps)
    with TraceWriter.append(path) as writer:
        assert cover_with(writer, (target, drafter), Grid.product(**AXES)).complete
    return path, target, drafter, requests


def test_outputs_are_what_live_decoding_gives(world):
    path, target, drafter, requests = world
    result = asdsim.replay(path, **AXES)
    outputs = result.outputs()
    grid = result.grid
    for r, request in enumerate(requests):
        strict = decode(target, drafter, request, STRICT, K).tokens
        assert outputs.tokens[r][outputs.strict[r]] == strict
        assert len({tuple(tokens) for tokens in outputs.tokens[r]}) == len(outputs.tokens[r])
        for n in range(len(grid)):
            live = decode(target, drafter, request, grid.policy(n), K).tokens
            assert outputs.tokens[r][outputs.which[n, r]] == live == result.tokens(n, r)
            assert outputs.first_differences()[r][outputs.which[n, r]] == first_difference(strict, live)


def test_divergence_counts_requests_and_positions(world):
    path, target, drafter, requests = world
    result = asdsim.replay(path, **AXES)
    table = result.outputs().divergence()
    for n, row in enumerate(table.to_dicts()):
        first = [
            first_difference(
                decode(target, drafter, request, STRICT, K).tokens,
                decode(target, drafter, request, result.grid.policy(n), K).tokens,
            )
            for request in requests
        ]
        parted = [position for position in first if position >= 0]
        assert (row["requests"], row["exact"], row["outputs_differ"]) == (5, True, len(parted))
        assert row["outputs_differ_share"] == len(parted) / 5
        assert row["first_difference_mean"] == (sum(parted) / len(parted) if parted else None)
    assert table["outputs_differ"].max() > 0 and table["outputs_differ"][0] == 0


def test_frame_has_each_output_once_and_text_where_it_can_be_had(world):
    outputs = asdsim.replay(world[0], **AXES).outputs()
    frame = outputs.frame()
    assert len(frame) == sum(map(len, outputs.tokens))
    assert frame["settings"].sum() == outputs.which.size
    assert frame.filter(frame["strict"])["first_difference"].null_count() == 5
    assert outputs.frame(lambda tokens: " ".join(map(str, tokens)))["text"][0] == " ".join(
        map(str, outputs.tokens[0][0])
    )


def test_what_is_not_captured_is_unknown_and_cannot_be_asked_for(world):
    result = asdsim.replay(world[0], B=[5], g=[math.inf], M=[math.inf])
    exact = result.walks().exact[0]
    assert not exact.all()
    outputs = result.outputs()
    assert ((outputs.which[0] == UNKNOWN) == ~exact).all()
    row = outputs.divergence().to_dicts()[0]
    assert row["requests"] == exact.sum() and not row["exact"]
    assert row["outputs_differ_share"] is None and row["first_difference_mean"] is None
    with pytest.raises(asdsim.AsdsimError, match="run asdsim cover"):
        result.tokens(0, int(np.flatnonzero(~exact)[0]))


def test_margin_is_the_smallest_gap_that_a_walk_relied_on(world):
    path, target, _, requests = world
    result = asdsim.replay(path, B=[0], g=[1], M=[1])
    for r, request in enumerate(requests):
        gaps = []
        prefix = list(request.prompt_ids)
        for token in result.tokens(0, r):  # strict: every token is the target's choice, and each row was relied on
            best = np.sort(target.row(prefix))[::-1]
            gaps.append(float(best[0]) - float(best[1]))
            prefix.append(token)
        assert result.margin(0, r) == min(gaps)


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 3]) == -1
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == first_difference([1, 2, 3], [1, 2]) == 2
