"""Figure of what settings are worth under load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from .style import GREY, LINES, styled


def speed_by_batch(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Figure:
    """Draw predicted tokens per second over those of the target alone against the batch, a line per setting.

    Parameters
    ----------
    rows : sequence of mapping
        Rows of :func:`asdsim.studies.advise.as_record`, by batch.
    names : sequence of str
        Settings to draw, beside the best of each batch with its interval over requests.
    """
    batches = [row["batch"] for row in rows]
    with styled():
        figure = Figure(figsize=(6.8, 3.6), layout="constrained")
        axes = figure.subplots()
        for number, name in enumerate(names):
            speed = [row["rates"][name] / row["rates"]["target alone"] for row in rows]
            axes.plot(batches, speed, marker="o", markersize=3, color=LINES[number % len(LINES)], label=name)
        best = [row["over_target_alone"] for row in rows]
        known = [(batch, ends) for batch, ends in zip(batches, best, strict=True) if ends["low"] == ends["low"]]
        if known:
            axes.vlines([batch for batch, _ in known], [ends["low"] for _, ends in known],
                        [ends["high"] for _, ends in known], color=GREY, linewidth=1.0,
                        label="fastest, 95 % over requests")  # fmt: skip
        axes.axhline(1.0, color=GREY, linewidth=1.0)
        axes.set_xscale("log", base=2)
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.set_xlabel("requests in a batch")
        axes.set_ylabel("tokens per second,\nover the target alone")
        axes.set_title("Predicted speed under load", loc="left")
        figure.legend(loc="outside lower left", ncols=2)
    return figure
