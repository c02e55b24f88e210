"""The benchmark measures what it says: a trace like the real one, peers that walk alike, keys that scripts rely on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from analysis import specdecode
from asdsim.bench import children, peers, run, synthetic
from asdsim.cli import main
from asdsim.errors import UsageError
from asdsim.rules.settings import STRICT, Grid
from asdsim.trace.graph import build_graph
from asdsim.trace.reader import read_trace
from asdsim.walk.recorded import path_arrays
from asdsim.walk.request import ACCEPTED, STEPS
from asdsim.walk.sweep import walk_grid

ROOT = Path(__file__).parents[2]


def test_the_synthetic_trace_is_like_the_committed_one() -> None:
    real = build_graph(read_trace(ROOT / "traces/smollm2-layerskip"))
    made = synthetic.synthetic_graph(300, run.STEPS_PER_REQUEST, run.WIDTH)
    assert path_arrays(made) is not None and made.num_steps == 300 * 60
    path = real.path_step
    rows = np.concatenate([np.arange(real.mm_ptr[step], real.mm_ptr[step + 1]) for step in path])
    number = {"real": np.diff(real.mm_ptr)[path], "made": np.diff(made.mm_ptr)}
    assert number["made"].mean() == pytest.approx(number["real"].mean(), rel=0.05)
    quantiles = np.linspace(0.1, 0.9, 9)
    wanted = np.quantile(real.mm_regret[rows][np.isfinite(real.mm_regret[rows])], quantiles)
    assert np.quantile(made.mm_regret, quantiles) == pytest.approx(wanted, rel=0.15)
    strict = Grid.of([STRICT])
    lengths = []
    for graph in (real, made):
        walks = walk_grid(graph, strict, off_trace="recorded", device="cpu")
        lengths.append(walks.counts[0, :, ACCEPTED].sum() / walks.counts[0, :, STEPS].sum())
    assert lengths[1] == pytest.approx(lengths[0], rel=0.08)


def test_peers_walk_as_the_kernels_do() -> None:
    graph = synthetic.synthetic_graph(4, run.STEPS_PER_REQUEST, run.WIDTH, seed=3)
    part, settings = run._settings(run.sweep_grid(), 25)
    blocks = peers.regrets_of(graph, 4)
    found = {
        "python": peers.walk_python(peers.blocks_of(blocks), settings),
        "python_loop": peers.walk_loop(blocks.tolist(), settings),
        "numpy": peers.walk_numpy(graph, 4, settings),
    }
    if peers.has_torch():
        found |= {
            "torch": peers.walk_torch(blocks, settings),
            "torch_broadcast": peers.walk_broadcast(blocks, settings),
        }
    for name, one in found.items():
        run._check(name, graph, part, 4, one)
    accepted, spent = found["python"]
    accepted[0, 3] += 1
    with pytest.raises(RuntimeError, match="python does not agree with the kernels"):
        run._check("python", graph, part, 4, (accepted, spent))


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    assert not ended.value.code
    return capsys.readouterr().out


def test_quick_prints_the_ratios(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.loads(printed(capsys, "--quick", "--json", "--requests", "5"))
    assert found["command"] == "bench" and found["quick"] is True
    assert {"python_over_cpu", "torch_over_cpu", "numpy_over_cpu", "graph_over_recorded"} <= found["ratios"].keys()
    measured = [value for name, value in found["ratios"].items() if peers.has_torch() or not name.startswith("torch")]
    assert all(value > 0 for value in measured)
    assert found["sizes"]["step_settings"] == 5 * 60 * 10_000
    monkeypatch.setattr(run, "run", lambda **_: found)  # measured once, printed in both forms
    lines = printed(capsys, "--quick", "--requests", "5").splitlines()
    assert "one core" in lines[0] and lines[1].split()[0] == "python_over_cpu"


def test_wrong_use_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for arguments, message in (
        (["--requests", "0"], "--requests 0 is not positive"),
        (["--trace", str(tmp_path / "none")], "no such directory"),
    ):
        with pytest.raises(SystemExit) as error:
            main(["bench", *arguments])
        assert error.value.code == 2 and message in capsys.readouterr().err


def test_memory_is_that_of_the_child() -> None:
    held = np.ones(40 << 20, np.uint8)  # of this process, not of the child
    found = children.memory(20, lambda _: None)
    assert 50e6 < found["aggregated"] < 1e9 and held.sum()
    assert children.peak_bytes() > 40 << 20


def test_lengths_are_walked_as_a_slow_walk_does() -> None:
    rng = np.random.default_rng(0)
    lengths = [rng.integers(1, 9, n) for n in (1, 2, 3, 17, 60)]
    for K in (1, 3, 5):
        expected = []
        for part in lengths:
            at, taken = 0, []
            while at < len(part) - 1:
                taken.append(int(min(part[at], K + 1)))
                at += taken[-1]
            expected.append(taken)
        graph = specdecode.lengths_graph(lengths, K)
        assert specdecode.strict_lengths(graph) == expected
        walks = walk_grid(graph, Grid.of([STRICT]), device="cpu")
        assert walks.exact.all()
        assert walks.counts[0, :, STEPS].tolist() == [len(part) for part in expected]
        assert walks.counts[0, :, ACCEPTED].tolist() == [sum(part) - len(part) for part in expected]


SIMULATOR = {
    # A stand-in with the public simulator's names, for machines that have no checkout of it.
    "request.py": """
