"""Figures of what settings gain and cost, from the committed traces; no model and no torch.

    python analysis/figures_quality.py

Accuracy was scored once, with the tokenizer, by

    asdsim audit traces/smollm2-layerskip --sweep --allow-code-execution -o analysis/accuracy-layerskip.parquet
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow.parquet as pq

import asdsim
from asdsim import stats
from asdsim.evaluate.cost_spec import cost_of_trace
from asdsim.evaluate.per_step import histograms, ledger_over_time, reach_by_position, reuse_curves, share_by_count
from asdsim.evaluate.quality import Evaluator
from asdsim.plots import quality as plots_quality
from asdsim.plots.style import provenance, save
from asdsim.rules.settings import STRICT, Policy
from asdsim.trace.covered import covered_settings
from asdsim.trace.graph import build_graph

ROOT = Path(__file__).resolve().parents[1]
TRACE = Path("traces/smollm2-layerskip")
FOLDER = Path("figures/smollm2-layerskip")
ACCURACY = Path("analysis/accuracy-layerskip.parquet")
COMMAND = "python analysis/figures_quality.py"
SHOWN = (STRICT, Policy(8.0, 0.25, 2.0), Policy(8.0, 0.5, 1.0), Policy(16.0, 0.5, float("inf")))
THRESHOLDS = np.array([0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0])
LENGTHS = (1, 2, 3, 5)


def main() -> None:
    """Draw everything."""
    os.chdir(ROOT)  # so that files name the trace by its path in the repository
    trace = asdsim.load(TRACE)
    graph = build_graph(trace)
    source = {
        "trace": str(TRACE), "manifest_checksum": trace.manifest.checksum, "subject": trace.subject,
        "resamples": stats.RESAMPLES,
    }  # fmt: skip
    record = provenance(COMMAND, source=source)
    weights = stats.resample_weights(graph.num_requests)
    paths = []

    scored = pl.read_parquet(ACCURACY)
    made_from = json.loads(pq.read_schema(ACCURACY).metadata[b"asdsim"])
    if made_from["manifest_checksum"] != trace.manifest.checksum:
        raise SystemExit(f"{ACCURACY} belongs to another trace: run the command above again")
    frame = Evaluator(trace, cost=cost_of_trace(trace)).evaluate(covered_settings(trace)).frame().join(
        scored.select("B", "g", "M", "accuracy", "accuracy_low", "accuracy_high"), on=["B", "g", "M"], how="left",
        maintain_order="left",
    )  # fmt: skip
    risks = ["outputs_differ_share", "regret_per_token", "accuracy"]
    shown = [f"{name}{end}" for name in ("speed_up", *risks) for end in ("", "_low", "_high")]
    data = {name: frame[name].to_list() for name in ("B", "g", "M", *shown)}
    paths += save(plots_quality.pareto_fronts(frame, risks), FOLDER / "pareto", record, data)

    gain = [f"acceptance_length_gain{end}" for end in ("", "_low", "_high")]
    data = {name: frame[name].to_list() for name in ("B", "g", "M", *gain)}
    paths += save(plots_quality.gain_by_budget(frame, [0.1, 0.25, 0.5, 1.0]), FOLDER / "gain-by-budget", record, data)

    tokens = np.arange(0, trace.manifest.max_new_tokens + 1)
    curves, numbers = {}, {}
    for policy in (Policy(4.0, 0.25, 1.0), *SHOWN[1:]):
        spent = ledger_over_time(graph, policy, tokens)
        mean = stats.Resampled({"spent": spent.T, "requests": np.ones(len(spent))}, weights).interval(
            lambda s: s["spent"] / s["requests"]
        )
        curves[str(policy)] = mean, np.quantile(spent, [0.1, 0.9], axis=0), policy.budget
        numbers[str(policy)] = {**plots_quality.record_of(mean), "budget": policy.budget}
    paths += save(
        plots_quality.ledger_over_time(tokens, curves), FOLDER / "ledger", record, {"tokens": tokens, **numbers}
    )

    reuse = reuse_curves(graph, THRESHOLDS.tolist(), LENGTHS)
    data = {str(p): {**plots_quality.record_of(share), "mismatches": count} for p, (share, count) in reuse.items()}
    paths += save(
        plots_quality.suffix_reuse(THRESHOLDS, reuse), FOLDER / "suffix-reuse", record, {"regret": THRESHOLDS, **data}
    )

    named, lengths, numbers = {}, {}, {}
    evaluator = Evaluator(trace)
    for policy in SHOWN:
        name = "strict" if policy == STRICT else str(policy)
        counts = histograms(graph, policy)
        named[name] = share_by_count(counts, weights), *reach_by_position(counts, weights)
        quality = evaluator.evaluate(asdsim.rules.settings.Grid.of([policy]), figures=["mean_acceptance_length"])
        lengths[name] = tuple(quality.row(0)["mean_acceptance_length"])
        parts = zip(("by_count", "by_position", "by_position_given_all_before"), named[name], strict=True)
        numbers[name] = {"mean_acceptance_length": lengths[name],
                         **{part: plots_quality.record_of(values) for part, values in parts}}  # fmt: skip
    paths += save(plots_quality.acceptance(named, lengths), FOLDER / "acceptance-intervals", record, numbers)
    for path in paths:
        print(path)


if __name__ == "__main__":
    main()
