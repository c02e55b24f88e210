"""A trace recorded in an engine holds what a capture of the same blocks holds, and replays to what the engine did."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from asdsim.capture import record as capture
from asdsim.engines.protocol import Proposal
from asdsim.records import NO_PARENT
from asdsim.rules.settings import Policy
from asdsim.trace import read_trace
from tests.engines.test_ledger import EOS, engine_step, make_requests

torch = pytest.importorskip("torch")
from asdsim.engines.config import EngineConfig  # noqa: E402
from asdsim.engines.ledger import Ledger  # noqa: E402
from asdsim.engines.record import Recorder  # noqa: E402
from asdsim.live.serving import BATCHES, TraceSink  # noqa: E402

ABOUT = {
    "engine": {"name": "toy", "version": "1"}, "target": {"name": "toy", "logits_dtype": "float32"},
    "drafter": {"name": "toy"}, "vocab_size": 12, "num_draft_tokens": 5, "top_k": 8, "device": "cpu", "part": "",
}  # fmt: skip


def sink_at(path: Path) -> TraceSink:
    return TraceSink.open(EngineConfig(Policy(0, 0, 0), trace=str(path)), ABOUT)


class Forgetful:
    """A sink that keeps what it is given, or waits, or fails."""

    def __init__(self, gate: threading.Event | None = None, fail_at: int = -1) -> None:
        self.kept: list = []
        self.gate, self.fail_at = gate, fail_at

    def add(self, request, steps, batch_sizes) -> None:  # type: ignore[no-untyped-def]
        if self.gate is not None:
            self.gate.wait(10)
        if len(self.kept) == self.fail_at:
            raise OSError(28, "No space left on device")
        self.kept.append((request, steps, batch_sizes))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def serve(recorder: Recorder, running: dict, abort: str = "", refuse: str = "") -> dict:  # type: ignore[type-arg]
    """Decode all requests in one batch, recording; return what was committed and what was seen of each step."""
    ledger, seen_of = Ledger(), {name: [] for name in running}
    for name, one in running.items():
        request = one.course.request
        ledger.admit(name, one.course.policy, limit=request.max_new_tokens, stop_ids=(EOS,))
        recorder.admit(name, request.prompt_ids, request.max_new_tokens, (EOS,), "sampled" if name == refuse else "")
    first = True
    while names := [name for name, one in running.items() if not one.done]:
        drafts, logits = [], []
        for name in names:
            one = running[name]
            prefix = [*one.course.request.prompt_ids, *one.tokens]
            drafts.append([] if first else one.drafter.session([]).propose(prefix, 5).ids)
            logits.append(one.target.session([]).score(prefix, drafts[-1]))
            seen_of[name].append((drafts[-1], logits[-1]))
        flat = torch.tensor([token for ids in drafts for token in ids], dtype=torch.int32)
        raw = torch.tensor(np.concatenate(logits))
        seen = recorder.see(names, [len(ids) for ids in drafts], flat, raw)
        committed = engine_step(ledger, names, drafts, logits)
        longest = max(map(len, committed))
        padded = torch.tensor([[*tokens, *[-1] * (longest - len(tokens))] for tokens in committed])
        if seen is not None:
            accepted = [len(new) - 1 for new in committed]
            recorder.commit(seen, torch.tensor(accepted), padded)
        for name, new in zip(names, committed, strict=True):
            one = running[name]
            for token in new:
                one.tokens.append(token)
                one.done = len(one.tokens) >= one.course.request.max_new_tokens or token == EOS
                if one.done:
                    break
            if name == abort and len(one.tokens) > 2:
                one.done = True
                recorder.finish(name)
        first = False
    return seen_of


def strict(seed: int, number: int = 5) -> dict:  # type: ignore[type-arg]
    running = make_requests(number, seed)
    for one in running.values():
        one.course.policy = Policy(0, 0, 0)
    return running


def test_columns_equal_those_of_a_capture(tmp_path: Path) -> None:
    running = make_requests(6, 3)
    sink = Forgetful()
    recorder = Recorder(sink)
    seen_of = serve(recorder, running)
    recorder.close()
    assert len(sink.kept) == 6 and not recorder.lost
    for request, steps, sizes in sink.kept:
        assert len(steps) == len(sizes) and sizes[0] == 6
        start = 0
        for number, (step, (ids, rows)) in enumerate(zip(steps, seen_of[request.request_id], strict=True)):
            want = capture.Recorder().step(
                capture.scan(rows, ids, "here"), Proposal(ids), step_id=number, parent_step_id=NO_PARENT,
                parent_accepted=NO_PARENT, start_pos=start, where="here",
            )  # fmt: skip
            for name in ("draft_ids", "argmax_ids", "draft_logits", "ranks", "top_ids", "top_logits"):
                np.testing.assert_array_equal(getattr(step, name), getattr(want, name), err_msg=name)
            np.testing.assert_allclose(step.logsumexp, want.logsumexp, rtol=1e-6)
            np.testing.assert_allclose(step.entropy, want.entropy, atol=1e-6)
            assert step.start_pos == start
            start += (steps[number + 1].parent_accepted + 1) if number + 1 < len(steps) else 0


def test_the_trace_replays_to_what_the_engine_did(tmp_path: Path) -> None:
    from asdsim.result import load, replay

    running = strict(1)
    recorder = Recorder(sink_at(tmp_path / "t"))
    serve(recorder, running)
    recorder.close()
    assert recorder.written == 5 and not recorder.lost
    trace = load(tmp_path / "t")
    row = replay(trace, B=0, g=0, M=0).frame().to_dicts()[0]
    assert row["exact_share"] == 1.0 and row["completion_tokens"] == sum(len(one.tokens) for one in running.values())
    assert row["num_spec_steps"] == sum(len(trace.steps_of(name)) for name in running)
    sizes = [json.loads(line) for line in (tmp_path / "t" / BATCHES).read_text().splitlines()]
    assert {one["request_id"] for one in sizes} == set(running)
    assert all(len(one["batch_size"]) == len(trace.steps_of(one["request_id"])) for one in sizes)


def test_a_second_run_goes_on_with_the_trace(tmp_path: Path) -> None:
    for turn in range(2):
        recorder = Recorder(sink_at(tmp_path / "t"))
        running = strict(1, 2)
        serve(recorder, {f"{turn}/{name}": one for name, one in running.items()})
        recorder.close()
    assert len(read_trace(tmp_path / "t").request_ids()) == 4


def test_what_is_lost_is_counted_and_the_rest_is_whole() -> None:
    running, sink = strict(2), Forgetful()
    recorder = Recorder(sink)
    alone = strict(2)
    serve(Recorder(Forgetful()), alone)
    names = sorted(running, key=lambda name: -len(alone[name].tokens))  # the longest is aborted on its way
    serve(recorder, running, abort=names[0], refuse=names[1])
    recorder.close()
    assert {request.request_id for request, _, _ in sink.kept} == set(names[2:])
    assert dict(recorder.lost) == {"ended before its stop": 1, "sampled": 1}


def test_a_full_queue_drops_whole_requests_and_never_waits() -> None:
    gate = threading.Event()
    sink = Forgetful(gate)
    recorder = Recorder(sink, size=6)
    serve(recorder, strict(1, 1))  # the thread now waits for the sink
    begin = time.perf_counter()
    running = {f"late/{name}": one for name, one in strict(2, 5).items()}
    for name, one in running.items():
        assert name not in sink.kept
        serve(recorder, {name: one})
    assert time.perf_counter() - begin < 5
    gate.set()
    recorder.close()
    kept = {request.request_id for request, _, _ in sink.kept}
    assert recorder.lost["dropped: the queue was full"] + len(kept) == 6 and len(kept) < 6
    for request, steps, _ in sink.kept:  # whatever is kept is whole
        assert steps[-1].start_pos < request.max_new_tokens
    assert recorder.written == len(kept)


def test_a_full_disk_ends_the_recording_and_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    sink = Forgetful(fail_at=2)
    recorder = Recorder(sink)
    running = strict(2, 5)
    serve(recorder, running)
    recorder.close()
    assert len(sink.kept) == 2 and recorder.lost["after a failed write"] == 3
    assert "No space left on device" in caplog.text and "keeps what was stored before" in caplog.text
    assert all(one.done for one in running.values())
