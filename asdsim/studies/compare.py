"""Acceptance rules side by side on one trace, at their published settings or at matched risk.

At matched risk every rule moves one parameter, its knob, and keeps the others at their published values: ASD moves
B. Of the settings whose risk does not exceed the level the one with the longest acceptance length is taken; risk is a
step function of a parameter, so the level is met from below and the risk reached is reported beside it. Where walks
that leave the trace stop, only settings that are exact for every request take part: others have no risk to match.

Whether an output differs from strict is known without its text: up to the first accepted mismatch a walk is the strict
one, and there it commits another token. Everything else about a walk that leaves the trace is an estimate, and a row
with an estimate has no interval: the error of an estimate is not that of sampling requests.

Requests whose strict walk is not captured cannot be compared; they are left out of every row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import stats
from ..errors import TraceError, UsageError, unknown_name
from ..evaluate.cost import Cost, CostModel, Linear
from ..evaluate.cost_spec import cost_of_trace
from ..evaluate.figures import FIGURES
from ..evaluate.quality import Evaluator, Quality, Scorer
from ..rules import NAMES, get_rule
from ..rules.scoring import DEFAULT, Layout
from ..rules.settings import Grid, rule_grids
from ..trace.graph import Graphs
from ..trace.groups import StreamedTrace
from ..trace.store import GraphStore, fill, graph_of
from ..trace.stored import Trace
from ..walk.estimate import mean_walks
from ..walk.off_trace import OFF_TRACE, off_trace_mode
from ..walk.request import ACCEPTED, DRAFTED, RELAXED, STEPS, TOKENS
from ..walk.sweep import walk_grid

RISKS = {
    "regret_max": "largest realised regret of a request, in logits",
    "regret_per_token": "regret spent per generated token, in logits",
    "outputs_differ_share": "share of outputs that differ from the strict ones",
}
PUBLISHED = (8.0, 0.25, 2.0)
"""B, g and M of ASD's main results."""

ASD_LADDER = tuple(round(0.25 * n, 2) for n in range(129))
REFINE = 24
CLAIMS = (
    "mean_acceptance_length", "accepted_per_proposal", "acceptance_length_gain", "gain_low", "gain_high",
    "predicted_speedup", "tokens_per_answer", *RISKS, "against_asd", "against_asd_low", "against_asd_high",
    "ended_share", "seconds_per_answer", "answer_speed_up",
    "accuracy", "accuracy_low", "accuracy_high", "accuracy_change", "scored_requests",
)  # fmt: skip
"""Figures of a row; all None where no request is left."""

Floats = npt.NDArray[np.float64]


@dataclass
class Measured:
    """Per (setting, request): averages over draws where the walk left the trace.

    Attributes
    ----------
    grid : Grid
    steps, tokens, accepted, spent, drafted : float64 (n, R)
    differs, exact : bool (n, R)
        Whether the output is not the strict one, and whether the walk met captured steps only.
    prompt : float64 (R,)
        Tokens of each prompt.
    """

    grid: Grid
    steps: Floats
    tokens: Floats
    accepted: Floats
    spent: Floats
    drafted: Floats
    differs: npt.NDArray[np.bool_]
    exact: npt.NDArray[np.bool_]
    prompt: Floats

    def risk(self, name: str) -> Floats:
        """Return a risk measure of every setting."""
        if name == "regret_max":
            return self.spent.max(axis=1, initial=0.0)
        if name == "regret_per_token":
            return self.spent.sum(axis=1) / np.maximum(self.tokens.sum(axis=1), 1.0)
        return self.differs.mean(axis=1)

    def requests(self, rows: npt.NDArray[Any]) -> Measured:
        """Return the same for some requests."""
        return Measured(
            self.grid, self.steps[:, rows], self.tokens[:, rows], self.accepted[:, rows], self.spent[:, rows],
            self.drafted[:, rows], self.differs[:, rows], self.exact[:, rows], self.prompt[rows],
        )  # fmt: skip


