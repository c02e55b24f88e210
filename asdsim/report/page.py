"""One page that holds a whole report and opens from disk: settings, outputs, every token, figures.

What comes from outside (prompts, outputs, names) reaches the page as escaped JSON and becomes text by ``textContent``
alone; the policy in the page's head lets nothing run or load but its own script and style, named by their hashes.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import AsdsimError, UsageError
from ..evaluate.figures import FIGURES
from ..evaluate.scorers import make_scorer
from ..evaluate.strips import name_of
from ..files import make_folder, plain, write_atomically
from ..result import replay_grid
from ..rules.settings import Policy
from .data import ENDED, FINAL, GAP_UNIT, Content, collect, is_baseline, settings_of, share_below_one

if TYPE_CHECKING:
    from ..evaluate.cost import Cost
    from ..evaluate.quality import Quality
    from ..result import Result
    from ..trace.vocabulary import Vocabulary

LEAN_BYTES = 20_000_000
"""A page larger than this keeps the target's candidates only where the draft is not its choice."""

LIMIT_BYTES = 50_000_000
"""A page larger than this holds the tokens of fewer requests."""

NAMES = {
    "speed_up_plain": ("speed-up over the target alone, predicted", "x", 1),
    "speed_up": ("speed-up over strict, predicted", "x", 1),
    "mean_acceptance_length": ("tokens/step", "", 1),
    "accepted_per_proposal": ("drafts/step", "", 1),
    "acceptance_length_gain": ("gain", "%", 100),
    "regret_spent_mean": ("regret/request", "", 1),
    "regret_per_token": ("regret/token", "", 1),
    "relaxed_per_token": ("relaxed", "%", 100),
    "outputs_differ_share": ("outputs differ", "%", 100),
    "edit_distance_mean": ("edit distance", "", 1),
    "accuracy": ("accuracy", "%", 100),
}
"""Head of a column, unit behind its numbers, and factor."""


@dataclass(frozen=True)
class Page:
    """A report that was written.

    Attributes
    ----------
    path : Path
    bytes : int
    requests, all_requests : int
        Requests whose tokens the page holds, and requests of the trace.
    settings, exact : int
        Settings in the page, and how many of them are exact.
    verdict : str
        Two sentences on the setting that it begins with.
    """

    path: Path
    bytes: int
    requests: int
    all_requests: int
    settings: int
    exact: int
    verdict: str


def write_report(
    path: Path,
    results: Sequence[Result],
    vocabulary: Vocabulary,
    *,
    cost: Cost | None = None,
    policy: Policy | None = None,
    command: str = "",
    note: Callable[[str], None] = lambda text: None,
    limit_bytes: int = LIMIT_BYTES,
) -> Page:
    """Write the report of some replays of one trace.

    Parameters
    ----------
    path : Path
        File to write, whole or not at all.
    results : sequence of Result
        Replays of one trace, one for each rule or reading; at least one.
    vocabulary : Vocabulary
        Text of the trace's tokens.
    cost : Cost, optional
        Predicts speed-ups.
    policy : Policy, optional
        The setting that the page begins with; by default the paper's if it is exact, or else the longest exact one.
    command : str
        What made the page.
    note : callable
        Told of what is left out.
    limit_bytes : int
        Above this the tokens of fewer requests are kept, evenly drawn from all.

    Raises
    ------
    UsageError
        If there is nothing to report.
    AsdsimError
        If the file cannot be written.
    """
    trace, _ = results[0].whole
    number = len(trace.request_ids())
    if number == 0:
        raise UsageError("the trace has no request", where=str(trace.path))
    if not any(is_baseline(result.grid.policy(n)) for result in results for n in range(len(result))):
        strict = replay_grid(trace, results[0].grid.strict)  # which all others are compared with
        results = [*results, strict]
    scorer = make_scorer(trace.request_records(), vocabulary.text)
    judged = scorer if any(scorer.names) else None
    qualities = [result.quality(cost=cost, scorer=judged) for result in results]
    settings = settings_of(results, qualities)
    start = chosen_setting(settings, policy)
    for entry in settings:
        entry["verdict"] = " ".join(verdict(entry, settings[0], number))
    figures = drawn_figures(results, qualities, note)
    kept, lean = number, False
    while True:
        requests = np.unique(np.linspace(0, number - 1, kept).round().astype(int)).tolist()
        content = collect(trace, results, vocabulary, scorer, settings, requests=requests, lean=lean)
        text = render(content, head_of(results, content, start, command, number, lean, cost), figures, start)
        size = len(text.encode())
        if not lean and size > min(LEAN_BYTES, limit_bytes):
            lean = True
            note(f"the page would have {size / 1e6:.0f} MB: it keeps candidates only where draft and target differ")
            continue
        if size <= limit_bytes or kept == 1:
            break
        kept = max(1, min(kept - 1, int(0.9 * kept * limit_bytes / size)))
        note(f"the page would have {size / 1e6:.0f} MB: it keeps the tokens of {kept} of {number} requests")
    _write(path, text)
    exact = sum(not entry["caveat"] for entry in settings)
    if exact < len(settings):
        note(
            f"{len(settings) - exact} of {len(settings)} settings are not exact: the page marks their figures with ~; "
            "asdsim cover makes them exact"
        )
    return Page(path, size, len(requests), number, len(settings), exact, settings[start]["verdict"])


