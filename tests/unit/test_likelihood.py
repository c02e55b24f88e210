"""Log-probabilities of whole outputs, and the certificate that the shortfall is the ledger."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import asdsim
from asdsim.evaluate.outputs import apart, edge_table
from asdsim.records import FORBIDDEN_LOGIT, NO_PARENT, MemoryTrace, RequestRecord, StepRecord
from asdsim.rules.settings import STRICT, Grid
from asdsim.trace.covered import covered_settings
from asdsim.trace.graph import build_graph
from asdsim.trace.tokens import edge_tokens
from asdsim.walk.path import visits
from asdsim.walk.sweep import walk_grid
from tests.support.toygraph import toy_requests

TRACES = Path(__file__).resolve().parents[2] / "traces"


@pytest.mark.parametrize("name", ["smollm2-layerskip", "smollm2-lookup"])
def test_shortfall_is_the_ledger_on_covered_traces(name: str) -> None:
    trace = asdsim.load(TRACES / name)
    grid = covered_settings(trace)
    graph = build_graph(trace)
    walks = walk_grid(graph, grid)
    table = edge_table(trace, graph)
    assert walks.exact.all() and walks.spent.max() > 4.0
    # Equal to the last bits where walk and recorded path take one way; other ways to a prefix differ by rounding only.
    assert np.abs(table.shortfall[walks.edge] - walks.spent).max() < 1e-3
    assert (np.abs(table.shortfall[walks.edge] - walks.spent) < 1e-9).mean() > 0.95
    assert (table.shortfall[walks.edge] <= grid.budget[:, None] + 1e-3).all()
    strict = walk_grid(graph, Grid.of([STRICT]))
    assert np.abs(table.shortfall[strict.edge]).max() == 0.0


def test_sums_are_those_of_the_tokens_one_by_one() -> None:
    trace = MemoryTrace(toy_requests(5, requests=4, ks=(0, 2, 5), limit=30, extra=60, grain=0.125))
    graph, table = build_graph(trace), None
    table = edge_table(trace, graph)
    seen = 0
    for r in range(graph.num_requests):
        for policy in (STRICT, Grid.product(3, 2, 2).policy(0), Grid.product(50, 50, "inf").policy(0)):
            walk, exact = visits(graph, policy, r)
            steps = trace.steps_of(graph.request_ids[r])
            first = int(np.searchsorted(trace.step_request, r))
            logprob = best = 0.0
            for visit in walk:
                step = steps[visit.step - first]
                for i in range(visit.tokens):
                    top = float(step.top_logits[i, 0]) - float(step.logsumexp[i])
                    best += top
                    logprob += float(step.draft_logits[i]) - float(step.logsumexp[i]) if i < visit.accepted else top
            edge = walk[-1].edge
            assert table.logprob[edge] == pytest.approx(logprob, abs=1e-9)
            assert table.best[edge] == pytest.approx(best, abs=1e-9)
            assert np.frombuffer(table.output(edge), "<i4").tolist() == edge_tokens(trace, graph, edge)
            seen += exact
    assert seen > 4 and table.output(-1) == b""


def recorded(step_id: int, parent: tuple[int, int], start: int, drafts: list[int], best: list[int], rows: list[float],
             total: list[float]) -> StepRecord:  # fmt: skip
    """Return a step with the logits of its drafts and, last, of its bonus token, and their logsumexp."""
    top = np.array([[logit, logit - 1.0] for logit in rows], np.float32)
    logits = [logit if draft == y else FORBIDDEN_LOGIT for draft, y, logit in zip(drafts, best, rows, strict=False)]
    ids = np.array([[y, (y + 1) % 8] for y in best], np.int32)
    return StepRecord(
        step_id, *parent, start, np.array(drafts, np.int32), np.array(best, np.int32), np.array(logits, np.float32),
        np.array([0 if draft == y else 7 for draft, y in zip(drafts, best, strict=False)], np.int32), ids, top,
        np.array(total, np.float32), np.zeros(len(rows), np.float32),
    )  # fmt: skip


def test_a_token_that_the_target_forbids_touches_no_other_sum() -> None:
    request = RequestRecord("one", "toy", (1,), "", None, 6, (), "fixed")
    steps = [
        # The first draft is forbidden: its logit, about -3.4e38, would swallow every later one in a running sum.
        recorded(0, (NO_PARENT, NO_PARENT), 0, [5, 2], [1, 3, 4], [2.0, 1.0, 1.0], [2.5, 2.0, 2.0]),
        recorded(1, (0, 0), 1, [3, 4], [3, 4, 6], [1.0, 0.5, 3.0], [2.0, 1.75, 3.25]),
    ]
    trace = MemoryTrace([(request, steps)])
    graph = build_graph(trace)
    visit = visits(graph, STRICT, 0).visits[-1]
    table = edge_table(trace, graph)
    assert np.frombuffer(table.output(visit.edge), "<i4").tolist() == [1, 3, 4, 6]
    # 2 - 2.5 for the target's own token, then 1 - 2, .5 - 1.75 and 3 - 3.25; without the drafts -.75.
    assert table.logprob[visit.edge] == table.best[visit.edge] == -3.0


def test_where_outputs_part_and_how_far() -> None:
    def output(*tokens: int) -> bytes:
        return np.array(tokens, "<i4").tobytes()

    assert apart(output(1, 2, 3), output(1, 2, 3)) == (-1, 0.0)
    assert apart(output(1, 2, 3), output(1, 9, 3)) == (1, pytest.approx(1 / 3))
    assert apart(output(1, 2), output(1, 2, 3, 4)) == (2, 0.5)
    assert apart(output(1, 2), output(3, 4)) == (0, 1.0)
    assert apart(b"", output(3, 4)) == (0, 1.0)
    assert apart(output(1, 2, 3, 4), output(2, 3, 4)) == (0, 0.25)  # one token left out, not four changed
