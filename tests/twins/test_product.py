"""Sweeps in recorded order and by boxes give the figures of the scalar walk, to the bit."""

from __future__ import annotations

import numpy as np
import pytest

from asdsim.records import MemoryTrace
from asdsim.rules.asd import Reading
from asdsim.rules.settings import Grid
from asdsim.trace.graph import Graph, build_graph
from asdsim.walk import boxes, ledgers, product, recorded
from asdsim.walk.axes import axes_of
from asdsim.walk.recorded import path_arrays
from asdsim.walk.sweep import sweep, sweep_graph, walk_grid
from tests.support.toygraph import toy_requests
from tests.twins.cases import INF, MODES, READINGS, cases, grid, one_path, random_trace, small_grid


def by_pairs(graph: Graph, settings: Grid, mode: str) -> dict[str, np.ndarray]:
    return sweep(
        lambda part: walk_grid(graph, part, off_trace=mode, device="cpu"), settings, graph.num_requests, off_trace=mode
    )


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert list(one) == list(other)
    for name, left in one.items():
        right = other[name]
        assert left.shape == right.shape and left.dtype == right.dtype, name
        assert np.array_equal(left, right, equal_nan=left.dtype.kind == "f"), name


def ways(graph: Graph, mode: str) -> list[str]:
    return ["boxes", "recorded"] if mode == "recorded" and path_arrays(graph) else ["boxes"]


def check(trace: MemoryTrace, settings: Grid, **options) -> int:
    graph = build_graph(trace, settings.layout)
    in_order = 0
    for mode in MODES:
        expected = by_pairs(graph, settings, mode)
        for by in ways(graph, mode):
            assert_same(expected, sweep_graph(graph, settings, off_trace=mode, device="cpu", by=by, **options))
            in_order += by == "recorded"
    return in_order


@pytest.mark.parametrize("name", list(cases()))
def test_every_case(name: str) -> None:
    check(cases()[name], grid())


def test_random_traces() -> None:
    in_order = sum(check(random_trace(seed), grid()) for seed in range(40))
    assert in_order >= 8, "too few of these traces can be walked in recorded order"


def grid_of(reading: Reading) -> Grid:
    axes = [0, 0.125, 0.5, 1.3, INF], [0, 0.125, INF], [0, 1, INF]
    return Grid.product(*axes, reading.semantics, ledger=reading.ledger)


@pytest.mark.parametrize("reading", [Reading("dspark"), Reading("lightllm"), Reading("core", "block")])
def test_readings_compiled(reading: Reading) -> None:
    """A judge that looks at the charge before a mismatch, a ledger in float32, and one that starts anew."""
    for name in ("ties everywhere", "arbitrary floats", "strict path only", "ragged K with 0", "tie"):
        check(cases()[name], grid_of(reading))


@pytest.mark.parametrize("reading", READINGS)
def test_readings_as_python(reading: Reading) -> None:
    for name in ("ties everywhere", "arbitrary floats", "ragged K with 0", "tie"):
        graph = build_graph(cases()[name], grid_of(reading).layout)
        for mode in MODES:
            expected = as_python(graph, grid_of(reading), mode)
            for by in ways(graph, mode):
                found = sweep_graph(graph, grid_of(reading), off_trace=mode, device="python", by=by)
                assert_same(expected, found)


def as_python(graph: Graph, settings: Grid, mode: str) -> dict[str, np.ndarray]:
    return sweep(
        lambda part: walk_grid(graph, part, off_trace=mode, device="python"),
        settings,
        graph.num_requests,
        off_trace=mode,
    )


def test_corners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "CORNERS_FROM", 0)
    for name in cases():
        check(cases()[name], grid())


def test_tiles_and_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = MemoryTrace(toy_requests(7, requests=5, ks=(7,), limit=40, extra=0, grain=0.0, agree=0.7))
    graph = build_graph(trace)
    settings = Grid.product("0:6:.25", "0:1:.05", [0, 1, 2, 3, INF])
    for mode in MODES:
        for by in ways(graph, mode):
            whole = sweep_graph(graph, settings, off_trace=mode, device="cpu", by=by, threads=1)
            assert_same(whole, by_pairs(graph, settings, mode))
            for size in (1, 5000, 100_000):
                monkeypatch.setattr(product, "TILE_BYTES", size)
                for threads in (1, 2, 3):
                    cut = sweep_graph(graph, settings, off_trace=mode, device="cpu", by=by, threads=threads)
                    assert_same(whole, cut)
                monkeypatch.undo()