def _write(path: Path, text: str) -> None:
    try:
        make_folder(path.parent)
        write_atomically(path, text)
    except OSError as error:
        raise AsdsimError(
            f"cannot write: {error.strerror or error}", where=str(path), fix="name another file"
        ) from None


def chosen_setting(settings: Sequence[dict[str, Any]], policy: Policy | None) -> int:
    """Return the row of the setting that a page begins with: one that is exact, unless another is asked for."""
    from ..plots.rows import PAPER

    if policy is not None:
        for n, entry in enumerate(settings):
            if entry["name"] == name_of(policy):
                return n

    def rank(n: int) -> tuple[bool, bool, bool, float]:
        entry = settings[n]
        paper = (entry["B"], entry["g"], entry["M"]) == PAPER
        length = entry["figures"].get("mean_acceptance_length", [0.0])[0]
        return not entry["caveat"], not entry["strict"], paper, length

    return max(range(len(settings)), key=rank)


def head_of(
    results: Sequence[Result], content: Content, start: int, command: str, number: int, lean: bool, cost: Cost | None
) -> dict[str, Any]:
    """Return what the top of the page says: verdict, what its speeds assume, facts and provenance."""
    trace, manifest = results[0].trace, results[0].trace.manifest
    entry = content.settings[start]
    exact = sum(not setting["caveat"] for setting in content.settings)
    relaxing = [setting for setting in content.settings if not setting["strict"]]
    uncovered = (
        "No setting but strict matching is exact here, so figures marked ~ are no result: "
        f"run asdsim cover {trace.path} for these settings, then make the page again."
    )
    modes = {result.off_trace for result in results}
    kind = "exact" if exact == len(content.settings) else f"{exact} of {len(content.settings)} settings exact"
    held = len(content.requests)
    lossless = all(setting["name"] == "strict" for setting in content.settings)
    facts = {
        "target": _model(manifest.target),
        "drafter": _model(manifest.drafter),
        "K": str(manifest.K),
        "requests": f"{number} requests ({', '.join(manifest.tasks)})",
        "figures": kind + ("" if exact == len(content.settings) else f"; off trace: {', '.join(sorted(modes))}"),
        "lossless": "lossless" if lossless else "not lossless, strict matching apart: relaxed tokens change outputs",
        "trace": f"{trace.path.name}, checksum {manifest.checksum[:16]}",
        "made by": f"asdsim {manifest.software.get('asdsim', '?')}, capture of {manifest.notes.get('created', '?')}",
        "command": command,
    }
    sampled = f"tokens of {held} of {number} requests, evenly drawn; all figures are those of all requests"
    return {
        "title": f"{_name(manifest.target)} with {_name(manifest.drafter)}",
        "verdict": entry["verdict"],
        "speeds": "" if cost is None else "; ".join([f"Speeds are predicted from {cost.source}", *cost.notes()]) + ".",
        "uncovered": uncovered if relaxing and all(setting["caveat"] for setting in relaxing) else "",
        "facts": facts,
        "sample": "; ".join([sampled] * (held < number) + ["candidates only where draft and target differ"] * lean),
    }