@dataclass
class Comparison:
    """Rows of a comparison, and what could not be compared.

    Attributes
    ----------
    rows : list of dict
        One per rule, in the order of acceptance length gain, which is over strict matching; ``predicted_speedup`` is
        over the target alone: see :func:`speedup`. A row that is not ``exact`` has no interval.
    skipped : dict of str to str
        Rules that cannot run on this trace, and why.
    unpaired : int
        Requests left out, because their strict walk is not captured.
    level : float or None
        Of the risk measure; None for published settings.
    risk : str
    cost : Cost
        Of the predicted speed.
    off_trace : str
        Under ``stop`` each rule covers the requests that never left the trace: a biased sample, and not the same one
        for every rule. At a level, settings with such a request are not candidates.
    about_scores : str
        What accuracy stands on, where answers are scored.
    """

    rows: list[dict[str, Any]]
    risk: str
    level: float | None
    cost: Cost
    off_trace: str = "pooled"
    skipped: dict[str, str] = field(default_factory=dict)
    unpaired: int = 0
    about_scores: str = ""


class Meter:
    """Walks one trace under any grid, on the requests whose strict walk is captured.

    Parameters
    ----------
    trace : Trace
    off_trace, device, threads
        See :func:`compare`.
    rules : sequence of str
        Rules to lay out in one pass over a trace that is read group by group; any other takes a pass of its own.

    Attributes
    ----------
    stores : dict of Layout to GraphStore
        Layouts of such a trace; empty for one in memory.
    paired : int64 (R,)
        Rows of the requests that are measured.
    strict : Measured
        Strict matching, on whole blocks.

    Raises
    ------
    UsageError
        If no strict walk is captured.
    """

    def __init__(
        self, trace: Trace | StreamedTrace, off_trace: str = "pooled", device: str = "auto", threads: int = 0,
        rules: Sequence[str] = (),
    ) -> None:  # fmt: skip
        off_trace_mode(off_trace)
        self.trace, self.off_trace, self.device, self.threads = trace, off_trace, device, threads
        self._latest: tuple[Layout, Graphs] | None = None
        self.stores: dict[Layout, GraphStore] = {}
        if isinstance(trace, StreamedTrace):
            self._prepare(trace, ["strict", *rules])
        self.paired = np.arange(trace.num_requests)
        strict = self.measure(rule_grids("strict")[0])
        self.paired = np.flatnonzero(strict.exact[0])
        if not len(self.paired):
            raise UsageError(
                f"the strict walk is captured for none of {strict.exact.shape[1]} requests, so there is nothing to "
                "compare with", where=str(trace.path), fix=f"run asdsim cover {trace.path} --B 0 --g 0 --M 0",
            )  # fmt: skip
        self.strict = strict.requests(self.paired)

    def _prepare(self, trace: StreamedTrace, names: Sequence[str]) -> None:
        grids = [grid for name in names for grid in published(name, trace.manifest.num_draft_tokens)]
        base = GraphStore(trace)
        for layout in dict.fromkeys(grid.layout for grid in grids):
            own = GraphStore(trace, layout, base=base if layout.blocks == DEFAULT.blocks else None)
            self.stores[layout] = base if layout == DEFAULT else own
        fill(list(self.stores.values()))

    def graph(self, layout: Layout) -> Graphs:
        """Return the trace under a layout; only the latest one is kept, since a comparison goes rule by rule."""
        if layout in self.stores:
            return self.stores[layout]
        if self._latest is None or self._latest[0] != layout:
            self._latest = layout, graph_of(self.trace, layout)
        return self._latest[1]

    def measure(self, grid: Grid) -> Measured:
        """Walk every setting."""
        graph = self.graph(grid.layout)
        options: dict[str, Any] = {"device": self.device, "threads": self.threads}
        true = walk_grid(graph, grid, **options)
        counts, spent = true.counts.astype(np.float64), true.spent
        mode = OFF_TRACE[self.off_trace]
        if not mode.has_walks:
            counts, spent = mean_walks(graph, grid, true, **options)
        elif mode.estimate and not true.exact.all():
            walks = walk_grid(graph, grid, off_trace=mode.name, **options)
            counts, spent = walks.counts.astype(np.float64), walks.spent
        steps, tokens, accepted, drafted = (counts[..., name] for name in (STEPS, TOKENS, ACCEPTED, DRAFTED))
        relaxed = true.counts[..., RELAXED] > 0
        prompt = self.trace.prompt_tokens.astype(np.float64)
        measured = Measured(grid, steps, tokens, accepted, spent, drafted, relaxed, true.exact, prompt)
        return measured if len(self.paired) == graph.num_requests else measured.requests(self.paired)


