"""Figures and table of the committed trace: SmolLM2-135M-Instruct, drafted for by itself without layer 12.

    python analysis/figures_smollm2_layerskip.py

The trace holds one path per prompt, the strict one. What is drawn for strict matching, and the regret of all and of
first mismatches, is exact; other settings are estimates (``--off-trace aligned``) and drawn as such.
"""

from __future__ import annotations

import os
from pathlib import Path

import asdsim
from asdsim import plots
from asdsim.cli.plot import DEFAULT_GRID, plot_trace

ROOT = Path(__file__).resolve().parents[1]
TRACE = Path("traces/smollm2-layerskip")
FOLDER = Path("figures/smollm2-layerskip")
COMMAND = "python analysis/figures_smollm2_layerskip.py"
TABLE = {"B": [0.0, 2.0, 8.0], "g": [0.25, 0.5], "M": [1.0, 2.0]}


def write_table(path: Path) -> Path:
    """Write the acceptance of a few settings as a Markdown table."""
    result = asdsim.replay(TRACE, **TABLE, off_trace="aligned")
    head = (
        "setting",
        "tokens per step, bonus included",
        "accepted drafts per step",
        "relaxed tokens",
        "mean regret spent",
    )
    lines = [f"| {' | '.join(head)} | exact for |", "|---" * (len(head) + 1) + "|"]
    for name, row in {plots.label(row): row for row in result.frame().to_dicts()}.items():
        figures = [f"{row[column]:.2f}" for column in (*plots.LENGTHS, "relaxed_tokens", "regret_spent_mean")]
        figures[2] = str(row["relaxed_tokens"])
        if row["exact_share"] < 1:
            figures = [f"about {figure}" for figure in figures]
        lines.append(f"| {' | '.join([name, *figures])} | {100 * row['exact_share']:.0f} % of requests |")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def main() -> None:
    """Draw everything."""
    os.chdir(ROOT)  # so that files name the trace by its path in the repository
    for path in plot_trace(TRACE, FOLDER, dict(DEFAULT_GRID), "aligned", COMMAND):
        print(path)
    print(write_table(FOLDER / "settings.md"))


if __name__ == "__main__":
    main()
