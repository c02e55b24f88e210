"""What the page knows: settings with their figures, and one graph of steps that all of them share.

Bulk goes into typed columns rather than one copy per setting: steps and their tokens once, the distinct walks of each
request once, and for each (setting, request) the number of its walk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from ..evaluate.scorers import TaskScorer, given_answer
from ..evaluate.strips import is_strict, name_of
from ..rules.asd import BUDGET, CAP, GATE
from ..rules.settings import Grid, Policy
from ..trace.graph import END, MISSING, Graph
from ..trace.vocabulary import Vocabulary
from ..walk.off_trace import OFF_TRACE
from ..walk.path import Path, visits

if TYPE_CHECKING:
    from ..evaluate.quality import Quality
    from ..result import Result
    from ..trace.reader import Trace

ENDED = ("block", "end", "gate", "budget", "cap", "mismatch")
"""What ended a block, by number; under another rule than ASD ``gate`` stands for the rule."""

FINAL = ("", "eos", "limit", "missing")
"""Where an output ended, by number."""

SHOWN = (
    "speed_up_plain", "speed_up", "mean_acceptance_length", "accepted_per_proposal", "acceptance_length_gain",
    "regret_spent_mean", "regret_per_token", "relaxed_per_token", "outputs_differ_share", "edit_distance_mean",
    "accuracy",
)  # fmt: skip
"""Figures of the table, those that the data allow."""

COMPARED = ("speed_up_plain", "speed_up", "acceptance_length_gain", "outputs_differ_share", "edit_distance_mean")
"""Figures that compare with strict matching or the target alone: a biased sample has none."""

GAP_UNIT = 64
"""How far a candidate lies below the one before it is stored in parts of 1/64 logit, at most 255 of them."""

LEAST = 0.001
"""Candidates with less probability are left out."""


@dataclass
class Columns:
    """Typed columns of the page.

    Attributes
    ----------
    arrays : dict of ndarray
        By name. Of steps: ``s_id``, ``s_wave``, ``s_k`` (draft tokens). Of positions, K + 1 for each step:
        ``p_draft``, ``p_choice`` (rows of the vocabulary), ``p_regret``, ``p_top`` (probability of the best, 1/65535),
        ``score0``, ``score1`` .. (one for each layout, NaN where the draft is no mismatch), and by rank ``t_id`` and
        ``t_gap`` (the k - 1 next tokens, and how far each lies below the one before, see ``GAP_UNIT``; 0 and 0 for one
        that is left out, see ``LEAST``). Of walks: ``w_ptr``, ``w_step``, ``w_acc``,
        ``w_com``, ``w_end`` (``ENDED`` + 8 x ``FINAL``), ``w_spent`` (ledger after, float64). Of pairs: ``walk``
        (setting, request). Of walks again: ``w_right`` (0 not scored, 1 wrong, 2 right), ``w_answer`` (-1 for none).
    """

    arrays: dict[str, npt.NDArray[Any]] = field(default_factory=dict)


@dataclass
class Content:
    """Everything in the page.

    Attributes
    ----------
    settings : list of dict
        Name, rule, B, g, M, exactness and figures of each; the first is strict matching. ``caveat`` says why the
        figures are no result, and is empty where they are one.
    requests : list of dict
    vocabulary : list
        Text of each token, or its bytes as numbers where they are no whole characters.
    special : list of int
        Rows of the vocabulary that are no part of a text.
    answers : list of str
    columns : Columns
    top_k, vocabulary_drops_leading : int, bool
    """

    settings: list[dict[str, Any]]
    requests: list[dict[str, Any]]
    vocabulary: list[Any]
    special: list[int]
    answers: list[str]
    columns: Columns
    top_k: int
    drop_leading: bool


def settings_of(results: Sequence[Result], qualities: Sequence[Quality]) -> list[dict[str, Any]]:
    """Return one entry for each setting of some replays, with its figures and their intervals; strict comes first.

    Where walks stop off the trace, a setting that is not exact has None for every figure of :data:`COMPARED`.
    """
    entries: list[dict[str, Any]] = []
    for number, (result, quality) in enumerate(zip(results, qualities, strict=True)):
        frame = result.frame().to_dicts()
        for n in range(len(result)):
            policy, row = result.grid.policy(n), quality.row(n)
            figures = {name: row[name] for name in SHOWN if name in row and row[name][0] is not None}
            caveat = "" if row["exact"] else _caveat(row["exact_share"], result.off_trace)
            if caveat and not OFF_TRACE[result.off_trace].estimate:
                figures |= {name: None for name in COMPARED if name in row}
            entries.append(
                {
                    "name": _full_name(result.grid, n), "rule": result.grid.layout.rule, "layout": number,
                    "strict": is_baseline(policy), "B": policy.budget, "g": policy.gate, "M": policy.cap,
                    "semantics": result.grid.semantics, "ledger": result.grid.ledger, "exact": row["exact_share"],
                    "caveat": caveat,
                    "steps": frame[n]["num_spec_steps"], "tokens": frame[n]["completion_tokens"],
                    "relaxed": frame[n]["relaxed_tokens"], "spent_max": frame[n]["regret_spent_max"],
                    "figures": figures, "result": number, "row": n,
                }
            )  # fmt: skip
    return _without_twins(entries)


def _caveat(share: float, off_trace: str) -> str:
    """Return what the figures of a setting that is not exact stand for."""
    if share == 1.0:
        return "not exact: the strict walks that it is compared with are not all captured"
    mode = OFF_TRACE[off_trace]
    kept = f"not exact: the walks of {share_below_one(share)} of the requests met captured steps only; "
    return kept + (mode.figure_note if mode.estimate else "the figure is that of this biased sample")


def share_below_one(share: float) -> str:
    """Return a share below 1 in per cent that never rounds to 100."""
    return f"{min(99.0, 100 * share):.0f} %"


def is_baseline(policy: Policy) -> bool:
    """Tell whether a setting is what others are compared with: strict matching, or B = 0 of a reading without it."""
    return is_strict(policy) or policy.budget == 0.0


def _full_name(grid: Grid, setting: int) -> str:
    """Return how a setting is called, with what tells it apart from the paper's reading of ASD."""
    policy = grid.policy(setting)
    if policy.label or is_strict(policy):
        return name_of(policy)
    if is_baseline(policy):
        return f"B=0 {grid.semantics} (accepts ties)"
    reading = [grid.semantics] * (grid.semantics != "paper")
    return " ".join([name_of(policy), *reading, *grid.parameters(setting).split()])