OF_ANSWERS = ("ended_share", "seconds_per_answer", "answer_speed_up")
"""Figures of whole answers that exact rows have, the first where answers can be scored; see
:data:`asdsim.evaluate.figures.FIGURES`."""


def stated_cost(draft_cost: float) -> Cost:
    """Return the model of cost in which a draft token takes so many verifications, and a pass always the same time.

    Raises
    ------
    UsageError
        If that is not a cost.
    """
    if not (draft_cost >= 0 and np.isfinite(draft_cost)):
        raise UsageError(f"draft cost {draft_cost} is not a cost", fix="give a number >= 0, in target verifications")
    draft, verify = Linear(per_draft=1e6 * draft_cost), Linear(1e6)
    return CostModel(
        draft, verify, Linear(), Linear(1e6, 1e6 * draft_cost), f"a draft cost of {draft_cost:g}, as stated"
    )


def published(name: str, num_draft_tokens: int = 0) -> list[Grid]:
    """Return a rule's published setting; for ``truncate`` every draft length."""
    if name == "asd":
        return [Grid.product(*PUBLISHED)]
    if name == "truncate":
        return rule_grids(name, {"K": list(range(1, num_draft_tokens + 1))})
    return rule_grids(name)


def knob_grid(name: str, values: Sequence[float]) -> Grid:
    """Return a rule with its knob at the given values."""
    if name == "asd":
        return Grid.product(list(values), PUBLISHED[1], PUBLISHED[2])
    return rule_grids(name, {get_rule(name).knob: list(values)})[0]


def compare(
    trace: Trace | StreamedTrace,
    rules: Sequence[str] = ("asd", *NAMES),
    *,
    risk: str = "regret_max",
    level: float | None = None,
    cost: Cost | None = None,
    scorer: Scorer | None = None,
    off_trace: str = "pooled",
    device: str = "auto",
    threads: int = 0,
    seed: int = 0,
    resamples: int = stats.RESAMPLES,
    progress: Callable[[int], object] = lambda rules: None,
) -> Comparison:
    """Compare rules on one trace.

    ``truncate`` has no published setting: at every level it takes part with the K that is predicted to be fastest.

    Parameters
    ----------
    trace : Trace or StreamedTrace
    rules : sequence of str
        ``asd`` and names in :data:`asdsim.rules.NAMES`.
    risk : str
        Key of :data:`RISKS`.
    level : float, optional
        Match this risk; by default every rule at its published setting.
    cost : Cost, optional
        For the predicted speed; by default the trace's own, see :func:`asdsim.evaluate.cost_spec.cost_of_trace`.
    scorer : callable, optional
        Says whether an answer is right; rows that are exact then have an accuracy. Estimates know no answers.
    off_trace : str
        What happens at prefixes that were not captured; all but ``stop`` are estimates where ``exact_share`` is below
        1.
    seed, resamples : int
        Of the bootstrap over requests, that of :mod:`asdsim.stats`.
    progress : callable
        Called with 1 after each rule.

    Raises
    ------
    UsageError
        On an unknown rule or risk, a level that is negative, or a trace without timings and no cost.
    """
    if risk not in RISKS:
        raise unknown_name("risk measure", risk, list(RISKS))
    if level is not None and not level >= 0:
        raise UsageError(f"level {level} of {risk} is negative", fix="give a number >= 0")
    for name in rules:
        if name not in ("asd", *NAMES):
            raise unknown_name("rule", name, ["asd", *NAMES])
    cost = cost or cost_of_trace(trace)
    meter = Meter(trace, off_trace, device, threads, rules)
    comparison = Comparison([], risk, level, cost, off_trace)
    comparison.unpaired = trace.num_requests - len(meter.paired)
    settings: dict[str, Measured] = {}
    for name in dict.fromkeys(rules):
        try:
            setting = pick_setting(meter, name, risk, level, cost)
        except TraceError as error:
            comparison.skipped[name] = str(error)
            continue
        finally:
            progress(1)
        if setting is None:
            which = "setting that is exact for all requests" if off_trace == "stop" else "setting of its knob"
            hint = "; asdsim cover, or another --off-trace" if off_trace == "stop" else ""
            comparison.skipped[name] = f"no {which} has {risk} <= {level:g}{hint}"
        else:
            settings[name] = setting
    # Only their values are shown, and accuracy has no bootstrap, so two draws are as good as any number.
    judge = Evaluator(trace, cost=cost, scorer=scorer, resamples=2, device=device, threads=threads, graphs=meter.stores)
    figures = ["seconds_per_answer", "answer_speed_up"]
    if scorer is not None:  # outputs of a trace that is read group by group take a pass
        figures += ["ended_share", "accuracy", "accuracy_change"]
    answers = {
        name: judge.evaluate(setting.grid, figures=figures, requests=meter.paired.tolist())
        for name, setting in settings.items()
        if setting.exact.all()
    }
    weights = stats.Draws(len(meter.paired), resamples, seed)  # only now: they take memory
    for name, setting in settings.items():
        row = _row(name, setting, meter, cost, weights)
        if name in answers:
            row |= _of_answers(answers[name])
            if scorer is not None:
                comparison.about_scores = answers[name].about_scores()
        if name != "asd" and "asd" in settings:
            row |= _against(setting, settings["asd"], off_trace, weights)
        comparison.rows.append(row)
    comparison.rows.sort(key=lambda row: -(row["acceptance_length_gain"] or 0.0))
    return comparison


