"""Every row of the published table, and of ours, in every form of the walk."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from asdsim.oracle import walk as reference
from asdsim.rules import asd as rule
from asdsim.rules.scoring import suffix_values
from asdsim.rules.settings import layout_of
from tests.golden.blocks import READINGS, TABLE, walked

ROOT = Path(__file__).parents[2]
CASES = [(row, semantics) for row in range(len(TABLE)) for semantics in READINGS]


@pytest.mark.parametrize(("row", "semantics"), CASES)
def test_rule_and_oracle(row: int, semantics: str) -> None:
    regrets, B, g, M, spent, expected = TABLE[row]
    draft = [1 if regret is None else 5 for regret in regrets]
    numbers = [0.0 if regret is None else regret for regret in regrets]
    block = reference.Block((), draft, [1] * 4, numbers)
    assert reference.accepted_length(block, spent, B, g, M, semantics) == expected[semantics]
    if math.isnan(sum(numbers)) and semantics in ("paper", "core"):
        with pytest.raises(ValueError, match="position 1 is not a finite number"):
            rule.decide(draft, [1] * 4, numbers, 3, spent, B, g, float(M), semantics)
    else:
        accepted, charge, _, _ = rule.decide(draft, [1] * 4, numbers, 3, spent, B, g, float(M), semantics)
        assert accepted == expected[semantics]
        assert charge == sum(numbers[:accepted])


@pytest.mark.parametrize("device", ["python", "cpu"])
def test_walks(device: str) -> None:
    assert walked(device) == {f"{row} {semantics}": TABLE[row][5][semantics] for row, semantics in CASES}


def test_cuda_simulator(tmp_path: Path) -> None:
    pytest.importorskip("numba_cuda")
    out = tmp_path / "golden.npz"
    subprocess.run(
        [sys.executable, "-m", "tests.golden.blocks", str(out)],
        cwd=ROOT, env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}, check=True, timeout=240,
    )  # fmt: skip
    with np.load(out) as file:
        found = dict(zip(file["names"].tolist(), file["accepted"].tolist(), strict=True))
    assert found == {f"{row} {semantics}": TABLE[row][5][semantics] for row, semantics in CASES}


def test_a_tie_is_free_and_uncounted_under_lightllm_only() -> None:
    block = [5, 5, 1], [1] * 4, [0.0, 0.1, 0.0]
    assert rule.decide(*block, 3, 0.0, 9.0, 9.0, 1.0, "lightllm") == (3, 0.1, 1, rule.ACCEPT)
    assert rule.decide(*block, 3, 0.0, 9.0, 9.0, 1.0, "paper") == (1, 0.0, 1, rule.CAP)


def test_the_float32_ledger_of_lightllm() -> None:
    assert rule.settle_of("lightllm")(0.0, 0.1) == float(np.float32(0.1)) != 0.1
    assert rule.settle_of("paper")(0.1, 0.2) == 0.1 + 0.2
    spent = rule.settle_of("lightllm")(0.0, 0.1)  # a little more than .1
    assert rule.decide([5], [1, 1], [0.2], 1, spent, 0.3, 9.0, 1.0, "lightllm")[0] == 0
    rng = np.random.default_rng(0)
    for value in [*(rng.normal(size=500) * 10.0 ** rng.integers(-44, 38, 500)), 0.0, 3.4e38, 1e-46, 2.0**-150]:
        assert rule.single(float(value)) == float(np.float32(value))


def test_normalised_values_round_in_two_ways() -> None:
    """At i = 2, K = 5 Python divides to .6; multiplying by 1/K gives .6000000000000001."""
    divided, multiplied = (suffix_values(scheme, 5, 2) for scheme in ("normalised", "reciprocal"))
    assert (divided, multiplied) == (0.6, 0.6000000000000001)
    gate = 2.083333333333333
    assert 1.25 / multiplied <= gate < 1.25 / divided
    block = reference.Block((), [1, 1, 5, 1, 1], [1] * 6, [0.0, 0.0, 1.25, 0.0, 0.0])
    assert reference.accepted_length(block, 0.0, 9.0, gate, 1, "paper", "reciprocal") == 5
    assert reference.accepted_length(block, 0.0, 9.0, gate, 1, "dspark") == 2
    assert rule.decide(block.draft, block.choice, block.regret, 5, 0.0, 9.0, gate, 1.0, "dspark")[0] == 2


def test_gates_convert_by_the_draft_length() -> None:
    """r / (K-i) <= g and r / ((K-i)/K) <= K g accept the same, away from rounding."""
    rng = np.random.default_rng(1)
    for _ in range(2000):
        K = int(rng.integers(1, 9))
        regrets = np.where(rng.random(K) < 0.5, rng.exponential(1.0, K), 0.0).tolist()
        draft = [5 if regret else 1 for regret in regrets]
        g = float(rng.exponential(0.3))
        ours = rule.decide(draft, [1] * (K + 1), regrets, K, 0.0, 1e9, g, 3.0, "paper")
        theirs = rule.decide(draft, [1] * (K + 1), regrets, K, 0.0, 1e9, K * g, 3.0, "dspark")
        assert ours == theirs


def test_each_reading_has_its_value_scheme() -> None:
    assert {name: layout_of(name).value for name in READINGS} == {
        "paper": "suffix", "core": "suffix", "dspark": "normalised", "lightllm": "suffix",
    }  # fmt: skip