def _name(model: dict[str, Any]) -> str:
    return str(model.get("name", "?"))


def _model(model: dict[str, Any]) -> str:
    revision = model.get("revision")
    checksum = str(model.get("weights_sha256", ""))[:12]
    return ", ".join(
        [_name(model), *([str(revision)] if revision else []), *([f"weights {checksum}"] if checksum else [])]
    )


def verdict(entry: dict[str, Any], strict: dict[str, Any], number: int) -> list[str]:
    """Return two sentences: what the chosen setting gains, and what it costs."""
    figures = entry["figures"]
    length, gain = figures.get("mean_acceptance_length"), figures.get("acceptance_length_gain")
    if entry["caveat"]:
        share = share_below_one(entry["exact"])
        return [
            f"{entry['name']} is not exact here: only {share} of its walks met captured steps."
            if entry["exact"] < 1
            else f"{entry['name']} is {entry['caveat']}.",
            "Its figures are no result; run asdsim cover for this setting.",
        ]
    if length is None:
        return [f"{entry['name']} has no figure here.", "Its walks met no step."]
    if entry["strict"]:
        if entry["name"] != "strict":
            return [f"{entry['name']} commits {length[0]:.2f} tokens per step.", "Other settings are compared with it."]
        first = f"Strict matching commits {length[0]:.2f} tokens per step."
        return [first, "Its outputs are those of the target alone; every other setting is compared with it."]
    first = f"{entry['name']} commits {length[0]:.2f} tokens per step"
    if gain is not None:
        first += f", {100 * gain[0]:+.0f} % against strict matching{_interval(gain, 100, ' %')}"
    if "speed_up" in figures:
        alone, speed = figures["speed_up_plain"], figures["speed_up"]
        first += f"; predicted speed-up over the target alone {alone[0]:.2f}x{_interval(alone, 1, '')}"
        first += f", over strict {speed[0]:.2f}x{_interval(speed, 1, '')}"
    second = f"A request spends {figures['regret_spent_mean'][0]:.2f} logits of regret on average"
    if "outputs_differ_share" in figures:
        differ = round(figures["outputs_differ_share"][0] * number)
        second += f", and {differ} of {number} outputs differ from the strict ones"
    base = strict["figures"].get("accuracy")
    if "accuracy" in figures and base is not None:
        right = f"{100 * figures['accuracy'][0]:.0f} %"
        told = f"{right} of the scored answers are right (strict {100 * base[0]:.0f} %)"
        second += "; " + (told if base[0] else "strict has no scored answer right, so accuracy tells nothing here")
    return [first + ".", second + "."]


def _interval(values: Sequence[float | None], factor: float, unit: str) -> str:
    if values[1] is None or values[2] is None:
        return ""
    digits = 0 if factor == 100 else 2
    return f" (95 % interval {factor * values[1]:.{digits}f} to {factor * values[2]:.{digits}f}{unit})"