def pick_setting(meter: Meter, name: str, risk: str, level: float | None, cost: Cost) -> Measured | None:
    """Return the one setting of a rule that takes part, None where no setting is within the level."""
    if name == "truncate":
        tried = [meter.measure(grid) for grid in published(name, meter.trace.manifest.num_draft_tokens)]
        if meter.off_trace == "stop":  # the longest draft is strict matching, and exact
            tried = [setting for setting in tried if setting.exact.all()] or tried[-1:]
        return max(tried, key=lambda setting: float(speedup(setting, meter.strict, cost)[0]))
    if level is None or name == "strict":
        return meter.measure(published(name)[0])
    values = list(ASD_LADDER if name == "asd" else get_rule(name).ladder)
    whole = name != "asd" and next(p for p in get_rule(name).parameters if p.name == get_rule(name).knob).whole
    only_exact = meter.off_trace == "stop"
    best = _best(meter.measure(knob_grid(name, values)), values, risk, level, only_exact)
    for _ in range(0 if whole else 2):  # look closer beside the best value found
        if best is None:
            break
        rung = values.index(best)
        near = values[max(0, rung - 1) : rung + 2]
        values = sorted({*near, *np.linspace(min(near), max(near), REFINE).tolist()})
        best = _best(meter.measure(knob_grid(name, values)), values, risk, level, only_exact)
    return None if best is None else meter.measure(knob_grid(name, [best]))


def _best(tried: Measured, values: Sequence[float], risk: str, level: float, only_exact: bool) -> float | None:
    """Return the value with the longest acceptance length within the level; of equals the first.

    With ``only_exact`` only values that are exact for every request count.
    """
    length = tried.tokens.sum(axis=1) / tried.steps.sum(axis=1)
    within = tried.risk(risk) <= level
    if only_exact:
        within &= tried.exact.all(axis=1)
    return values[int(np.argmax(np.where(within, length, -np.inf)))] if within.any() else None


def speedup(setting: Measured, strict: Measured, cost: Cost) -> Floats:
    """Return predicted tokens per second over those of the target alone, by :data:`FIGURES`'s formula; float64 (n,).

    ``strict`` holds strict matching on the same requests.
    """
    columns = {
        "tokens": setting.tokens,
        "seconds": cost.seconds(setting.steps, setting.drafted, setting.tokens, setting.prompt),
        "tokens_strict": strict.tokens, "plain_strict": cost.plain_seconds(strict.tokens, strict.prompt),
    }  # fmt: skip
    return FIGURES["speed_up_plain"].formula({name: values.sum(axis=1) for name, values in columns.items()})


