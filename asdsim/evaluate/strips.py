"""One walk, token by token: what was drafted, what was kept, what each block paid, and what ended it."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..files import shown
from ..records import StepTables
from ..rules.asd import BUDGET, CAP, GATE
from ..rules.settings import Policy
from ..trace.graph import END, MISSING, Graph
from ..trace.tokens import first_difference
from ..walk.path import Visit, visits

if TYPE_CHECKING:
    import polars as pl

EXACT, RELAXED, REJECTED, REPLACEMENT, BONUS, DISCARDED, PAST_END = (
    "exact", "relaxed", "rejected", "replacement", "bonus", "discarded", "past_end",
)  # fmt: skip
KINDS = {
    EXACT: "draft token accepted: the target's own choice",
    RELAXED: "draft token accepted although the target chose another",
    REJECTED: "draft token refused; verification of the block ends here",
    REPLACEMENT: "the target's choice, committed in place of the refused token",
    BONUS: "the target's choice behind a block that was accepted whole",
    DISCARDED: "verified, but behind the refused token",
    PAST_END: "behind the end of the output: EOS or the token limit",
}
"""What can become of a token of a step."""

COMMITTED = (EXACT, RELAXED, REPLACEMENT, BONUS)
REASONS = {GATE: "gate", BUDGET: "budget", CAP: "cap"}


@dataclass(frozen=True)
class Token:
    """One token of a step.

    Attributes
    ----------
    kind : str
        A key of :data:`KINDS`.
    position : int
        Place in the block, from 0.
    id, choice : int
        The token, and the target's choice at this position.
    row : int
        Row of the trace's ``positions`` that scored it.
    regret, score : float or None
        r in logits, and what the rule compares with its gate (r/q for ASD); None where the draft is the target's
        choice.
    charge : float or None
        What accepting it adds to the ledger.
    spent_before, spent_after : float or None
        Ledger before and after a relaxed token.
    """

    kind: str
    position: int
    id: int
    choice: int
    row: int
    regret: float | None = None
    score: float | None = None
    charge: float | None = None
    spent_before: float | None = None
    spent_after: float | None = None


@dataclass(frozen=True)
class Strip:
    """One step of a walk.

    Attributes
    ----------
    step, step_id, wave : int
        Row of the trace's ``steps``; its id; 0 for a step that decoding met, n >= 1 for one that ``cover`` added.
    start, accepted, committed : int
        Tokens generated before it; draft tokens accepted; tokens committed.
    spent, spent_after : float
        Ledger before and after.
    ended : str
        ``gate``, ``budget`` or ``cap`` where that refused a token (``mismatch`` under strict matching, the rule's name
        under another rule than ASD), ``end`` where EOS or the token limit lies in the block, ``block`` where all drafts
        were accepted and the bonus token follows.
    over : float or None
        By how much the refused token broke it: r/q above g, ledger above B, relaxed tokens above M; its regret under
        strict matching.
    final : str
        ``eos`` or ``limit`` on the last step of a whole output, ``missing`` where the walk leaves the trace here.
    estimated : bool
        The step stands behind one that leaves the trace: a guess of the off-trace mode, nothing that was decoded.
    tokens : list of Token
    """

    step: int
    step_id: int
    wave: int
    start: int
    accepted: int
    committed: int
    spent: float
    spent_after: float
    ended: str
    over: float | None
    final: str
    estimated: bool
    tokens: list[Token]


@dataclass(frozen=True)
class Walk:
    """One request under one setting.

    Attributes
    ----------
    request : int
        Row of the request.
    request_id : str
    policy : Policy
    exact : bool
        Whether every step was captured.
    strips : list of Strip
    """

    request: int
    request_id: str
    policy: Policy
    exact: bool
    strips: list[Strip]

    @cached_property
    def tokens(self) -> list[int]:
        """The output; as far as it is known where the walk is not exact."""
        return [token.id for strip in self.strips for token in strip.tokens if token.kind in COMMITTED]

    @property
    def spent(self) -> float:
        """The ledger at the end."""
        return self.strips[-1].spent_after if self.strips else 0.0

    @property
    def relaxed(self) -> list[tuple[Strip, Token]]:
        """The relaxed tokens, each with its step."""
        return [(strip, token) for strip in self.strips for token in strip.tokens if token.kind == RELAXED]


def walk_of(trace: StepTables, graph: Graph, policy: Policy, request: int, off_trace: str = "stop") -> Walk:
    """Walk one request under one setting and say what became of each token.

    Parameters
    ----------
    trace, graph
        The graph laid out under ``policy.layout``.
    policy : Policy
    request : int
        Row of the request.
    off_trace : {"stop", "aligned", "recorded"}
        See :func:`asdsim.walk.path.visits`.
    """
    path = visits(graph, policy, request, off_trace)
    strips: list[Strip] = []
    for visit in path.visits:
        estimated = bool(strips) and (strips[-1].estimated or strips[-1].final == "missing")
        strips.append(_strip(trace, graph, policy, visit, estimated))
    return Walk(request, graph.request_ids[request], policy, path.exact, strips)


def is_strict(policy: Policy) -> bool:
    """Tell whether a setting accepts no mismatch, whatever its gate."""
    return (policy.budget == 0.0 or policy.cap == 0.0) and not policy.semantics.startswith("lightllm")


def name_of(policy: Policy) -> str:
    """Return how a setting is called: ``strict``, ``B=8 g=0.25 M=2``, or a rule with its parameters."""
    return "strict" if is_strict(policy) else str(policy)


def _strip(trace: StepTables, graph: Graph, policy: Policy, visit: Visit, estimated: bool) -> Strip:
    lo, hi = int(graph.mm_ptr[visit.step]), int(graph.mm_ptr[visit.step + 1])
    refused = lo + visit.outcome if visit.verdict in REASONS else -1
    tokens = _tokens(trace, graph, visit, lo, hi)
    following = int(graph.edge_next[visit.edge])
    request = int(graph.step_request[visit.step])
    final = ""
    if visit.tokens_before + visit.tokens >= int(graph.limit[request]):
        final = "limit"
    elif following == END:
        final = "eos"
    elif following == MISSING:
        final = "missing"
    ended, over = "block", None
    if refused >= 0:
        ended, over = _reason(graph, policy, visit, refused)
    elif visit.tokens == visit.accepted:  # no bonus token behind the block
        ended = "end"
    return Strip(
        step=visit.step,
        step_id=int(trace.column("steps", "step_id")[visit.step]),
        wave=int(trace.column("steps", "wave")[visit.step]),
        start=visit.tokens_before,
        accepted=visit.accepted,
        committed=visit.tokens,
        spent=visit.spent,
        spent_after=visit.spent_after,
        ended=ended,
        over=over,
        final=final,
        estimated=estimated,
        tokens=tokens,
    )


def _reason(graph: Graph, policy: Policy, visit: Visit, refused: int) -> tuple[str, float]:
    """Return what refused a mismatch, and by how much."""
    if is_strict(policy):
        return "mismatch", float(graph.mm_regret[refused])
    if visit.verdict == GATE:
        name = "gate" if policy.layout.rule == "asd" else policy.layout.rule
        return name, float(graph.mm_score[refused]) - policy.gate
    if visit.verdict == BUDGET:
        before = 0.0 if policy.ledger == "block" else visit.spent
        return "budget", before + visit.charge + float(graph.mm_charge[refused]) - policy.budget
    return "cap", visit.relaxed + 1 - policy.cap


def _tokens(trace: StepTables, graph: Graph, visit: Visit, lo: int, hi: int) -> list[Token]:
    first, behind = int(trace.pos_ptr[visit.step]), int(trace.pos_ptr[visit.step + 1])
    draft = trace.column("positions", "draft_id")[first:behind]
    choice = trace.column("positions", "argmax_id")[first:behind]
    mismatch = {int(graph.mm_pos[j]): j for j in range(lo, hi)}
    refusal = visit.accepted if visit.verdict in REASONS else -1
    tokens: list[Token] = []
    total = 0.0  # of the block, which enters the ledger as one sum
    for i in range(behind - first - 1):
        known: dict[str, Any] = {"position": i, "choice": int(choice[i]), "row": first + i}
        kind = EXACT
        j = mismatch.get(i)
        if j is not None:
            known.update(regret=float(graph.mm_regret[j]), score=float(graph.mm_score[j]))
            known["charge"] = float(graph.mm_charge[j])
        if i < visit.accepted:
            if j is not None:
                known["spent_before"] = visit.spent + total
                total += known["charge"]
                known["spent_after"] = visit.spent + total
                kind = RELAXED
        elif i == refusal:
            kind = REJECTED
        else:
            kind = DISCARDED if refusal >= 0 or i >= int(graph.drafted[visit.step]) else PAST_END
        tokens.append(Token(kind, id=int(draft[i]), **known))
        if kind == REJECTED and visit.tokens > visit.accepted:
            tokens.append(Token(REPLACEMENT, i, int(choice[i]), int(choice[i]), first + i))
    if refusal < 0 and visit.tokens > visit.accepted:
        i = visit.accepted
        tokens.insert(i, Token(BONUS, i, int(choice[i]), int(choice[i]), first + i))
    return tokens


def parted_at(walk: Walk, other: Walk) -> int:
    """Return the first generated token at which two walks part, -1 where their outputs are equal.

    Outputs that are not known to their end part only where both are known.
    """
    place = first_difference(walk.tokens, other.tokens)
    if place == min(len(walk.tokens), len(other.tokens)) and not (walk.exact and other.exact):
        return -1
    return place


def relaxed_frame(walks: Sequence[Walk], text: Callable[[int], str] | None = None) -> pl.DataFrame:
    """Return one row for each relaxed token.

    Parameters
    ----------
    walks : sequence of Walk
    text : callable, optional
        What a token id stands for; without it there are ids only.

    Returns
    -------
    polars.DataFrame
        ``request_id``, ``step`` (step_id), ``position`` (generated tokens before it), ``token``, ``choice`` (the
        target's own), their ``token_text`` and ``choice_text``, ``regret`` (logits), ``gate_share`` (what the rule
        compares with its gate, over the gate: at most 1), ``spent_before`` and ``spent_after`` (ledger), ``estimated``.
    """
    import polars as pl

    schema: dict[str, Any] = {
        "request_id": pl.String, "step": pl.Int64, "position": pl.Int64, "token": pl.Int32, "choice": pl.Int32,
        "token_text": pl.String, "choice_text": pl.String, "regret": pl.Float64, "gate_share": pl.Float64,
        "spent_before": pl.Float64, "spent_after": pl.Float64, "estimated": pl.Boolean,
    }  # fmt: skip
    rows = []
    for walk in walks:
        gate = walk.policy.gate
        for strip, token in walk.relaxed:
            assert token.score is not None
            names = (token.id, token.choice)
            rows.append(
                (
                    walk.request_id, strip.step_id, strip.start + token.position, *names,
                    *(map(text, names) if text is not None else (None, None)), token.regret,
                    token.score / gate if gate > 0.0 else 0.0, token.spent_before, token.spent_after, strip.estimated,
                )
            )  # fmt: skip
    return pl.DataFrame(rows, schema=schema, orient="row")


def request_row(request_ids: Sequence[str], request: int | str) -> int:
    """Return the row of a request that was given by row or by id.

    Raises
    ------
    UsageError
        If there is no such request.
    """
    if isinstance(request, str):
        if request in request_ids:
            return list(request_ids).index(request)
        if not request.isdigit():
            from ..errors import unknown_name

            raise unknown_name("request", request, list(request_ids)[:50])
        request = int(request)
    if not 0 <= request < len(request_ids):
        raise UsageError(f"no request {request}", fix=f"rows go from 0 to {len(request_ids) - 1}")
    return request


STYLES = {
    EXACT: "", RELAXED: "background:#ffe7ad;color:#5c3800;font-weight:bold", REJECTED: "color:#a3200f;"
    "text-decoration:line-through", REPLACEMENT: "color:#00654a", BONUS: "color:#00568f",
    DISCARDED: "color:#6a6a6a;font-style:italic", PAST_END: "color:#6a6a6a;font-style:italic",
}  # fmt: skip


def html_of(walk: Walk, text: Callable[[int], str], most: int = 6) -> str:
    """Return the first steps of a walk as HTML for a notebook; a relaxed token says what the target would have chosen.

    Parameters
    ----------
    walk : Walk
    text : callable
        What a token id stands for.
    most : int
        Steps shown.
    """

    def safe(token: int) -> str:
        return html.escape(shown(text(token)))

    rows = []
    for strip in walk.strips[:most]:
        cells = []
        for token in strip.tokens:
            inner = safe(token.id) + (f" [{safe(token.choice)}]" if token.kind == RELAXED else "")
            style = f"white-space:pre;{STYLES[token.kind]}"
            cells.append(f'<span style="{style}" title="{token.kind.replace("_", " ")}">{inner}</span>')
        ledger = f"{strip.spent:.2f} &rarr; {strip.spent_after:.2f}"
        rows.append(
            f"<tr><td>{strip.step_id}</td><td>{ledger}</td><td style='text-align:left'>{'|'.join(cells)}</td></tr>"
        )
    title = html.escape(
        f"{shown(walk.request_id)}, {name_of(walk.policy)}: first {len(rows)} of {len(walk.strips)} steps"
    )
    head = (
        "<tr><th>step</th><th>ledger</th><th style='text-align:left'>tokens, relaxed ones [target's choice]</th></tr>"
    )
    return f"<table><caption>{title}</caption>{head}{''.join(rows)}</table>"
