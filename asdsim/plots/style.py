"""How every figure looks, and how it is written: colours, fonts, legends, files.

Nothing here touches pyplot, so no display, backend or global figure list is involved. Colours are those of Okabe and
Ito (bars and lines) and cividis (maps): told apart by people with any colour vision, and, by lightness, markers and
line style, in grey print. Rows that are not exact (``exact_share`` below 1) are hatched in maps and bars, drawn with
open markers in lines, and named in the legend; in maps, means over only the requests that stayed are grey.
"""

from __future__ import annotations

import html
import io
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..errors import AsdsimError
from ..files import dump_json, make_folder, plain, to_path, write_atomically
from ..provenance import provenance as made_with

PROVENANCE_VERSION = 1
DIGITS = 6
"""Of numbers in the JSON file beside a figure."""

ASD = "#D55E00"
"""Of ASD beside other rules; nothing else is orange."""

FILLS = ("#000000", "#0072B2", "#009E73", "#F0E442")
LINES = ("#000000", "#0072B2", "#009E73", "#56B4E9")
MARKERS = ("o", "s", "^", "D")
DASHES = ("-", (0, (5, 1.5)), (0, (3, 1, 1, 1)), (0, (1, 1)))
GREY = "#767676"
NO_COLOUR = "#E4E4E4"

STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#444444",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "axes.labelsize": 9.5,
    "figure.dpi": 100,
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.7,
    "hatch.linewidth": 0.8,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "savefig.facecolor": "white",
    "svg.fonttype": "path",
    "svg.hashsalt": "asdsim",
}


@contextmanager
def styled() -> Iterator[None]:
    # From the defaults, so that a user's own matplotlib settings change no figure.
    parameters: Any = {**dict(matplotlib.rcParamsDefault), **STYLE}
    parameters.pop("backend", None)
    with matplotlib.rc_context(parameters):
        yield


def legend_below(figure: Figure, axes: Axes, note: str | None, mark: str = "hatched") -> None:
    """Put the legend under the axes, where it can hide no data, and a note on rows that are not exact beneath it."""
    handles, labels = axes.get_legend_handles_labels()
    room = (figure.get_figwidth() / 2 - 0.75) / 0.066  # characters of half the width, less the handle
    columns = 1 if max(map(len, labels)) > room else 2
    figure.legend(
        handles, labels, loc="outside lower left", ncols=columns, handlelength=3.2, title=note and f"{mark} = {note}",
        title_fontproperties={"size": 8, "style": "italic"}, alignment="left",
    )  # fmt: skip


def provenance(command: str, *, source: Mapping[str, Any] | None = None, subject: str = "") -> dict[str, Any]:
    """Return what a figure came from: command, software versions, and the caller's words on the source.

    ``subject`` is what the figure stands for, see :attr:`asdsim.trace.stored.Trace.subject`; by default the source's.
    """
    record = made_with(command, source, "matplotlib", "numpy", "polars")
    return {"schema_version": PROVENANCE_VERSION, "subject": subject or (source or {}).get("subject", ""), **record}


def save(
    figure: Figure, stem: str | os.PathLike[str], record: Mapping[str, Any], data: Mapping[str, Any] | None = None
) -> list[Path]:
    """Write ``stem.svg``, ``stem.png`` and ``stem.json``; equal input gives equal files.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        What to draw.
    stem : path
        Path without suffix; missing folders are made.
    record : mapping
        From :func:`provenance`; the figure names its subject.
    data : mapping, optional
        The plotted numbers, plain lists and scalars, of which :data:`DIGITS` digits are written: infinities as
        ``"inf"``, NaN as null.

    Returns
    -------
    list of Path
        The three files.

    Raises
    ------
    AsdsimError
        If a file cannot be written. Files are replaced whole: an error leaves the earlier ones as they were.
    """
    base = to_path(stem)
    paths = [base.with_name(base.name + suffix) for suffix in (".svg", ".png", ".json")]
    content = {**record, "figure": base.name, "data": rounded(plain(data or {}))}
    text = dump_json(content, indent=1, ascii_only=False) + "\n"
    text = re.sub(
        r"\[\n[^\[\]{}]*\]", lambda flat: re.sub(r"\n\s*", " ", flat[0]), text
    )  # a list of numbers on one line
    name_subject(figure, record.get("subject", ""))
    with styled():
        files = [_drawn(figure, "svg"), _drawn(figure, "png"), text.encode()]
    try:
        make_folder(base.parent)
        for path, octets in zip(paths, files, strict=True):
            write_atomically(path, octets)
    except OSError as error:
        raise AsdsimError(
            f"cannot write: {error.strerror or error}", where=str(base), fix="choose another folder with -o"
        ) from None
    return paths


def name_subject(figure: Figure, subject: str) -> None:
    """Write above a figure what it stands for: model, drafter, K and requests.

    Above, since a legend outside the axes moves to the lower edge of whatever is saved.
    """
    if subject and not any(text.get_text() == subject for text in figure.texts):
        figure.text(0.01, 1.0, subject, ha="left", va="bottom", fontsize=7.5, color=GREY)


def inline_svg(figure: Figure, prefix: str, title: str) -> str:
    """Return a figure as SVG to stand inside a page: text as text, no style but attributes, ids of its own.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
    prefix : str
        Put before every id, so that two figures in a page do not meet.
    title : str
        What a screen reader says.
    """
    stream = io.BytesIO()
    with styled(), matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(stream, format="svg", bbox_inches="tight", metadata={"Date": None})
    text = stream.getvalue().decode("utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<style[^>]*>.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r' style="([^"]*)"', _attributes, text)
    text = re.sub(r'\b(id=")|(url\(#)|(href="#)', lambda match: f"{match[0]}{prefix}-", text)
    label = html.escape(title, quote=True)
    return text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def _attributes(style: re.Match[str]) -> str:
    """Return a style as attributes, which a page that allows no inline style still shows."""
    attributes = []
    for declaration in style[1].split(";"):
        name, colon, value = (word.strip() for word in declaration.partition(":"))
        if not colon:
            continue
        if name == "font":  # such as 9px 'DejaVu Sans', sans-serif; the size is what matters
            size = re.search(r"[\d.]+px", value)
            attributes += [f'font-size="{size[0]}"' if size else "", 'font-family="DejaVu Sans, Verdana, sans-serif"']
        else:
            attributes.append(f'{name}="{value}"')
    return "".join(f" {attribute}" for attribute in attributes if attribute)


def _drawn(figure: Figure, kind: str) -> bytes:
    stream = io.BytesIO()
    # No date and no version in the files: a redraw of the same data changes no byte.
    figure.savefig(
        stream,
        format=kind,
        dpi=160,
        bbox_inches="tight",
        metadata={"Date": None} if kind == "svg" else {"Software": None},
    )
    return stream.getvalue()


def rounded(value: Any) -> Any:
    """Return plain values with numbers of :data:`DIGITS` digits: the last ones differ from machine to machine."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