def drawn_figures(
    results: Sequence[Result], qualities: Sequence[Quality], note: Callable[[str], None]
) -> list[tuple[str, str]]:
    """Return the figures of ``asdsim plot`` and those with intervals as (title, SVG), for the first replay of ASD."""
    from ..plots.all import figures_of, figures_with_intervals
    from ..plots.style import inline_svg, name_subject

    titles = {
        "acceptance-length": "Accepted draft tokens per step", "acceptance-by-position": "Acceptance by position",
        "acceptance-heatmap": "Acceptance length over B and g", "regret": "Regret of mismatches",
        "fronts": "Gain against risk, with intervals", "gain-by-budget": "Gain by budget, with intervals",
    }  # fmt: skip
    asd = [n for n, result in enumerate(results) if result.grid.layout.rule == "asd"]
    if not asd:
        return []
    result = results[asd[0]]
    drawn = [(name, figure) for name, figure, _ in figures_of(result, note)]
    drawn += figures_with_intervals(qualities[asd[0]].frame())
    for _, figure in drawn:
        name_subject(figure, result.trace.subject)
    return [(titles.get(name, name), inline_svg(figure, name, titles.get(name, name))) for name, figure in drawn]


def render(content: Content, head: dict[str, Any], figures: Sequence[tuple[str, str]], start: int) -> str:
    """Return the text of the page."""
    import jinja2

    read = resources.files("asdsim.report").joinpath
    script, style = (read(name).read_text(encoding="utf-8") for name in ("page.js", "page.css"))
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(read("page.html.j2").read_text(encoding="utf-8"))
    names = [name for name in NAMES if any(entry["figures"].get(name) for entry in content.settings)]
    spec, blob = packed(content)
    payload = {
        "settings": content.settings, "requests": content.requests, "vocabulary": content.vocabulary,
        "special": content.special, "answers": content.answers, "topK": content.top_k,
        "dropLeading": content.drop_leading, "columns": spec, "ended": ENDED, "final": FINAL, "gapUnit": GAP_UNIT,
        "start": start, "figures": [{"name": name, "head": NAMES[name][0], "unit": NAMES[name][1],
                                     "factor": NAMES[name][2], "meaning": FIGURES[name].meaning} for name in names],
    }  # fmt: skip
    return template.render(
        head=head, figures=figures, names=names, heads=NAMES, settings=content.settings, meanings=FIGURES,
        rows=summary_rows(content, names, start), island=island(payload), blob=blob, script=script, style=style,
        script_hash=_hash(script), style_hash=_hash(style),
    )  # fmt: skip


def summary_rows(
    content: Content, names: Sequence[str], start: int, most: int = 40
) -> list[tuple[list[tuple[str, bool]], str]]:
    """Return the rows of the table that shows where no script runs: strict, the chosen setting, the longest exact ones.

    Each row is its cells (text, and whether a ``~`` marks it), and why its figures are no result.
    """
    order = sorted(
        range(len(content.settings)),
        key=lambda n: (
            n not in (0, start), bool(content.settings[n]["caveat"]), -content.settings[n]["exact"],
            -content.settings[n]["figures"].get("mean_acceptance_length", [0.0])[0],
        ),
    )  # fmt: skip
    rows = []
    for n in order[:most]:
        entry = content.settings[n]
        mark = "~" * bool(entry["caveat"])
        cells = [(entry["name"], False), (f"{min(entry['exact'], 1.0 if entry['exact'] == 1 else 0.99):.2f}", False)]
        for name in names:
            value = entry["figures"].get(name)
            _, unit, factor = NAMES[name]
            digits = 1 if factor == 100 else 3
            text = "–" if value is None else f"{mark}{factor * value[0]:.{digits}f}{unit and ' ' + unit}"
            cells.append((text, bool(value and mark)))
        rows.append((cells, entry["caveat"]))
    return rows


def packed(content: Content) -> tuple[dict[str, list[Any]], str]:
    """Return where each column lies (type, start in bytes, entries), and all of them compressed, in base64."""
    spec: dict[str, list[Any]] = {}
    parts: list[bytes] = []
    offset = 0
    for name, array in content.columns.arrays.items():
        data = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        spec[name] = [array.dtype.name, offset, len(array)]
        padding = -len(data) % 8
        parts += [data, bytes(padding)]
        offset += len(data) + padding
    return spec, base64.b64encode(gzip.compress(b"".join(parts), 9, mtime=0)).decode()


def island(value: Any) -> str:
    """Return JSON that no HTML parser can read as markup, and no script engine as a line end."""
    text = json.dumps(plain(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
