"""Accuracy and length of whole answers against speed, from a committed trace whose answers end by themselves; no model.

    python analysis/figures_answers.py

Answers were scored once, by

    asdsim audit traces/smollm2-ifeval --sweep --margin 5 -o analysis/accuracy-ifeval.parquet
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq

from asdsim.plots.quality import pareto_fronts
from asdsim.plots.style import provenance, save
from asdsim.result import load

ROOT = Path(__file__).resolve().parents[1]
TRACE = "traces/smollm2-ifeval"
SCORED = "analysis/accuracy-ifeval.parquet"
COMMAND = "python analysis/figures_answers.py"
RISKS = ("accuracy", "length_change", "outputs_differ_share")
PAIRED = (
    "accuracy_change", "accuracy_change_low", "accuracy_change_high", "mcnemar_p", "answers_gained", "answers_lost",
    "scored_requests", "strict_right", "ended", "ended_strict", "tokens_per_answer",
)  # fmt: skip


def main() -> None:
    """Draw the fronts, and write every setting with its paired test beside them."""
    os.chdir(ROOT)
    trace = load(TRACE)
    made_from = json.loads(pq.read_schema(SCORED).metadata[b"asdsim"])
    if made_from["manifest_checksum"] != trace.manifest.checksum:
        raise SystemExit(f"{SCORED} belongs to another trace: run the command above again")
    frame = pl.read_parquet(SCORED)
    source = {
        "trace": TRACE,
        "manifest_checksum": trace.manifest.checksum,
        "subject": trace.subject,
        "scored": made_from,
    }
    shown = [f"{name}{end}" for name in ("answer_speed_up", *RISKS) for end in ("", "_low", "_high")]
    data = {name: frame[name].to_list() for name in ("B", "g", "M", "exact_share", *shown, *PAIRED)}
    figure = pareto_fronts(frame, RISKS, gain="answer_speed_up")
    for path in save(figure, Path("figures/smollm2-ifeval/answers"), provenance(COMMAND, source=source), data):
        print(path)


if __name__ == "__main__":
    main()