def test_more_budgets_than_one_set_of_lanes() -> None:
    trace = MemoryTrace(toy_requests(3, requests=3, ks=(7,), limit=60, extra=0, grain=0.0, agree=0.7))
    settings = Grid.product("0:16:.02", [0.2, 0.6], [1, INF])
    assert check(trace, settings) == 1


@pytest.mark.parametrize(("ks", "vocab"), [((2,), 40), ((16,), 40), ((9, 12), 40)])
def test_long_requests_overrun_no_counter(ks: tuple[int, ...], vocab: int) -> None:
    """More steps than a packed counter of 8 bits can count, and histograms of more than one word."""
    trace = MemoryTrace(
        toy_requests(5, requests=2, ks=ks, vocab=vocab, limit=700, extra=0, stop="fixed", agree=0.3, grain=0.0)
    )
    graph = build_graph(trace)
    settings = Grid.product([0, 3, 40, 1000, INF], [0.1, 1, INF], [1, 2, INF])
    assert by_pairs(graph, settings, "recorded")["num_spec_steps"].max() > 2 * 255
    assert check(trace, settings) == 1


@pytest.mark.parametrize("limit", [60, 900])
def test_walks_go_on_from_where_a_gate_changes_them(limit: int) -> None:
    """Many gates that change a step or two each: more marks than are kept, at both ends and behind an unpacking."""
    trace = MemoryTrace(
        toy_requests(11, requests=3, ks=(5,), vocab=40, limit=limit, extra=0, stop="fixed", agree=0.4, grain=0.0)
    )
    assert check(trace, Grid.product([0, 0.5, 2, 7, 30, INF], "0:1.6:.01", [0, 1, 2, INF])) == 1


