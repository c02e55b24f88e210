"""Acceptance rules at matched risk on a committed trace; no model needed.

    python analysis/figures_rules.py

The trace is covered for ASD only, so the other rules are estimates, and the figure says so of each.
"""

from __future__ import annotations

import os
from pathlib import Path

from asdsim.plots.rules import compared_rules
from asdsim.plots.style import provenance, save
from asdsim.result import load
from asdsim.rules import NAMES
from asdsim.studies.compare import RISKS, compare

ROOT = Path(__file__).resolve().parents[1]
TRACE = "traces/smollm2-layerskip"
COMMAND = "python analysis/figures_rules.py"
LEVELS = (("regret_max", 8.0), ("regret_per_token", 0.05))


def main() -> None:
    """Draw one figure per kind of risk."""
    os.chdir(ROOT)
    trace = load(TRACE)
    source = {"trace": TRACE, "manifest_checksum": trace.manifest.checksum, "subject": trace.subject}
    record = provenance(COMMAND, source=source)
    for risk, level in LEVELS:
        found = compare(trace, ["asd", *NAMES], risk=risk, level=level)
        title = f"Rules at {RISKS[risk].partition(',')[0]} <= {level:g}"
        stem = Path("figures/smollm2-layerskip") / f"rules-{risk.replace('_', '-')}"
        data = {"risk": risk, "level": level, "rows": found.rows, "skipped": found.skipped}
        for path in save(compared_rules(found.rows, title), stem, record, data):
            print(path)


if __name__ == "__main__":
    main()
