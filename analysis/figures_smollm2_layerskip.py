"""Figures and table of the committed trace: SmolLM2-135M-Instruct, drafted for by itself without layer 12.

    python analysis/figures_smollm2_layerskip.py

The trace is covered for every setting drawn here, so every figure is exact.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import asdsim
from asdsim.cli.plot import plot_trace

ROOT = Path(__file__).resolve().parents[1]
TRACE = Path("traces/smollm2-layerskip")
FOLDER = Path("figures/smollm2-layerskip")
COMMAND = "python analysis/figures_smollm2_layerskip.py"
GRID: dict[str, Any] = {"B": "0,1,2,4,8,16", "g": ".05,.1,.25,.5,1,2", "M": "1,2,inf"}
TABLE: dict[str, Any] = {"B": [0.0, 4.0, 8.0], "g": [0.1, 0.25, 0.5], "M": [1.0, 2.0]}


def write_table(path: Path) -> Path:
    """Write acceptance and divergence of a few settings as a Markdown table."""
    result = asdsim.replay(TRACE, **TABLE)
    rows = zip(result.frame().to_dicts(), result.outputs().divergence().to_dicts(), strict=True)
    head = ("B", "g", "M", "tokens per step (bonus included)", "accepted drafts per step", "relaxed tokens",
            "regret spent, mean / largest", "outputs that differ from strict")  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    strict = False
    for row, parted in rows:
        assert row["exact_share"] == 1.0
        if row["B"] == 0:  # all alike
            if strict:
                continue
            strict, setting = True, ("0", "any", "any")
        else:
            setting = tuple(f"{row[name]:g}" for name in ("B", "g", "M"))
        cells = (
            *setting, f"{row['mean_acceptance_length']:.2f}", f"{row['accepted_per_proposal']:.2f}",
            str(row["relaxed_tokens"]), f"{row['regret_spent_mean']:.2f} / {row['regret_spent_max']:.2f}",
            f"{100 * parted['outputs_differ_share']:.0f} %",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def main() -> None:
    """Draw everything."""
    os.chdir(ROOT)  # so that files name the trace by its path in the repository
    for path in plot_trace(TRACE, FOLDER, dict(GRID), "stop", COMMAND):
        print(path)
    print(write_table(FOLDER / "settings.md"))


if __name__ == "__main__":
    main()