def test_sums_beyond_32_bits_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are added up in blocks that cannot run over; with a huge limit every request is a block."""
    graph = build_graph(MemoryTrace(toy_requests(9, requests=4, ks=(3,), limit=30, extra=0)))
    limits = np.full(4, 1 << 30, np.int32)
    assert [block.tolist() for block in product._blocks(limits, 3)] == [[0], [1], [2], [3]]
    assert [block.tolist() for block in product._blocks(limits, 1)] == [[0], [1], [2], [3]]
    assert [block.tolist() for block in product._blocks(limits // 2, 1)] == [[0, 1, 2], [3]]
    assert [block.tolist() for block in product._blocks(limits // 4, 1)] == [[0, 1, 2, 3]]
    expected = {mode: by_pairs(graph, grid(), mode) for mode in MODES}
    monkeypatch.setattr(product, "_blocks", lambda *_: iter([np.array([0]), np.array([1, 2]), np.array([3])]))
    for mode in MODES:
        for by in ways(graph, mode):
            assert_same(expected[mode], sweep_graph(graph, grid(), off_trace=mode, device="cpu", by=by))


@pytest.mark.parametrize("corners", [0, 1 << 60])
def test_as_many_boxes_wait_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch, corners: int) -> None:
    """Every mismatch of a walk of twelve blocks of K = 1 leaves a box behind along each of the three axes.

    The room for them is bounded by the cuts of one walk, not by the settings: a bound that is too small is an error,
    not a write out of bounds.
    """
    monkeypatch.setattr(product, "CORNERS_FROM", corners)
    regrets = [0.5, *(float(n) for n in range(1, 7))]
    strict = [([1], [2, 3], [regrets[n % len(regrets)]]) for n in range(12)]
    graph = build_graph(MemoryTrace([one_path(strict, limit=12, stop="fixed")]))
    budgets = [0, 0.5, 1, 1.5, 2, 3.5, 5, 6.5, 8, 10.5, 13, 15.5, 18, 21.5]
    settings = Grid.product(budgets, np.linspace(0, 7, 14), [0, 1])
    for mode in MODES:
        expected = by_pairs(graph, settings, mode)
        assert_same(expected, sweep_graph(graph, settings, off_trace=mode, device="cpu", by="boxes", threads=1))
    whole = boxes.stack_for(len(settings), 1, 12)
    assert len(whole.boxes) == 3 * 12 + 1
    monkeypatch.setattr(boxes, "CUTS", 1)
    with pytest.raises(IndexError, match="more boxes wait than there is room for"):
        sweep_graph(graph, settings, off_trace="recorded", device="cpu", by="boxes", threads=1)


def test_a_strict_path_that_was_not_captured() -> None:
    """The last step of a request is missing: strict matching leaves the trace there, and so does its baseline."""
    made = toy_requests(21, requests=4, ks=(3,), limit=30, extra=0, agree=0.5)
    cut = [(record, steps[:-1] if number % 2 else steps) for number, (record, steps) in enumerate(made)]
    graph = build_graph(MemoryTrace(cut))
    assert not walk_grid(graph, Grid.product([0], [0], [0]), device="cpu").exact.all()
    check(MemoryTrace(cut), grid())


def test_axes_in_any_order_and_lists_of_settings() -> None:
    trace = cases()["arbitrary floats"]
    check(trace, Grid.product([4, 0, 1.3, INF, 0.5], [INF, 0.4, 0], [2, 1]))
    mixed = Grid.of([grid().policy(index) for index in np.random.default_rng(0).permutation(len(grid()))])
    assert axes_of(mixed) is not None
    check(trace, mixed)
    some = Grid.of([grid().policy(index) for index in (3, 1, 4, 15, 9, 26, 5, 35, 8, 9)])
    assert axes_of(some) is None
    check(trace, some)
    assert axes_of(grid()[:7]) is None
    check(trace, grid()[:16])


def test_auto_takes_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = MemoryTrace(toy_requests(7, requests=2, ks=(4,), extra=0, limit=30))
    graph = build_graph(trace)
    taken = []
    for module in (recorded, boxes):
        kernel = module.kernel
        monkeypatch.setattr(module, "kernel", lambda reading, k=kernel, m=module: taken.append(m) or k(reading))
    monkeypatch.setattr("asdsim.walk.sweep.PAIRS_UP_TO", 0)
    for mode in MODES:
        assert_same(by_pairs(graph, grid(), mode), sweep_graph(graph, grid(), off_trace=mode, device="cpu"))
    assert set(taken) == {recorded, boxes}
    taken.clear()
    monkeypatch.setattr("asdsim.walk.sweep.PAIRS_UP_TO", 1 << 60)
    sweep_graph(graph, grid(), device="cpu")
    assert not taken


def test_sources_run_as_python_too() -> None:
    for name in ("ragged K with 0", "strict path only", "tie", "eos inside a block", "limit inside a block", "K of 0"):
        graph = build_graph(cases()[name])
        for mode in MODES:
            expected = by_pairs(graph, small_grid(), mode)
            for by in ways(graph, mode):
                assert_same(expected, sweep_graph(graph, small_grid(), off_trace=mode, device="python", by=by))


@pytest.mark.parametrize("requests", [1, 2, 5, 24, 150, 164, 400])
@pytest.mark.parametrize("absent", [0.0, 0.3, 1.0])
def test_ledgers(requests: int, absent: float) -> None:
    """Both forms of the percentile are numpy's linear one, to the bit; the sum runs from the first request on."""
    rng = np.random.default_rng(requests)
    shape = (requests, 3, 2, 37)
    spent = np.where(rng.random(shape) < 0.5, rng.integers(0, 5, shape) / 4, rng.random(shape) * 8)
    spent[rng.random(shape) < absent] = -1.0
    total, highest, p95 = (np.zeros(shape[1:]) for _ in range(3))
    ledgers.kernel()(spent, ledgers.scratch(requests, *shape[2:]), total, highest, p95)
    by_setting = spent.reshape(requests, -1).T
    keep = by_setting >= 0
    assert np.array_equal(p95.ravel(), ledgers.percentile(by_setting, keep), equal_nan=True)
    for n, (row, kept) in enumerate(zip(by_setting, keep, strict=True)):
        linear = np.quantile(row[kept], 0.95) if kept.any() else np.nan
        assert p95.ravel()[n] == pytest.approx(linear, rel=1e-15, nan_ok=True)
        expected = 0.0
        for value in row[kept]:
            expected += value
        assert total.ravel()[n] == expected
        assert np.array_equal(highest.ravel()[n], row[kept].max() if kept.any() else np.nan, equal_nan=True)