def _without_twins(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries with strict matching first and once, and every other setting once."""
    strict = [entry for entry in entries if entry["strict"]]
    others: dict[str, dict[str, Any]] = {}
    for entry in entries:
        if not entry["strict"]:
            others.setdefault(entry["name"], entry)
    order = sorted(others.values(), key=lambda entry: (entry["layout"], entry["B"], entry["g"], entry["M"]))
    return [*strict[:1], *order]


class _Walks:
    """Collects the distinct walks of each request and the steps that they visit."""

    def __init__(self, trace: Trace, results: Sequence[Result], scorer: TaskScorer, vocabulary: Vocabulary) -> None:
        self.trace, self.results, self.scorer, self.vocabulary = trace, results, scorer, vocabulary
        self.steps: dict[int, int] = {}  # row of the trace -> number in the page
        self.parts: dict[str, list[float]] = {name: [] for name in ("w_step", "w_acc", "w_com", "w_end", "w_spent")}
        self.ptr = [0]
        self.right: list[int] = []
        self.answer: list[int] = []
        self.answers: dict[str, int] = {}
        self._texts: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}
        self._known: dict[tuple[Any, ...], int] = {}

    def add(self, number: int, policy: Policy, request: int) -> int:
        """Return the number of one walk, which is stored unless an equal one is there."""
        _, graph = self.results[number].whole
        path = visits(graph, policy, request, self.results[number].off_trace)
        ends = [_ending(graph, policy, request, visit) for visit in path.visits]
        key = (request, *((v.step, v.accepted, e, v.spent_after) for v, e in zip(path.visits, ends, strict=True)))
        if key not in self._known:
            self._known[key] = len(self.ptr) - 1
            for visit, end in zip(path.visits, ends, strict=True):
                step = self.steps.setdefault(visit.step, len(self.steps))
                row = (step, visit.accepted, visit.tokens, end, visit.spent_after)
                for name, value in zip(self.parts, row, strict=True):
                    self.parts[name].append(value)
            self.ptr.append(len(self.parts["w_step"]))
            right, answer = self._judge(path, request)
            self.right.append(right)
            self.answer.append(answer)
        return self._known[key]

    def _judge(self, path: Path, request: int) -> tuple[int, int]:
        """Return whether an output is right, and the number of the answer that it gives."""
        name = self.scorer.names[request]
        if name is None or not path.exact:
            return 0, -1
        draft, choice = (self.trace.column("positions", column) for column in ("draft_id", "argmax_id"))
        tokens: list[int] = []
        for visit in path.visits:
            first = int(self.trace.pos_ptr[visit.step])
            tokens += draft[first : first + visit.accepted].tolist()
            tokens += choice[first + visit.accepted : first + visit.tokens].tolist()
        key = (request, tuple(tokens))
        if key not in self._texts:
            verdict = self.scorer(request, np.array(tokens, "<i4").tobytes())
            given = given_answer(name, self.vocabulary.text(tokens))
            number = -1 if given is None else self.answers.setdefault(given, len(self.answers))
            self._texts[key] = (0 if verdict is None else 1 + bool(verdict), number)
        return self._texts[key]


def _ending(graph: Graph, policy: Policy, request: int, visit: Any) -> int:
    """Return what ended a block and an output, as one number."""
    following = int(graph.edge_next[visit.edge])
    whole = visit.tokens_before + visit.tokens >= int(graph.limit[request])
    final = 2 if whole else 1 if following == END else 3 if following == MISSING else 0
    if visit.verdict in (GATE, BUDGET, CAP):
        ended = 5 if is_strict(policy) else {GATE: 2, BUDGET: 3, CAP: 4}[visit.verdict]
    else:
        ended = 1 if visit.tokens == visit.accepted else 0
    return ended + 8 * final


def collect(
    trace: Trace,
    results: Sequence[Result],
    vocabulary: Vocabulary,
    scorer: TaskScorer,
    settings: list[dict[str, Any]],
    *,
    requests: Sequence[int],
    lean: bool = False,
) -> Content:
    """Return the content of a page.

    Parameters
    ----------
    trace : Trace
    results : sequence of Result
        Replays of the trace, one for each layout.
    vocabulary : Vocabulary
        Text of the trace's tokens.
    scorer : TaskScorer
        Judges outputs.
    settings : list of dict
        From :func:`settings_of`.
    requests : sequence of int
        Rows of the requests whose tokens the page holds; figures are always those of all.
    lean : bool
        Keep candidates only where the draft is not the target's choice, and behind whole blocks.

    Raises
    ------
    UsageError
        If no setting is left.
    """
    records = trace.request_records()
    if not settings:
        raise UsageError("no setting to report", where=str(trace.path))
    walks = _Walks(trace, results, scorer, vocabulary)
    table = np.zeros((len(settings), len(requests)), np.uint32)
    for n, entry in enumerate(settings):
        policy = results[entry["result"]].grid.policy(entry["row"])
        for column, request in enumerate(requests):
            table[n, column] = walks.add(entry["result"], policy, request)
    columns, words = _columns(trace, results, walks, lean)
    columns.arrays["walk"] = table.ravel()
    texts, special = _texts(vocabulary, words)
    return Content(
        settings=settings,
        requests=[
            {"id": records[r].request_id, "task": records[r].task, "prompt": records[r].prompt_text,
             "reference": records[r].reference, "scorer": scorer.names[r], "prompt_tokens": len(records[r].prompt_ids)}
            for r in requests
        ],
        vocabulary=texts,
        special=special,
        answers=list(walks.answers),
        columns=columns,
        top_k=int(trace.column("positions", "top_ids").shape[1]) if trace.positions.num_rows else 0,
        drop_leading=vocabulary.drop_leading,
    )  # fmt: skip


def _columns(
    trace: Trace, results: Sequence[Result], walks: _Walks, lean: bool
) -> tuple[Columns, npt.NDArray[np.int32]]:
    """Return the columns of steps, positions and walks, and the token ids that they name."""
    steps = np.array(list(walks.steps), np.int64)
    first, behind = trace.pos_ptr[steps], trace.pos_ptr[steps + 1]
    sizes = (behind - first).astype(np.int64)
    rows = np.repeat(first - np.concatenate([[0], np.cumsum(sizes)[:-1]]), sizes) + np.arange(sizes.sum())
    draft, choice, top = (trace.column("positions", name)[rows] for name in ("draft_id", "argmax_id", "top_ids"))
    logits = trace.column("positions", "top_logits")[rows].astype(np.float64)
    best = logits[:, 0] if logits.shape[1] else np.zeros(len(rows))
    share = np.exp(logits - trace.column("positions", "logsumexp")[rows].astype(np.float64)[:, None])
    shown = share[:, 1:] >= LEAST
    if lean:
        shown &= (draft != choice)[:, None]
    words, numbered = _numbering([draft, choice, top[:, 1:][shown]])
    below = np.rint((best[:, None] - logits) * GAP_UNIT)
    gaps = np.clip(np.diff(below, axis=1), 0, 255).astype(np.uint8)
    arrays: dict[str, npt.NDArray[Any]] = {
        "s_id": trace.column("steps", "step_id")[steps].astype(np.uint32),
        "s_wave": trace.column("steps", "wave")[steps].astype(np.uint16),
        "s_k": (sizes - 1).astype(np.uint16),
        "p_draft": numbered(draft),
        "p_choice": numbered(choice),
        "p_regret": (best - trace.column("positions", "draft_logit")[rows].astype(np.float64)).astype(np.float32),
        "p_top": np.rint(share[:, :1].max(axis=1, initial=0.0).clip(0.0, 1.0) * 65535).astype(np.uint16),
        "t_id": np.where(shown, numbered(top[:, 1:]), 0).T.ravel(),  # by rank: what is alike compresses well
        "t_gap": np.where(shown, gaps, 0).T.ravel(),
    }
    for number, result in enumerate(results):
        _, graph = result.whole
        scores = np.full(trace.positions.num_rows, np.nan, np.float32)
        owner = np.repeat(np.arange(graph.num_steps), np.diff(graph.mm_ptr))
        scores[trace.pos_ptr[owner] + graph.mm_pos] = graph.mm_score
        arrays[f"score{number}"] = scores[rows]
    kinds = {"w_step": np.uint32, "w_acc": np.uint16, "w_com": np.uint16, "w_end": np.uint8, "w_spent": np.float64}
    arrays |= {name: np.array(values, kinds[name]) for name, values in walks.parts.items()}
    arrays["w_ptr"] = np.array(walks.ptr, np.uint32)
    arrays["w_right"] = np.array(walks.right, np.uint8)
    arrays["w_answer"] = np.array(walks.answer, np.int32)
    return Columns(arrays), words


def _numbering(
    parts: Sequence[npt.NDArray[np.integer]],
) -> tuple[npt.NDArray[np.int32], Callable[[npt.NDArray[np.integer]], npt.NDArray[Any]]]:
    """Return the token ids of some columns, the most frequent first, and what turns ids into rows of that list."""
    ids, counts = np.unique(np.concatenate([column.ravel() for column in parts]), return_counts=True)
    counts, ids = counts[ids >= 0], ids[ids >= 0]
    words = ids[np.argsort(-counts, kind="stable")].astype(np.int32)
    row_of = np.zeros(int(words.max(initial=0)) + 2, np.uint16 if len(words) < 1 << 16 else np.uint32)
    row_of[words] = np.arange(len(words))
    last = len(row_of) - 1
    return words, lambda tokens: row_of[np.where((tokens < 0) | (tokens > last), last, tokens)]


def _texts(vocabulary: Vocabulary, words: npt.NDArray[np.int32]) -> tuple[list[Any], list[int]]:
    """Return the text of each token (its bytes as numbers where they are no whole characters), and the special ones."""
    rows = {int(token): row for row, token in enumerate(vocabulary.ids)}
    texts: list[Any] = []
    special: list[int] = []
    for number, token in enumerate(words.tolist()):
        row = rows.get(token)
        if row is None:
            texts.append(f"[{token}]")
            continue
        try:
            texts.append(vocabulary.pieces[row].decode("utf-8"))
        except UnicodeDecodeError:
            texts.append(list(vocabulary.pieces[row]))
        if vocabulary.special[row]:
            special.append(number)
    return texts, special
