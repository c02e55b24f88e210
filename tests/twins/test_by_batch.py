"""Draft length by batch: compiled, plain Python, the oracle in a plain loop and live decoding of batches agree."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from asdsim.capture.cover import BatchRunner, cover
from asdsim.capture.loop import decode
from asdsim.capture.record import Recorder
from asdsim.errors import UsageError
from asdsim.live.batched import Batched
from asdsim.oracle import walk as reference
from asdsim.records import MemoryTrace, RequestRecord
from asdsim.result import reference_blocks
from asdsim.rules.settings import STRICT, Grid, Schedule, parse_schedule, schedule_of
from asdsim.trace.graph import build_graph
from asdsim.trace.tokens import edge_tokens
from asdsim.walk.batch import Served, Times, paths_of, simulate, simulate_by_batch
from asdsim.walk.ladder import Ladder, demand_of_all, ladder_of
from asdsim.walk.sweep import walk_grid
from tests.support.toymodels import ToyDrafter, ToyTarget

K = 5
SCHEDULES = [Schedule(((1, 5), (2, 3), (4, 1))), Schedule(((1, 3), (3, 0))), Schedule(((1, 0), (2, 5)))]
SETTINGS = [Grid.product(0, 0, 0), Grid.product(1.5, 0.25, 2), Grid.product(4, 0.5, 3, "dspark")]


def models(seed: int) -> tuple[ToyTarget, ToyDrafter]:
    target = ToyTarget(seed, 16)
    return target, ToyDrafter(target, 0.7)


@cache
def covered(seed: int, schedule: Schedule, setting: int) -> tuple[MemoryTrace, Ladder]:
    """Return a strict capture on whole blocks, completed for every walk of a schedule."""
    target, drafter = models(seed)
    records = [
        RequestRecord(f"toy/{n}", "toy", tuple(range(1, 3 + n)), "", None, 8 + 3 * (n % 3), target.eos_ids, stop)
        for n, stop in enumerate(["natural", "fixed", "natural", "natural", "fixed"])
    ]
    captured = [(record, list(decode(target, drafter, record, STRICT, K, Recorder()).steps)) for record in records]
    held = {record.request_id: steps for record, steps in captured}
    grid = SETTINGS[setting]
    progress = cover(
        captured, lambda ladder: demand_of_all(ladder, grid), BatchRunner(target, drafter, K, Recorder()),
        lambda name, new: held[name].extend(new), settings=len(grid),
        build=lambda trace: ladder_of(trace, grid.layout, schedule.lengths),
    )  # fmt: skip
    assert progress.complete and progress.steps_added
    trace = MemoryTrace([(record, held[record.request_id]) for record in records])
    return trace, ladder_of(trace, grid.layout, schedule.lengths)


def times_of(seed: int, batch: int, chunk: int) -> Times:
    rng = np.random.default_rng(seed)
    shape = batch + 1, batch * (K + 1) + chunk + 1
    return Times(rng.random(shape), rng.random(shape), 1e-3 * rng.random(), 1e-3 * rng.random(),
                 rng.random((batch + 1, K + 1)), rng.random(64))  # fmt: skip


def plainly(
    trace: MemoryTrace, schedule: Schedule, grid: Grid, queue: list[int], times: Times, batch: int,
    arrival: list[float], chunk: int,
) -> dict[str, Any]:  # fmt: skip
    """Serve a queue with the oracle: every step is a walk of its own, over the draft lengths met so far."""
    records, blocks = trace.request_records(), list(reference_blocks(trace, grid.layout))
    policy = grid.policy(0)
    waiting, running, done = list(range(len(queue))), [], {}
    now, iterations, gaps = 0.0, 0, []

    def walk(one: dict[str, Any]) -> reference.Outcome:
        record = records[one["request"]]
        return reference.walk(
            blocks[one["request"]], B=policy.budget, g=policy.gate, M=policy.cap, semantics=policy.semantics,
            max_new_tokens=record.max_new_tokens, eos=record.eos_ids if record.stop == "natural" else (),
            lengths=one["lengths"],
        )  # fmt: skip

    while waiting or running:
        while waiting and len(running) < batch and arrival[waiting[0]] <= now:
            name = waiting.pop(0)
            prompt = len(records[queue[name]].prompt_ids)
            if chunk == 0:
                now += float(times.prompt[prompt])
            running.append({"name": name, "request": queue[name], "lengths": [], "context": prompt, "last": now,
                            "unread": prompt if chunk else 0, "first": None})  # fmt: skip
        if not running:
            now = max(now, arrival[waiting[0]])
            continue
        length = schedule.at(len(running))
        ready = [one for one in running if one["unread"] == 0]
        room, verified, widest, reading = chunk, 0, 0, []
        held = sum(one["context"] for one in ready)
        for one in running:
            if one["unread"]:
                part = min(room, one["unread"])
                one["unread"], room, verified = one["unread"] - part, room - part, verified + part
                reading.append(one)
        for one in ready:
            one["lengths"].append(length)
            one["out"] = walk(one)
            drafted = one["out"].drafted[-1]
            verified, widest = verified + drafted + 1, max(widest, drafted)
        memory = times.memory[len(ready), verified] + times.memory_per_context * held
        compute = times.compute[len(ready), verified] + times.compute_per_context * held
        now += float(times.draft[len(ready), widest] + max(memory, compute))
        iterations += 1
        for one in reading:
            if one["unread"] == 0:
                one["last"] = now
        for one in ready:
            one["first"] = now if one["first"] is None else one["first"]
            gaps.append(now - one["last"])
            one["last"] = now
            one["context"] = len(records[one["request"]].prompt_ids) + len(one["out"].tokens)
            if one["out"].ended:
                done[one["name"]] = (one["first"], now, one["out"].tokens, one["out"].spent)
            assert not one["out"].left
        running = [one for one in running if one["name"] not in done]
    return {"seconds": now, "iterations": iterations, "gaps": gaps, "done": [done[n] for n in range(len(queue))]}


@pytest.mark.parametrize("chunk", [0, 2])
@pytest.mark.parametrize("batch", [1, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("setting", range(len(SETTINGS)))
def test_equal_to_the_oracle_in_a_plain_loop(setting: int, schedule: Schedule, batch: int, chunk: int) -> None:
    trace, ladder = covered(3, schedule, setting)
    grid = SETTINGS[setting]
    queue = [0, 1, 2, 3, 4, 2, 0, 1]
    arrival = [0.0, 0.0, 0.0, 2.0, 9.0, 9.0, 9.5, 60.0] if batch == 3 else [0.0] * len(queue)
    times = times_of(batch, batch, chunk)
    plain = plainly(trace, schedule, grid, queue, times, batch, arrival, chunk)
    prompt = np.array([len(record.prompt_ids) for record in trace.request_records()])
    served: list[Served] = [
        simulate_by_batch(ladder, schedule, grid.policy(0), np.array(queue), prompt[queue], times, batch=batch,
                          arrival=np.array(arrival), chunk=chunk, compiled=compiled)
        for compiled in (True, False)
    ]  # fmt: skip
    for one in served:
        assert not one.lost and (one.seconds, one.iterations) == (plain["seconds"], plain["iterations"])
        assert one.gaps.tolist() == plain["gaps"]
        assert list(zip(one.first, one.finish, strict=True)) == [done[:2] for done in plain["done"]]
        assert one.spent.tolist() == [done[3] for done in plain["done"]]
        assert one.tokens.tolist() == [len(done[2]) for done in plain["done"]]
        assert [edge_tokens(trace, ladder, int(edge)) for edge in one.edge] == [done[2] for done in plain["done"]]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("setting", [0, 1])
def test_real_batches_decode_the_same_tokens(setting: int, schedule: Schedule) -> None:
    """The models, served in batches under the table, give what the replay says: tokens, ledgers and iterations."""
    trace, ladder = covered(3, schedule, setting)
    policy = SETTINGS[setting].policy(0)
    queue = [4, 0, 3, 1, 2, 0]
    records = trace.request_records()
    engine = Batched(*models(3), policy, schedule)
    courses = engine.serve([records[r] for r in queue], 4)
    prompt = np.array([len(records[r].prompt_ids) for r in queue])
    served = simulate_by_batch(ladder, schedule, policy, np.array(queue), prompt, times_of(0, 4, 0), batch=4)
    assert [edge_tokens(trace, ladder, int(edge)) for edge in served.edge] == [course.tokens for course in courses]
    assert served.spent.tolist() == [course.spent for course in courses]
    assert served.iterations == len(engine.iterations)
    assert len({one.width for one in engine.iterations}) > 1


@pytest.mark.parametrize("setting", range(len(SETTINGS)))
def test_one_length_for_all_batches_is_that_draft_length(setting: int) -> None:
    schedule = SCHEDULES[0]
    trace, ladder = covered(3, schedule, setting)
    for length in schedule.lengths:
        grid = Grid.product(**{n: SETTINGS[setting].axes[n] for n in "BgM"}, semantics=SETTINGS[setting].semantics,
                            K=length)  # fmt: skip
        graph = build_graph(trace, grid.layout)
        walks = walk_grid(graph, grid, device="cpu")
        assert walks.exact.all()  # covering the table covers each of its lengths
        paths, which = paths_of(graph, grid)
        queue, prompt = np.array([0, 1, 2, 3, 4, 0]), np.full(6, 3)
        times = times_of(7, 3, 0)
        fixed = simulate(paths, which[0][queue], prompt, times, batch=3)
        by_batch = simulate_by_batch(ladder, Schedule(((1, length),)), grid.policy(0), queue, prompt, times, batch=3)
        assert (fixed.seconds, fixed.iterations) == (by_batch.seconds, by_batch.iterations)
        assert np.array_equal(fixed.gaps, by_batch.gaps) and np.array_equal(fixed.tokens, by_batch.tokens)
        assert np.array_equal(by_batch.spent, walks.spent[0][queue])


def test_a_prefix_that_was_not_captured_is_told() -> None:
    target, drafter = models(3)
    record = RequestRecord("toy/0", "toy", (1, 2), "", None, 20, (), "fixed")
    trace = MemoryTrace([(record, decode(target, drafter, record, STRICT, K, Recorder()).steps)])
    ladder = ladder_of(trace, STRICT.layout, (1, 5))
    served = simulate_by_batch(
        ladder, Schedule(((1, 1),)), STRICT, np.array([0]), np.array([2]), times_of(0, 1, 0), batch=1
    )
    assert served.lost == 1
    assert not demand_of_all(ladder, Grid.of([STRICT])).exact.any()
    with pytest.raises(UsageError, match="no draft length 3"):
        simulate_by_batch(ladder, Schedule(((1, 3),)), STRICT, np.array([0]), np.array([2]), times_of(0, 1, 0), batch=1)


def test_tables_are_read_as_vllm_reads_them() -> None:
    schedule = parse_schedule("1-4:5,5-16:3,17-:1")
    assert [schedule.at(batch) for batch in (1, 4, 5, 16, 17, 900)] == [5, 5, 3, 3, 1, 1]
    assert str(schedule) == "1-4:5,5-16:3,17-:1" and parse_schedule(str(schedule)) == schedule
    assert schedule.rows(64) == [[1, 4, 5], [5, 16, 3], [17, 64, 1]] and schedule_of(schedule.rows(64)) == schedule
    assert schedule.rows(4) == [[1, 4, 5]]
    gap = schedule_of([[1, 2, 5], [8, 16, 0]])  # a gap belongs to the range before it
    assert [gap.at(batch) for batch in (2, 3, 7, 8, 99)] == [5, 5, 5, 0, 0]
    assert parse_schedule("1:5,2:0") == Schedule(((1, 5), (2, 0)))
    for text in ("", "2-4:5", "1-4:5,4-8:3", "1-4", "1-4:x", "4-1:3", "1-4:-1", "1-:5,2-:3"):
        with pytest.raises(UsageError):
            parse_schedule(text)