from dataclasses import dataclass
@dataclass
class Request:
    lengths: list
    cur_gen_len: int = 0
""",
    "predictor.py": """
from enum import Enum
class AccLenPredictMethod(Enum):
    FIXED_1 = 1
    FIXED_3 = 3
    FIXED_5 = 5
""",
    "simulator.py": """
import json
from enum import Enum
from request import Request
class AccLenGroundTruth(Enum):
    EAGLE = "eagle"
    NGRAM = "ngram"
class SpecSimulator:
    def __init__(self, file, method, truth, dataset):
        rows = [json.loads(line)[f"acc_{truth.value}"]["acc_len"] for line in open(file)]
        self.data, self.most = [Request(row) for row in rows if row], method.value + 1
    def simulate_sd_batch(self, batch):
        for request in batch:
            request.cur_gen_len = 1
            while request.cur_gen_len < len(request.lengths):
                request.cur_gen_len += min(request.lengths[request.cur_gen_len - 1], self.most) + EXTRA
""",
}


@pytest.mark.parametrize("extra", [0, 1])
def test_a_checkout_is_compared(tmp_path: Path, extra: int) -> None:
    with pytest.raises(UsageError, match=r"no simulator.py"):
        specdecode.compare(tmp_path, lambda _: None)
    for name, text in SIMULATOR.items():
        (tmp_path / name).write_text(text.replace("EXTRA", str(extra)))
    (tmp_path / "data/model").mkdir(parents=True)
    rng = np.random.default_rng(1)
    rows = [
        {"id": str(n), "acc_eagle": {"acc_len": rng.integers(1, 8, 30 + n).tolist()},
         "acc_ngram": {"acc_len": rng.integers(1, 3, 5 * n).tolist()}}
        for n in range(6)
    ]  # fmt: skip
    (tmp_path / "data/model/combined_toy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if extra:
        with pytest.raises(RuntimeError, match=r"combined_toy.jsonl, eagle, K=1: the accepted lengths are not those"):
            specdecode.compare(tmp_path, lambda _: None)
        return
    found = specdecode.compare(tmp_path, lambda _: None)["rows"]
    assert [(row["drafter"], row["K"]) for row in found] == [(d, K) for d in ("eagle", "ngram") for K in (1, 3, 5)]
    assert found[0]["requests"] == 6 and found[3]["requests"] == 5 and all(row["ratio"] > 0 for row in found)
