"""After ``cover`` the walk of every rule, and of every variation of ASD, is what live decoding does."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from asdsim.capture.cover import BatchRunner, cover
from asdsim.capture.loop import decode
from asdsim.capture.record import Recorder
from asdsim.engines.protocol import Drafter, DrafterSession, Proposal
from asdsim.records import MemoryTrace, RequestRecord
from asdsim.rules import NAMES
from asdsim.rules.settings import STRICT, Grid, rule_grids
from asdsim.trace.graph import build_graph
from asdsim.trace.tokens import edge_tokens
from asdsim.walk import request as columns
from asdsim.walk.demand import demand_of
from asdsim.walk.sweep import walk_grid
from tests.support.toygraph import toy_row
from tests.support.toymodels import ToyTarget
from tests.twins.test_rules import SETTINGS, variations


@cache
def row(seed: int, prefix: tuple[int, ...], vocab: int, grain: float) -> np.ndarray:
    """Return a toy row with positive logits."""
    return toy_row(seed, prefix, vocab, grain) + np.float32(20.0)


@cache
def blur(prefix: tuple[int, ...], vocab: int) -> np.ndarray:
    """Return what the drafter adds to the target's row."""
    return np.random.default_rng([3, len(prefix), *prefix]).normal(0.0, 1.2, vocab).astype(np.float32)


class Warm(ToyTarget):
    """Logits that are all positive."""

    def row(self, prefix):
        return row(self.seed, tuple(prefix), self.vocab_size, self.grain)


class Distributed(Drafter):
    """A drafter with a distribution: the target's own rows, blurred by a hash."""

    def __init__(self, target: Warm) -> None:
        self.name, self.vocab_size, self.has_logits, self.target = "blurred", target.vocab_size, True, target

    def session(self, prompt_ids):
        return _Blurred(self.target)


class _Blurred(DrafterSession):
    def __init__(self, target: Warm) -> None:
        self.target = target

    def propose(self, prefix_ids, num_draft_tokens):
        ids, logits = [], []
        for _ in range(num_draft_tokens):
            here = [*prefix_ids, *ids]
            logits.append(self.target.row(here) + blur(tuple(here), self.target.vocab_size))
            ids.append(int(logits[-1].argmax()))
        rows = np.array(logits, np.float64)
        logprobs = rows.max(axis=1) - np.log(np.exp(rows).sum(axis=1))
        return Proposal(ids, logprobs.astype(np.float32), np.array(logits, np.float32))

    def fork(self):
        return self


def lower(grid: Grid) -> Grid:
    """Return a grid whose threshold leaves tokens that this drafter and the target disagree on."""
    return replace(grid, layout=replace(grid.layout, threshold=grid.layout.threshold / 3))


GRIDS: dict[str, list[Grid]] = {
    **{name: rule_grids(name, SETTINGS.get(name, {}))[:2] for name in NAMES},
    **{f"asd {n}": [lower(grid[:: len(grid) // 8 or 1])] for n, grid in enumerate(variations())},
}


@pytest.mark.parametrize("name", list(GRIDS))
def test_a_covered_walk_equals_live_decoding(name: str) -> None:
    K, recorder = 4, Recorder(divergences=("js", "kl"))
    target = Warm(11, 12, 0.125)
    drafter = Distributed(target)
    requests = [
        RequestRecord(f"toy/{n}", "toy", (n + 1, 3), "", None, 14, target.eos_ids, ["natural", "fixed"][n])
        for n in (0, 1)
    ]
    captured = {request.request_id: decode(target, drafter, request, STRICT, K, recorder).steps for request in requests}
    relaxed = 0
    for grid in GRIDS[name]:
        steps = {key: list(held) for key, held in captured.items()}
        progress = cover(
            [(request, steps[request.request_id]) for request in requests],
            lambda graph, grid=grid: demand_of(graph, [grid], device="cpu", threads=1),
            BatchRunner(target, drafter, K, recorder),
            lambda key, new, steps=steps: steps[key].extend(new),
            settings=len(grid),
            build=lambda trace, grid=grid: build_graph(trace, grid.layout),
        )
        assert progress.complete
        trace = MemoryTrace([(request, steps[request.request_id]) for request in requests])
        graph = build_graph(trace, grid.layout)
        walks = walk_grid(graph, grid, device="cpu", threads=1)
        assert walks.exact.all()
        for n in range(len(grid)):
            for r, request in enumerate(requests):
                live = decode(target, drafter, request, grid.policy(n), K)
                assert edge_tokens(trace, graph, int(walks.edge[n, r])) == live.tokens
                assert walks.spent[n, r] == live.ledger
                assert walks.counts[n, r, columns.STEPS] == len(live.outcomes)
                assert walks.counts[n, r, columns.ACCEPTED] == sum(one.accepted for one in live.outcomes)
                assert walks.counts[n, r, columns.DRAFTED] == sum(one.num_draft_tokens for one in live.outcomes)
        relaxed += int(walks.counts[..., columns.RELAXED].sum())
    assert (relaxed > 0) == (name not in ("strict", "truncate"))
