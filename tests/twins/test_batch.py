"""The event loop beside a plain one written from its description, and beside its own source: equal to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asdsim
from asdsim.rules.settings import Grid
from asdsim.trace.covered import covered_grids
from asdsim.trace.graph import build_graph
from asdsim.walk.batch import Paths, Served, Times, paths_of, simulate
from asdsim.walk.sweep import walk_grid

K = 5


def plainly(walks: list[list[tuple[int, int]]], prompt: list[int], times: Times, batch: int, arrival: list[float],
            chunk: int) -> dict[str, Any]:  # fmt: skip
    """Serve walks, lists of (drafted, tokens), from lists and dictionaries."""
    waiting = list(range(len(walks)))
    running: list[dict[str, Any]] = []
    first, finish, gaps = dict.fromkeys(waiting, 0.0), dict.fromkeys(waiting, 0.0), []
    now, iterations = 0.0, 0
    while waiting or running:
        while waiting and len(running) < batch and arrival[waiting[0]] <= now:
            name = waiting.pop(0)
            if not walks[name]:
                first[name] = finish[name] = now
                continue
            if chunk == 0:
                now += float(times.prompt[prompt[name]])
            running.append({"name": name, "left": list(walks[name]), "context": prompt[name],
                            "unread": prompt[name] if chunk else 0, "last": now})  # fmt: skip
        if not running:
            if waiting:
                now = max(now, arrival[waiting[0]])
            continue
        ready = [one for one in running if one["unread"] == 0]
        tokens, room = sum(one["left"][0][0] + 1 for one in ready), chunk
        reading = []
        for one in running:
            if one["unread"]:
                part = min(room, one["unread"])
                one["unread"] -= part
                room -= part
                tokens += part
                reading.append(one)
        context = sum(one["context"] for one in ready)
        memory = times.memory[len(ready), tokens] + times.memory_per_context * context
        compute = times.compute[len(ready), tokens] + times.compute_per_context * context
        widest = max((one["left"][0][0] for one in ready), default=0)
        now += float(times.draft[len(ready), widest] + max(memory, compute))
        iterations += 1
        for one in reading:
            if one["unread"] == 0:
                one["last"] = now
        for one in ready:
            if len(one["left"]) == len(walks[one["name"]]):
                first[one["name"]] = now
            gaps.append(now - one["last"])
            one["last"] = now
            one["context"] += one["left"].pop(0)[1]
            if not one["left"]:
                finish[one["name"]] = now
        running = [one for one in running if one["left"]]
    return {"seconds": now, "iterations": iterations, "first": list(first.values()), "finish": list(finish.values()),
            "gaps": sorted(gaps)}  # fmt: skip


def flat(walks: list[list[tuple[int, int]]]) -> Paths:
    lengths = [len(walk) for walk in walks]
    joined = [step for walk in walks for step in walk]
    return Paths(
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        np.array([step[0] for step in joined], np.int32), np.array([step[1] for step in joined], np.int32),
    )  # fmt: skip


def times_of(seed: int, batch: int, chunk: int) -> Times:
    rng = np.random.default_rng(seed)
    shape = batch + 1, batch * (K + 1) + chunk + 1
    return Times(rng.random(shape), rng.random(shape), 1e-3 * rng.random(), 1e-3 * rng.random(),
                 rng.random((batch + 1, K + 1)), rng.random(64))  # fmt: skip


@st.composite
def loads(draw: Any) -> tuple[Any, ...]:
    step = st.integers(0, K).flatmap(lambda width: st.tuples(st.just(width), st.integers(1, width + 1)))
    walks = draw(st.lists(st.lists(step, max_size=6), min_size=1, max_size=9))
    prompt = draw(st.lists(st.integers(1, 63), min_size=len(walks), max_size=len(walks)))
    arrival = sorted(draw(st.lists(st.sampled_from([0.0, 0.5, 3.25, 40.0]), min_size=len(walks), max_size=len(walks))))
    return (
        walks,
        prompt,
        arrival,
        draw(st.integers(1, 4)),
        draw(st.sampled_from([0, 0, 1, 16])),
        draw(st.integers(0, 9)),
    )


def serve(load: tuple[Any, ...], compiled: bool) -> Served:
    walks, prompt, arrival, batch, chunk, seed = load
    return simulate(flat(walks), np.arange(len(walks)), np.array(prompt), times_of(seed, batch, chunk), batch=batch,
                    arrival=np.array(arrival), chunk=chunk, compiled=compiled)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(loads())
def test_equal_to_a_plain_loop(load: tuple[Any, ...]) -> None:
    walks, prompt, arrival, batch, chunk, seed = load
    plain = plainly(walks, prompt, times_of(seed, batch, chunk), batch, arrival, chunk)
    for compiled in (True, False):
        served = serve(load, compiled)
        assert (served.seconds, served.iterations) == (plain["seconds"], plain["iterations"])
        assert served.first.tolist() == plain["first"] and served.finish.tolist() == plain["finish"]
        assert np.sort(served.gaps).tolist() == plain["gaps"]


def test_one_request_at_a_time_is_the_sum_of_its_steps() -> None:
    times = Times(np.full((2, 9), 2.0), np.zeros((2, 9)), 0.5, 0.0, np.full((2, K + 1), 0.25), np.full(64, 7.0))
    walks = [[(5, 3), (5, 6)], [(2, 1)]]
    served = simulate(flat(walks), np.arange(2), np.array([10, 4]), times, batch=1)
    # prompt 7, then draft .25 + pass 2 + .5 a token of context: 10, then 13; the second request after it
    assert served.finish.tolist() == [7 + 7.25 + 8.75, 23 + 7 + 4.25]
    assert served.gaps.tolist() == [7.25, 8.75, 4.25] and served.iterations == 3


@pytest.mark.parametrize("name", ["eagle3", "lookup", "rules"])
def test_paths_of_a_trace_are_the_steps_of_its_walks(name: str) -> None:
    """Where blocks of several rules meet, a step has several parents, and only the walk knows which way it came."""
    from asdsim.walk.path import visits

    trace = asdsim.load(f"traces/smollm2-{name}")
    merged = 0
    for grid in covered_grids(trace.manifest.grids)[:4]:
        graph = build_graph(trace, grid.layout)
        walks = walk_grid(graph, grid, device="cpu")
        inner = graph.edge_next[graph.edge_next >= 0]
        merged += len(inner) - len(np.unique(inner))
        every, (paths, which) = paths_of(graph, grid, compiled=False), paths_of(graph, grid)
        assert all(
            np.array_equal(one, other) for one, other in zip((*every[0], every[1]), (*paths, which), strict=True)
        )
        for setting, r in np.argwhere(walks.exact):
            visited = visits(graph, grid.policy(int(setting)), int(r)).visits
            lo, hi = paths.start[which[setting, r]], paths.start[which[setting, r] + 1]
            assert paths.tokens[lo:hi].tolist() == [visit.tokens for visit in visited]
            assert paths.drafted[lo:hi].tolist() == [int(graph.drafted[visit.step]) for visit in visited]
            assert paths.proposed is not None and np.array_equal(paths.proposed, paths.drafted)
    assert (merged > 0) == (name == "rules")


def test_equal_paths_are_laid_out_once() -> None:
    trace = asdsim.load("traces/smollm2-eagle3")
    paths, which = paths_of(build_graph(trace), Grid.product(0, ".1,.25,.5", "1,2"))
    assert (which == which[0]).all() and len(paths.start) - 1 == len(np.unique(which[0]))
