"""Error of the estimates on the committed covered traces; no model needed.

    python analysis/figures_fidelity.py

``pooled`` was devised on traces/smollm2-layerskip; traces/smollm2-layerskip-holdout holds other prompts.
"""

from __future__ import annotations

import os
from pathlib import Path

from asdsim.plots import exact as plots_exact
from asdsim.plots.style import provenance, save
from asdsim.result import load
from asdsim.rules.settings import Grid
from asdsim.studies.fidelity import measure

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "python analysis/figures_fidelity.py"
TRACES = ("traces/smollm2-layerskip", "traces/smollm2-layerskip-holdout", "traces/smollm2-lookup")
GRID = Grid.product("0,4,8", ".1,.25,.5", "1,2")
SHORT = {"mean_acceptance_length": "tokens per step", "steps_per_request": "steps per request"}


def main() -> None:
    """Draw one figure per trace, and one table."""
    os.chdir(ROOT)
    folder = Path("figures/fidelity")
    lines = [
        "| trace | figure | estimate | mean error (95 % interval over requests) | worst setting | bias |",
        "|---" * 6 + "|",
    ]
    for name in TRACES:
        trace = load(name)
        found = measure(trace, GRID)
        source = {"trace": name, "manifest_checksum": trace.manifest.checksum, "subject": trace.subject}
        stem = folder / Path(name).name
        for path in save(
            plots_exact.fidelity_errors(found.settings), stem, provenance(COMMAND, source=source),
            {"summary": found.summary.to_dicts(), "settings": found.settings.to_dicts()},
        ):  # fmt: skip
            print(path)
        for figure, short in SHORT.items():
            for row in found.summary.filter(found.summary["figure"] == figure).to_dicts():
                lines.append(
                    f"| `{Path(name).name}` | {short} | {row['estimator']} | {100 * row['mean_error']:.1f} % "
                    f"({100 * row['mean_low']:.1f} to {100 * row['mean_high']:.1f}) | {100 * row['worst_error']:.1f} % "
                    f"| {100 * row['bias']:+.1f} % |"
                )
    table = folder / "table.md"
    table.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(table)


if __name__ == "__main__":
    main()
