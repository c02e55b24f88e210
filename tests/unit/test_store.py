"""A trace read group by group gives what it gives whole, to the bit; what its graph is kept in can be lost."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from asdsim.cli import cli
from asdsim.errors import TraceError, UsageError
from asdsim.evaluate import summary
from asdsim.evaluate.quality import Evaluator
from asdsim.evaluate.summary import summarise
from asdsim.result import replay_grid
from asdsim.rules.scoring import Layout
from asdsim.rules.settings import Grid, rule_grids
from asdsim.studies.calibrate import Limits, Quantile, calibrate
from asdsim.studies.compare import compare
from asdsim.trace import groups, store
from asdsim.trace.graph import build_graph, whole_graph
from asdsim.trace.groups import StreamedTrace
from asdsim.trace.reader import read_trace
from asdsim.trace.spread import spread
from asdsim.trace.store import FOLDER, GraphStore, fill, is_sound
from tests.support.toytrace import ToyModel, write_toy_trace
from tests.support.tracefiles import edit_manifest

MODEL = ToyModel(widths=(2, 5, 7), agree=0.55, divergences=("kl",))
WIDE = Grid.product([0, 0.5, 2, 9, 99], [0.1, 0.5, 99], [1, 2, 9])
GRIDS = {
    "wide": WIDE,
    "listed": WIDE[[3, 17, 40]],
    "cut": Grid.product([0, 1, 4], [0.5, 9], [1, 7], K=2),
    "threshold": Grid.product([0, 1, 4], [0.5, 9], [1, 7], draft_threshold=0.6, draft_stop="before"),
    "rule": rule_grids("mars", {"theta": [0.5, 0.9]})[0],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "trace"
    write_toy_trace(path, MODEL, count=14, limit=20, cover=25, shards=3)
    return path


def streamed(folder: Path, **options: Any) -> StreamedTrace:
    return StreamedTrace(folder, rows=300, **options)


def equal(one: Any, other: Any) -> None:
    np.testing.assert_equal(one, other)


@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(width=2), Layout(threshold=0.6, stop="before"), Layout("mars", params=(("theta", 0.9),))],
    ids=str,
)
def test_a_graph_in_parts_joins_to_the_whole_one(folder: Path, layout: Layout) -> None:
    kept = GraphStore(streamed(folder), layout)
    assert kept.num_parts > 3
    whole, joined = build_graph(read_trace(folder), layout), whole_graph(kept)
    for name in store.ARRAYS:
        one, other = getattr(whole, name), getattr(joined, name)
        assert one.dtype == other.dtype and np.array_equal(one, other, equal_nan=True), name
    assert (kept.request_ids, kept.num_steps, kept.max_draft) == (whole.request_ids, whole.num_steps, whole.max_draft)
    assert kept.num_mismatches == len(whole.mm_pos) and joined.max_draft == whole.max_draft


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("off_trace", ["stop", "aligned", "recorded", "pooled"])
def test_a_replay_in_parts_is_the_whole_one(
    folder: Path, name: str, off_trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asdsim.walk.sweep.PAIRS_UP_TO", 0)
    trace = streamed(folder)
    one = replay_grid(read_trace(folder), GRIDS[name], off_trace=off_trace, threads=2)
    for threads in (1, 2):
        other = replay_grid(trace, GRIDS[name], off_trace=off_trace, threads=threads)
        equal(other.columns, one.columns)
        assert other.rows() == one.rows() and other.provenance() == one.provenance()


def test_little_memory_goes_through_the_graph_more_often(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from asdsim.walk import product
    from asdsim.walk.sweep import sweep_graph

    kept = GraphStore(streamed(folder))
    whole = sweep_graph(build_graph(read_trace(folder)), WIDE)
    passes: list[int] = []
    parts = GraphStore.parts

    def counted(self: GraphStore) -> Any:
        passes.append(1)
        return parts(self)

    monkeypatch.setattr(GraphStore, "parts", counted)
    monkeypatch.setattr("asdsim.walk.sweep.PAIRS_UP_TO", 0)
    monkeypatch.setattr(product, "TILE_BYTES", 8 * 14 * 6)
    for memory in (8 * 14 * 12, 8 * 14 * 1000):
        passes.clear()
        equal(sweep_graph(kept, WIDE, memory=memory), whole)
        assert (len(passes) > 2) == (memory == 8 * 14 * 12)


def test_walks_and_outputs_are_those_of_the_whole(folder: Path) -> None:
    one, other = (replay_grid(trace, WIDE) for trace in (read_trace(folder), streamed(folder)))
    for name in ("counts", "spent", "edge", "histogram"):
        assert np.array_equal(getattr(one.walks(), name), getattr(other.walks(), name)), name
    assert one.outputs().tokens == other.outputs().tokens
    assert other.walk(5, 3) == one.walk(5, 3) and other.tokens(0, 1) == one.tokens(0, 1)
    assert other.margin(0, 0) == one.margin(0, 0)


@pytest.mark.parametrize("off_trace", ["stop", "recorded"])
def test_every_figure_and_interval_is_that_of_the_whole(folder: Path, off_trace: str) -> None:
    whole = read_trace(folder)
    for grid in (WIDE[:9], GRIDS["cut"]):
        one, other = (
            Evaluator(trace, resamples=50, scorer=_score).evaluate(grid, off_trace=off_trace)
            for trace in (whole, streamed(folder))
        )
        assert one.figures.keys() == other.figures.keys()
        equal([other.row(n) for n in range(len(grid))], [one.row(n) for n in range(len(grid))])
    some = [1, 4, 5, 9, 11, 13]
    one, other = (
        Evaluator(trace, resamples=50).evaluate(WIDE[:4], requests=some) for trace in (whole, streamed(folder))
    )
    equal(other.row(2), one.row(2))


def _score(request: int, output: bytes) -> bool | None:
    return None if request == 4 else (len(output) + request) % 3 == 0


@pytest.mark.parametrize("off_trace", ["pooled", "recorded", "stop"])
@pytest.mark.parametrize("level", [None, 2.0])
def test_a_comparison_in_parts_is_the_whole_one(folder: Path, off_trace: str, level: float | None) -> None:
    rules = ["asd", "mars", "truncate", "fly", "strict", "entropy"]
    one, other = (
        compare(trace, rules, off_trace=off_trace, level=level, resamples=40)
        for trace in (read_trace(folder), streamed(folder))
    )
    equal(other.rows, one.rows)
    assert other.skipped == one.skipped and other.cost == one.cost and other.unpaired == one.unpaired


@pytest.mark.parametrize("way", [WIDE, Quantile(0.5, 2.0)], ids=["pareto", "quantile"])
def test_a_calibration_in_parts_is_the_whole_one(folder: Path, way: Any) -> None:
    found = []
    for trace in (read_trace(folder), streamed(folder)):
        evaluator = Evaluator(trace, resamples=40)
        if isinstance(way, Quantile):
            made = calibrate(evaluator, way, limits=Limits(length_change=0.9), estimated="recorded")
        else:
            made = calibrate(evaluator, way, split=3)
        found.append((made.grid.policy(0), made.folds, made.calibration.row(0), made.holdout and made.holdout.row(0)))
    equal(found[1], found[0])


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "TRACE"],
        ["replay", "TRACE", "--B", "0,1,4", "--g", ".5,9", "--M", "1,9", "--off-trace", "stop", "--intervals"],
        ["replay", "TRACE"],
        ["replay", "TRACE", "--B", "exact:2", "--g", "9", "--M", "2"],
        ["replay", "TRACE", "--rule", "mars", "-p", "theta=.5,.9"],
        ["compare", "TRACE", "--rules", "asd,mars,strict"],
        ["convert", "TRACE", "--B", "1", "--g", "9", "--M", "2"],
        ["convert", "TRACE", "--to", "sglang-sim"],
        ["calibrate", "TRACE", "--B", "0,1", "--g", "9", "--M", "1", "-o", "OUT"],
    ],
    ids=lambda words: "-".join(words[:1] + words[2:4]),
)
def test_commands_print_the_same(
    folder: Path, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> Any:
        given = [{"TRACE": str(folder), "OUT": str(tmp_path / "policy.json")}.get(word, word) for word in words]
        done = CliRunner().invoke(cli, [*given, "--json"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    whole = run()
    monkeypatch.setattr(groups, "GROUP_ROWS", 300)
    if words != ["replay", "TRACE"]:  # by several processes, which take their time to start
        monkeypatch.setattr(StreamedTrace, "most_processes", lambda *_: 1)
    assert run() == whole
    assert run() == whole  # from the graph that was kept


def test_a_conversion_is_written_row_by_row(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    for rows in (1 << 20, 300):
        monkeypatch.setattr(groups, "GROUP_ROWS", rows)
        done = CliRunner().invoke(cli, ["convert", str(folder), "-o", str(tmp_path / "out.jsonl")])
        assert done.exit_code == 0
        written.append(((tmp_path / "out.jsonl").read_bytes(), done.stdout))
    assert written[0] == written[1] and written[0][0].count(b"\n") == 14


# --- what is kept on disk -------------------------------------------------------------------------------------------


@pytest.fixture
def own(folder: Path, tmp_path: Path) -> Path:
    import shutil

    path = tmp_path / "own"
    shutil.copytree(folder, path, ignore=shutil.ignore_patterns(FOLDER))
    return path


def laid_out(trace: StreamedTrace) -> GraphStore:
    kept = GraphStore(trace)
    kept.fill()
    return kept


def test_a_second_reader_lays_nothing_out(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = laid_out(streamed(own))
    assert first.built == first.num_parts and len(list((own / FOLDER).glob("*/*.arrow"))) == first.num_parts
    monkeypatch.setattr(store, "build_graph", lambda *_: pytest.fail("laid out again"))
    again = laid_out(streamed(own))
    equal([graph.edge_next for _, graph in again.parts()], [graph.edge_next for _, graph in first.parts()])
    assert again.built == 0
    assert read_trace(own).num_requests == 14  # no part of the trace


@pytest.mark.parametrize("damage", ["cut", "empty", "bytes", "gone", "other"])
def test_a_damaged_file_is_made_again(own: Path, damage: str) -> None:
    before = [graph.mm_regret for _, graph in laid_out(streamed(own)).parts()]
    file = sorted((own / FOLDER).glob("*/*.arrow"))[1]
    data = bytearray(file.read_bytes())
    if damage == "gone":
        file.unlink()
    elif damage == "other":
        file.write_bytes(sorted((own / FOLDER).glob("*/*.arrow"))[2].read_bytes())
    else:
        values = before[1].tobytes()
        place = data.index(values)
        data[place : place + 8] = b"\1" * 8
        file.write_bytes({"cut": data[: len(data) // 2], "empty": b"", "bytes": data}[damage])
    kept = GraphStore(streamed(own))
    equal([graph.mm_regret for _, graph in kept.parts()], before)
    assert kept.built == 1
    assert laid_out(streamed(own)).built == 0


def test_files_of_another_manifest_are_removed(own: Path) -> None:
    laid_out(streamed(own))
    old = {path.name for path in (own / FOLDER).iterdir()}
    edit_manifest(own, lambda content: content["notes"].update(created="later"))
    assert laid_out(streamed(own)).built > 0
    assert not old & {path.name for path in (own / FOLDER).iterdir()}


@pytest.mark.parametrize("where", ["beside", "nowhere"])
def test_where_nothing_can_be_written_nothing_is_missed(own: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write = store.write_made

    def refuse(file: Path, made: Any) -> None:
        if where == "nowhere" or own in file.parents:
            raise OSError(30, "Read-only file system")
        write(file, made)

    monkeypatch.setattr(store, "write_made", refuse)
    kept = GraphStore(streamed(own))
    whole = build_graph(read_trace(own))
    assert np.array_equal(whole_graph(kept).edge_next, whole.edge_next)
    assert kept.built == kept.num_parts and not list(own.glob(f"{FOLDER}/*/*.arrow"))


def test_a_disk_that_fills_up_loses_nothing(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, left = store.write_made, [2]

    def until_full(file: Path, made: Any) -> None:
        if own in file.parents and not left[0]:
            raise OSError(28, "No space left on device")
        left[0] -= own in file.parents
        write(file, made)

    monkeypatch.setattr(store, "write_made", until_full)
    kept = GraphStore(streamed(own))
    assert np.array_equal(whole_graph(kept).edge_next, build_graph(read_trace(own)).edge_next)
    assert kept.built == kept.num_parts


def test_no_cache_leaves_no_file(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "GROUP_ROWS", 300)
    words = ["replay", str(own), "--B", "1", "--g", "9", "--M", "2", "--off-trace", "stop", "--json"]
    for more, env in ((["--no-cache"], {}), ([], {"ASDSIM_NO_GRAPH_CACHE": "1"})):
        assert CliRunner(env=env).invoke(cli, [*words, *more]).exit_code == 0
        assert not (own / FOLDER).exists()
    assert CliRunner().invoke(cli, words).exit_code == 0
    assert (own / FOLDER).exists()


def test_layouts_of_other_rules_are_temporary_and_hold_scores_alone(own: Path) -> None:
    trace = streamed(own)
    base = GraphStore(trace)
    other = GraphStore(trace, GRIDS["rule"].layout, base=base)
    fill([other])
    assert base.built == other.built == base.num_parts
    folders = [path for path in (own / FOLDER).iterdir() if "-tmp-" in path.name]
    assert len(folders) == 1
    whole = build_graph(read_trace(own), GRIDS["rule"].layout)
    joined = whole_graph(other)
    equal((joined.mm_score, joined.mm_charge, joined.edge_next), (whole.mm_score, whole.mm_charge, whole.edge_next))
    del other
    assert not folders[0].exists()


def test_layouts_that_cut_elsewhere_are_laid_out_apart(own: Path) -> None:
    trace = streamed(own)
    layouts = [Layout(), *(Layout(threshold=tau, stop=stop) for tau in (0.6, 0.8) for stop in ("after", "before"))]
    stores = [GraphStore(trace, layout) for layout in layouts]
    fill(stores)
    for layout, kept in zip(layouts, stores, strict=True):
        whole, joined = build_graph(read_trace(own), layout), whole_graph(kept)
        for name in ("drafted", "proposed", "mm_pos", "mm_score", "edge_next"):
            equal(getattr(joined, name), getattr(whole, name))
    assert len(list((own / FOLDER).glob("*/*.arrow"))) == len(stores) * stores[0].num_parts
    assert len([path for path in (own / FOLDER).iterdir() if "-tmp-" not in path.name]) == 1


def test_readers_at_once_find_whole_files_only(own: Path) -> None:
    expected = build_graph(read_trace(own)).mm_regret
    failures: list[BaseException] = []

    def read() -> None:
        try:
            assert np.array_equal(whole_graph(GraphStore(streamed(own))).mm_regret, expected)
        except BaseException as error:
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(6)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert not failures


@pytest.mark.parametrize(
    "name, value",
    [("root", 10**6), ("edge_next", 10**6), ("edge_next", -3), ("edge_next", 0), ("path_step", -1), ("mm_pos", 99),
     ("mm_ptr", 10**9), ("edge_accepted", 50), ("edge_tokens", -1), ("align_step", 10**6), ("drafted", 99),
     ("proposed", 99)],
)  # fmt: skip
def test_what_would_lead_a_walk_astray_is_told(folder: Path, name: str, value: int) -> None:
    graph = next(graph for _, graph in GraphStore(streamed(folder)).parts())
    assert is_sound(graph)
    values = getattr(graph, name).copy()
    values[-1 if name != "edge_next" else int(np.argmax(graph.edge_next >= 0))] = value
    assert not is_sound(replace(graph, **{name: values}))
    assert not is_sound(replace(graph, **{name: values[:-1]}))


def test_a_fault_is_named_when_its_group_is_read(own: Path) -> None:
    file = sorted(own.glob("positions-*"))[-1]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(TraceError, match="SHA-256"):
        laid_out(streamed(own))


def test_too_little_memory_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="too little"):
        StreamedTrace(folder, memory=2e8)
    assert StreamedTrace(folder, memory=4.5e8).rows < StreamedTrace(folder).rows


# --- several processes --------------------------------------------------------------------------------------------


def many(folder: Path, processes: int = 3, **options: Any) -> StreamedTrace:
    trace = streamed(folder, **options)
    trace.processes = processes
    return trace


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (folder / FOLDER).glob("*/*.arrow")}


def test_several_processes_write_what_one_does(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = laid_out(streamed(own))
    expected = files(own)
    shutil.rmtree(own / FOLDER)
    rows: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(store, "build_graph", lambda *_: pytest.fail("laid out by the caller"))
        trace = many(own)
        trace.progress = rows.append
        other = laid_out(trace)
    assert files(own) == expected and len(expected) == one.num_parts
    assert other.built == one.built and other._all_sizes() == one._all_sizes()
    assert sum(rows) >= read_trace(own).positions.num_rows  # of row groups that two processes share, twice


@pytest.mark.parametrize("where", ["beside", "elsewhere"])
def test_several_processes_write_where_one_would(own: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = build_graph(read_trace(own))
    if where == "elsewhere":
        (own / FOLDER).write_text("no folder")
    monkeypatch.setattr(store, "build_graph", lambda *_: pytest.fail("laid out by the caller"))
    joined = whole_graph(laid_out(many(own)))
    equal([getattr(joined, name) for name in store.ARRAYS], [getattr(whole, name) for name in store.ARRAYS])


def test_a_process_keeps_no_graph_to_itself(own: Path) -> None:
    lent = pickle.loads(pickle.dumps(GraphStore(streamed(own))))
    (own / FOLDER).write_text("no folder")
    with pytest.raises(OSError, match="no directory"):
        lent._write(0, build_graph(read_trace(own)))
    assert not lent._held and lent._temporary is None


def test_layouts_of_several_rules_are_shared_out_together(own: Path) -> None:
    layouts = [Layout("mars", params=(("theta", 0.9),)), Layout(width=2), Layout(threshold=0.6, stop="before")]
    found = []
    for trace in (streamed(own), many(own)):
        base = GraphStore(trace, keep=False)
        stores = [base, *(GraphStore(trace, layout, base=base if not n else None) for n, layout in enumerate(layouts))]
        fill(stores)
        found.append([[vars(graph) for _, graph in held.parts()] for held in stores])
        assert [held.built for held in stores] == [base.num_parts] * 4
    equal(found[1], found[0])


@pytest.mark.parametrize("lost", ["killed", "raised"])
def test_what_a_lost_process_leaves_is_made_by_the_caller(
    own: Path, lost: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(store, "lay_out", killed if lost == "killed" else raised)
    whole, joined = build_graph(read_trace(own)), whole_graph(laid_out(many(own)))
    assert capfd.readouterr().err == ""
    equal([getattr(joined, name) for name in store.ARRAYS], [getattr(whole, name) for name in store.ARRAYS])


def killed(stores: list[GraphStore], missing: list[set[int]], n: int, group: Any) -> bool:
    found = LAY_OUT(stores, missing, n, group)
    if multiprocessing.parent_process() is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    return found


def raised(stores: list[GraphStore], missing: list[set[int]], n: int, group: Any) -> bool:
    if multiprocessing.parent_process() is not None:
        raise MemoryError if n else ValueError
    return LAY_OUT(stores, missing, n, group)


LAY_OUT = store.lay_out


def test_processes_do_not_hear_of_ctrl_c(own: Path) -> None:
    assert spread(many(own), deaf, range(6)) == dict.fromkeys(range(6), True)
    assert not deaf(0, None)


def deaf(number: int, group: Any) -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])


SCRIPT = """
print("once")
from asdsim.trace.groups import StreamedTrace
from asdsim.evaluate.summary import summarise
trace = StreamedTrace(PATH, rows=300)
trace.processes = 3
print(summarise(trace)["steps"])
"""


def test_a_script_needs_no_guard(own: Path, tmp_path: Path) -> None:
    text = SCRIPT.replace("PATH", repr(str(own)))
    (tmp_path / "script.py").write_text(text)
    for words, given in (([str(tmp_path / "script.py")], ""), (["-"], text)):
        done = subprocess.run([sys.executable, *words], input=given, capture_output=True, text=True, check=True)
        assert (done.stdout.split(), done.stderr) == (["once", str(summarise(read_trace(own))["steps"])], "")


@pytest.mark.parametrize("how", ["daemon", "no room"])
def test_where_no_process_can_be_started_the_caller_does_it(
    own: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = summarise(read_trace(own))
    if how == "daemon":
        monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    else:
        monkeypatch.setattr("multiprocessing.util.spawnv_passfds", no_room)
    assert summarise(many(own)) == expected


def no_room(*_: Any) -> int:
    raise BlockingIOError(11, "Resource temporarily unavailable")


def test_a_summary_by_several_processes_is_that_of_one(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = summarise(read_trace(own))
    assert summarise(many(own)) == expected
    monkeypatch.setattr("asdsim.evaluate.summary._look", lost_look)
    assert summarise(many(own)) == expected


def lost_look(number: int, group: Any) -> Any:
    if multiprocessing.parent_process() is not None and number % 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return LOOK(number, group)


LOOK = summary._look


def test_an_error_is_the_same_in_several_processes(own: Path) -> None:
    file = sorted(own.glob("positions-*"))[-1]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    said = []
    for trace in (many(own, verify=False), streamed(own, verify=False)):
        with pytest.raises(TraceError) as caught:
            laid_out(trace)
        said.append(str(caught.value))
    assert said[0] == said[1]


def test_a_rule_that_cannot_be_laid_out_stops_at_the_first_group(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    trace = streamed(own)
    trace.progress = read.append
    monkeypatch.setattr(store, "build_graph", refused)
    with pytest.raises(TraceError, match="not this one"):
        laid_out(trace)
    assert not read  # told once a group is done


def refused(*_: Any) -> None:
    raise TraceError("not this one")


@pytest.mark.parametrize("wanted", [{0}, {2, 3}, {1, 4}, {3}])
def test_some_groups_are_those_of_the_whole(folder: Path, wanted: set[int]) -> None:
    trace = streamed(folder)
    whole = [group for n, group in enumerate(trace.groups()) if n in wanted]
    for one, other in zip(trace.groups(wanted), whole, strict=True):
        assert one.request_ids() == other.request_ids()
        assert all(getattr(one, table).equals(getattr(other, table)) for table in ("requests", "steps", "positions"))


@pytest.mark.parametrize(
    ("memory", "cores", "weight", "expected"),
    [
        (4.5e8, 64, 1.0, 1),
        (2e9, 64, 1.0, 2),
        (4e9, 64, 1.0, 6),
        (4e9, 64, 1.2, 5),
        (4e9, 2, 1.0, 2),
        (64e9, 64, 1.0, 64),
    ],
)
def test_memory_bounds_the_processes(folder: Path, memory: float, cores: int, weight: float, expected: int) -> None:
    trace = StreamedTrace(folder, memory=memory)
    trace.processes = cores
    assert trace.most_processes(weight) == expected