def _row(name: str, setting: Measured, meter: Meter, cost: Cost, weights: stats.Draws) -> dict[str, Any]:
    keep = setting.exact[0] if meter.off_trace == "stop" else np.ones_like(setting.exact[0])
    exact = bool(setting.exact.all())
    row: dict[str, Any] = {
        "rule": name,
        "parameters": _parameters(name, setting.grid),
        "requests": int(keep.sum()),
        "exact": exact,
        "exact_share": float(setting.exact[0].mean()),
        "sampled": name != "asd" and get_rule(name).sampled,
        **dict.fromkeys(CLAIMS),
    }
    kept = setting.requests(keep)
    steps = kept.steps.sum()
    if not steps:
        return row
    row["mean_acceptance_length"] = float(kept.tokens.sum() / steps)
    row["accepted_per_proposal"] = float(kept.accepted.sum() / steps)
    row["tokens_per_answer"] = float(kept.tokens.sum() / keep.sum())
    row["predicted_speedup"] = float(speedup(kept, meter.strict.requests(keep), cost)[0])
    value, low, high = gain(setting, meter.strict, keep, weights)
    if exact:
        row["gain_low"], row["gain_high"] = low, high
    if exact or meter.off_trace != "stop":  # the requests that stayed are a biased sample: no gain of theirs
        row["acceptance_length_gain"] = value
    for measure in RISKS:
        row[measure] = float(kept.risk(measure)[0])
    row["outputs_differ_share"] = float(setting.differs[0].mean())  # known for walks that left, too
    return row


def _of_answers(quality: Quality) -> dict[str, Any]:
    """Return what is known of the answers of an exact setting; of accuracy nothing where no request is scored."""
    values = quality.row(0)
    known = {name: values[name][0] for name in OF_ANSWERS if name in values}
    if not values.get("scored_requests"):
        return known
    names = ("accuracy", "accuracy_low", "accuracy_high")
    return {
        **known, **dict(zip(names, values["accuracy"], strict=True)), "accuracy_change": values["accuracy_change"][0],
        "scored_requests": values["scored_requests"],
    }  # fmt: skip


def _against(setting: Measured, asd: Measured, off_trace: str, weights: stats.Draws) -> dict[str, float | None]:
    """Return the gain over ASD on the requests that both cover, with an interval where both are exact."""
    exact = setting.exact[0] & asd.exact[0]
    keep = exact if off_trace == "stop" else np.ones_like(exact)
    if not keep.any() or (off_trace == "stop" and not exact.all()):
        return {}
    value, low, high = gain(setting, asd, keep, weights)
    return {"against_asd": value, **({"against_asd_low": low, "against_asd_high": high} if exact.all() else {})}


def _parameters(name: str, grid: Grid) -> dict[str, Any]:
    if name == "asd":
        return {"B": float(grid.budget[0]), "g": float(grid.gate[0]), "M": float(grid.cap[0])}
    return dict(grid.params[0]) if grid.params else {}


def gain(
    setting: Measured, other: Measured, keep: npt.NDArray[np.bool_], weights: Floats | stats.Draws
) -> tuple[float, float | None, float | None]:
    """Return the relative gain in acceptance length over another setting, with the ends of its 95 % interval.

    Figure, draws and interval are those of :class:`asdsim.evaluate.quality.Evaluator`, so equal walks get
    equal intervals in both. ``keep`` says which requests count; too few give no interval.
    """
    columns = {
        "tokens": setting.tokens[0], "steps": setting.steps[0],
        "tokens_strict": other.tokens[0], "steps_strict": other.steps[0],
    }  # fmt: skip
    sums = stats.Resampled({name: values * keep for name, values in columns.items()}, weights, kept=keep.sum())
    interval = sums.interval(FIGURES["acceptance_length_gain"].formula)
    low, high = (None if np.isnan(end[0]) else float(end[0]) for end in (interval.low, interval.high))
    return float(interval.value[0]), low, high
