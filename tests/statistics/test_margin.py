"""Are verdicts on a margin wrong no more often than they say? Run by `make slow`."""

from __future__ import annotations

import numpy as np
import pytest

from asdsim.stats import MarginBets, within_margin

pytestmark = pytest.mark.slow
ALPHA = 0.05


@pytest.mark.parametrize("changed", [0.06, 0.1, 0.3])
@pytest.mark.parametrize("size", [100, 400, 1319])
def test_the_score_test_keeps_its_level_at_the_margin(size: int, changed: float) -> None:
    margin, trials = 0.05, 4000
    rng = np.random.default_rng([size, int(100 * changed)])
    draws = rng.multinomial(size, [(changed - margin) / 2, (changed + margin) / 2, 1 - changed], trials)
    verdicts = [within_margin(int(gained), int(lost), size, margin, ALPHA).verdict for gained, lost, _ in draws]
    for verdict in ("shown", "refuted"):
        share = verdicts.count(verdict) / trials
        print(f"n={size:5d} changed {changed:.2f}: {verdict} in {100 * share:.1f} % at the margin")
        assert share <= ALPHA + (0.02 if size * changed < 10 else 0.01)  # few changes come in large steps


@pytest.mark.parametrize("changed", [0.06, 0.3])
def test_looking_at_every_request_costs_no_error(changed: float) -> None:
    margin, size, trials = 0.05, 1000, 400
    rng = np.random.default_rng(int(100 * changed))
    wrong, stopped = {"shown": 0, "refuted": 0}, []
    for _ in range(trials):
        at_margin = rng.choice([1, -1, 0], size, p=[(changed - margin) / 2, (changed + margin) / 2, 1 - changed])
        bets = MarginBets(margin, ALPHA)
        for change in at_margin:
            verdict = bets.add(int(change)).verdict
            if verdict != "not shown":
                wrong[verdict] += 1
                break
        bets = MarginBets(margin, ALPHA)
        fine = rng.choice([1, -1, 0], size, p=[changed / 2, changed / 2, 1 - changed])
        stopped.append(next((n for n, c in enumerate(fine, 1) if bets.add(int(c)).verdict == "shown"), size + 1))
    print(f"changed {changed:.2f}: wrongly shown {wrong['shown']}, refuted {wrong['refuted']} of {trials}; without a "
          f"true change decided after {np.median(stopped):.0f} requests (median)")  # fmt: skip
    assert max(wrong.values()) <= ALPHA * trials
