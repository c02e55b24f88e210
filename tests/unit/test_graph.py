"""Where the edges of a graph lead, against the tokens themselves."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from asdsim.errors import TraceError
from asdsim.records import NO_PARENT, MemoryTrace, RequestRecord, StepRecord
from asdsim.rules.scoring import DEFAULT
from asdsim.trace.graph import END, MISSING, build_graph
from asdsim.trace.tokens import edge_tokens, prefix_tokens
from tests.support.toygraph import record_step, toy_requests

VOCAB = 9


def chain(draft: list[int], choice: list[int], step_id: int, parent: int, accepted: int, start: int) -> StepRecord:
    """Return a step with the given draft tokens and choices of the target."""
    logits = np.zeros((len(choice), VOCAB), np.float32)
    logits[np.arange(len(choice)), choice] = 2.0
    return record_step(step_id, parent, accepted, start, np.array(draft, np.int32), logits)


def request(limit: int = 40, name: str = "toy/0") -> RequestRecord:
    return RequestRecord(name, "toy", (1,), "", None, limit, (), "fixed")


@pytest.mark.parametrize("width", [0, 1, 3])
@pytest.mark.parametrize("stop", ["natural", "fixed"])
@pytest.mark.parametrize("seed", range(4))
def test_an_edge_leads_to_the_step_on_the_prefix_that_it_commits(seed: int, stop: str, width: int) -> None:
    content = toy_requests(seed, requests=4, vocab=5, ks=(0, 1, 2, 5), limit=24, extra=60, stop=stop, empty=True)
    trace = MemoryTrace(content)
    graph = build_graph(trace, replace(DEFAULT, width=width))
    standing = {(int(trace.step_request[s]), tuple(prefix_tokens(trace, s))): s for s in range(graph.num_steps)}
    assert [len(prefix_tokens(trace, s)) for s in range(graph.num_steps)] == graph.start.tolist()
    led = 0
    for edge, reached in enumerate(graph.edge_next.tolist()):
        step, _ = graph.edge_of(edge)
        r = int(graph.step_request[step])
        tokens = tuple(edge_tokens(trace, graph, edge))
        record = content[r][0]
        if len(tokens) == record.max_new_tokens or (stop == "natural" and tokens[-1] in record.eos_ids):
            assert reached == END
        else:
            assert reached == standing.get((r, tokens), MISSING)
            led += reached >= 0
    assert led > 0 or width


def test_two_ways_to_one_prefix_join_and_a_second_step_there_is_refused() -> None:
    steps = [
        chain([3, 4, 5], [3, 4, 6, 7], 0, NO_PARENT, NO_PARENT, 0),  # 3 4 6 | 3 4 5 7
        chain([5], [6, 7], 1, 0, 1, 2),  # a block cut after one token: stands on 3 4
        chain([], [8], 2, 0, 2, 3),  # stands on 3 4 6, which step 1 reaches too
        chain([], [8], 3, 1, 1, 4),  # stands on 3 4 5 7, which step 0 reaches too
    ]
    graph = build_graph(MemoryTrace([(request(), steps)]))
    assert graph.edge_next.tolist() == [2, 3, 2, 3, MISSING, MISSING]
    assert graph.root.tolist() == [0]
    graph = build_graph(MemoryTrace([(request(), steps)]), replace(DEFAULT, width=1))
    assert graph.edge_next.tolist() == [1, 2, 3, MISSING, MISSING]  # step 0 ends after 3 and the choice 4
    again = [*steps[:3], replace(steps[3], parent_accepted=0, start_pos=3)]
    with pytest.raises(TraceError, match="request toy/0: steps 2 and 3 stand on the same prefix"):
        build_graph(MemoryTrace([(request(), again)]))


def test_a_parent_must_be_an_earlier_step_of_the_same_request() -> None:
    root = chain([3], [3, 4], 0, NO_PARENT, NO_PARENT, 0)
    for parent in (1, 2, 7):
        steps = [root, chain([3], [3, 4], 1, parent, 1, 2)]
        with pytest.raises(TraceError, match=f"toy/b, step 1: parent step {parent} is not an earlier step"):
            build_graph(MemoryTrace([(request(name="toy/a"), [root]), (request(name="toy/b"), steps)]))


def test_memory_grows_with_the_tokens_and_not_with_their_square() -> None:
    number = 6000
    steps = [chain([3, 4, 5], [3, 4, 6, 7], 0, NO_PARENT, NO_PARENT, 0)]
    for step_id in range(1, number):
        steps.append(
            replace(steps[0], step_id=step_id, parent_step_id=step_id - 1, parent_accepted=2, start_pos=3 * step_id)
        )
    trace = MemoryTrace([(request(3 * number), steps)])
    build_graph(trace)  # columns are made
    tracemalloc.start()
    graph = build_graph(trace)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert graph.edge_next[graph.mm_ptr[:-1] + np.arange(number)].tolist() == [*range(1, number), END]
    assert peak < 5000 * number  # prefixes held whole would take 36,000 bytes a step on average
