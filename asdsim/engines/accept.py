"""The rule over a batch of draft blocks, in torch, as an engine verifies them.

Blocks may differ in length, and each request has its own B, g, M and ledger. Nothing here waits for the device: no
value comes to the host, and there is no loop over requests. Sums run over positions from left to right in float64, in
the order of :mod:`asdsim.rules.asd`, so decisions and ledgers equal the scalar rule to the bit, on CPU and CUDA.

From logits to a decision::

    blocks = lay_blocks(widths, longest)                     # ragged rows -> grid (N, K)
    rows = read_rows(logits, draft_ids)                      # argmax, largest and draft logit of each row
    mismatch, score, charge = score_blocks(DEFAULT, rows, blocks)
    stop = reach(blocks, rows.draft_ids, remaining, stop_ids)
    decision = accept_blocks(mismatch, score, charge, stop, settings, Reading("paper"))
    lift(logits, rows, blocks, decision)                   # the engine's own greedy kernel now accepts the same

Other rules score a mismatch through exponentials, which torch may round differently from :mod:`math`: their decisions
are equal unless a score lies within rounding of the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..errors import UsageError
from ..records import FORBIDDEN_LOGIT
from ..rules.asd import ACCEPT, BUDGET, CAP, FLOAT32_LEDGER, GATE, Reading
from ..rules.scoring import Layout
from ..rules.spec import Value


class Blocks(NamedTuple):
    """Where the rows of each block lie.

    Attributes
    ----------
    widths : int64 (N,)
        K of each block.
    inside : bool (N, K)
        Whether block n has a position i.
    rows : int64 (N, K)
        Row of the flat arrays at position i; any row outside the block.
    """

    widths: torch.Tensor
    inside: torch.Tensor
    rows: torch.Tensor

    def grid(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a flat array (T, ..) as (N, K, ..); arbitrary values outside the blocks."""
        return flat[self.rows]


class Rows(NamedTuple):
    """What the target says of each draft token; the last four only where a rule reads them.

    Attributes
    ----------
    draft_ids, argmax_ids : int64 (T,)
    best, drafted : float64 (T,)
        Largest logit of the row, and the logit of the draft token; -inf is held as ``FORBIDDEN_LOGIT``.
    logsumexp, entropy : float64 (T,), optional
        In nats; computed in float32 as a trace holds them.
    rank : int64 (T,), optional
        Rank of the draft token by (-logit, id).
    top : float64 (T, 3), optional
        Largest logits, falling.
    """

    draft_ids: torch.Tensor
    argmax_ids: torch.Tensor
    best: torch.Tensor
    drafted: torch.Tensor
    logsumexp: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    rank: torch.Tensor | None = None
    top: torch.Tensor | None = None

    @property
    def unusable(self) -> torch.Tensor:
        """bool (T,): the row holds NaN or +inf, or nothing but -inf."""
        return ~(torch.isfinite(self.best) & (self.best > FORBIDDEN_LOGIT))


class Settings(NamedTuple):
    """Setting and ledger of each request, float64 (N,) each: s, B, g, M."""

    spent: torch.Tensor
    budget: torch.Tensor
    gate: torch.Tensor
    cap: torch.Tensor


class Decision(NamedTuple):
    """What the rule says of each block.

    Attributes
    ----------
    accepted : int64 (N,)
        Draft tokens to commit.
    charge : float64 (N,)
        C, to be added to the ledger.
    relaxed : int64 (N,)
        N, mismatches among them.
    verdict : int64 (N,)
        What ended the block, see :mod:`asdsim.rules.asd`.
    spent : float64 (N,)
        Ledger after the block.
    """

    accepted: torch.Tensor
    charge: torch.Tensor
    relaxed: torch.Tensor
    verdict: torch.Tensor
    spent: torch.Tensor


def lay_blocks(widths: torch.Tensor, longest: int, gap: int = 0) -> Blocks:
    """Lay out blocks that follow each other in flat arrays.

    Parameters
    ----------
    widths : int (N,)
        K of each block; 0 allowed.
    longest : int
        Largest K, known on the host.
    gap : int
        Rows between one block and the next: 1 where bonus rows stand there.
    """
    widths = widths.long()
    position = torch.arange(longest, device=widths.device)
    start = widths.cumsum(0) - widths + gap * torch.arange(len(widths), device=widths.device)
    inside = position < widths[:, None]
    return Blocks(widths, inside, torch.where(inside, start[:, None] + position, 0))


def read_rows(logits: torch.Tensor, draft_ids: torch.Tensor, layout: Layout | None = None) -> Rows:
    """Read off what a rule needs of each draft position.

    Parameters
    ----------
    logits : float (T, V)
        Target rows of the draft positions, without bonus rows.
    draft_ids : int (T,)
    layout : Layout, optional
        Whose rule decides; by default ASD on regrets in logits.
    """
    draft_ids = draft_ids.long()
    best, argmax_ids = logits.max(dim=-1)  # the first maximum of a row
    drafted = logits.gather(1, draft_ids[:, None])[:, 0]
    low = FORBIDDEN_LOGIT
    rows = Rows(draft_ids, argmax_ids, best.float().clamp(min=low).double(), drafted.float().clamp(min=low).double())
    needs = set() if layout is None else needs_of(layout)
    more: dict[str, torch.Tensor] = {}
    if needs & {"logsumexp", "entropy"}:
        more["logsumexp"], more["entropy"] = spread(logits)
    if "rank" in needs:
        more["rank"] = ranks(logits, draft_ids)
    if "top" in needs:
        more["top"] = logits.topk(min(3, logits.shape[1]), dim=-1).values.double()
    return rows._replace(**more)


def spread(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (logsumexp, entropy) of each row in nats, computed in float32, as float64."""
    rows = logits.float()
    best = rows.amax(dim=-1, keepdim=True)
    centred = (rows - best).clamp_(min=-1e3)  # exp is 0 there anyway, and 0 * -inf is kept out of the entropy
    weights = centred.exp()
    total = weights.sum(dim=-1)
    log_total = total.log()
    entropy = log_total - torch.linalg.vecdot(weights, centred) / total
    return (best[:, 0] + log_total).double(), entropy.clamp(min=0).double()


def ranks(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the rank of ``ids[t]`` in row t: 0 for the largest logit, ties ranked by id."""
    own = logits.gather(1, ids[:, None])
    earlier = torch.arange(logits.shape[1], device=logits.device) < ids[:, None]
    return (logits > own).sum(-1) + ((logits == own) & earlier).sum(-1)


# --- scores -------------------------------------------------------------------------------------------------------


def suffix_values(scheme: str, blocks: Blocks, run: torch.Tensor | None) -> torch.Tensor | float:
    """Return q_i under a value scheme, as :func:`asdsim.rules.scoring.suffix_values`."""
    width = blocks.widths[:, None].double()
    left = width - torch.arange(blocks.inside.shape[1], device=width.device)
    if scheme == "suffix":
        return left
    if scheme == "normalised":
        return left / width
    if scheme == "reciprocal":
        return left * (1.0 / width)
    if scheme == "unit":
        return 1.0
    assert run is not None
    return 1.0 + run


def run_lengths(matches: torch.Tensor) -> torch.Tensor:
    """Return int64 (N, K): how many positions right behind each match."""
    run = torch.zeros(matches.shape, dtype=torch.int64, device=matches.device)
    for i in range(matches.shape[1] - 2, -1, -1):
        run[:, i] = torch.where(matches[:, i + 1], run[:, i + 1] + 1, 0)
    return run


def score_blocks(layout: Layout, rows: Rows, blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lay out the mismatches of every block.

    Returns
    -------
    mismatch : bool (N, K)
    score, charge : float64 (N, K)
        NaN scores, which no limit lets pass, where the target rules a token out; of no meaning at matches.
    """
    best, drafted = blocks.grid(rows.best), blocks.grid(rows.drafted)
    regret = best - drafted
    regret = torch.where(drafted <= FORBIDDEN_LOGIT, math.inf, regret)
    differs = blocks.grid(rows.draft_ids != rows.argmax_ids)
    mismatch = blocks.inside & (differs | blocks.grid(rows.unusable))  # rows that are no numbers match nothing
    if layout.mismatch == "regret":
        mismatch = mismatch & ~(regret <= 0.0)
    run = None
    if layout.value == "reuse" or layout.rule == "fly":
        run = run_lengths(blocks.inside & ~differs)
    charge = regret
    if layout.rule == "asd":
        if layout.regret == "probability":
            assert rows.logsumexp is not None
            total = blocks.grid(rows.logsumexp)
            charge = (best - total).exp() - (drafted - total).exp()
        score = charge / suffix_values(layout.value, blocks, run)
    else:
        params = dict(layout.params)
        score = scorer_of(layout)(Grids(blocks, rows, regret, run), params).expand(regret.shape)
    score = torch.where(torch.isinf(regret), math.nan, score)
    return mismatch, score, torch.where(torch.isinf(regret), math.inf, charge)


class Grids(NamedTuple):
    """What the score of another rule is made from; every property is (N, K)."""

    blocks: Blocks
    rows: Rows
    regret: torch.Tensor
    run: torch.Tensor | None

    def of(self, name: str) -> torch.Tensor:
        """Return a column as a grid."""
        return self.blocks.grid(getattr(self.rows, name))

    @property
    def p(self) -> torch.Tensor:
        """Probability of the draft token."""
        return (self.of("drafted") - self.of("logsumexp")).exp()

    @property
    def p1(self) -> torch.Tensor:
        """Largest probability of the row."""
        return (self.of("best") - self.of("logsumexp")).exp()


Params = dict[str, Value]


def _never(seen: Grids, params: Params) -> torch.Tensor:
    return torch.full_like(seen.regret, math.nan)


def _mars(seen: Grids, params: Params) -> torch.Tensor:
    best = seen.of("best")  # z(2)/z(1) says nothing where z(1) <= 0: never accepted there
    return torch.where((seen.of("rank") == 1) & (best > 0.0), -(seen.of("drafted") / best), math.nan)


def _medusa(seen: Grids, params: Params) -> torch.Tensor:
    p, alpha = seen.p, float(params["alpha"])
    typical = p * seen.of("entropy").exp()
    if alpha == 0.0:
        return -torch.maximum(p, typical * typical)
    return torch.where(typical > alpha, -math.inf, -p)


def _trtllm(seen: Grids, params: Params) -> torch.Tensor:
    return torch.where(seen.of("rank") < int(params["N"]), seen.p1 - seen.p, math.nan)


def _vllm(seen: Grids, params: Params) -> torch.Tensor:
    return torch.where(seen.of("rank") < int(params["k"]), -(-seen.regret).exp(), math.nan)


def _fly(seen: Grids, params: Params) -> torch.Tensor:
    assert seen.run is not None
    top = seen.of("top")
    weights = (top - top[..., :1]).exp()
    share = weights / weights.sum(-1, keepdim=True)
    entropy = -torch.where(share > 0.0, share * share.log(), 0.0).sum(-1)
    window = int(params["W"])
    least = torch.full_like(seen.blocks.widths, window) if window else (seen.blocks.widths - 1).clamp(max=6)
    return torch.where(seen.run >= least[:, None], -entropy, math.nan)


def _entropy(seen: Grids, params: Params) -> torch.Tensor:
    return torch.where(seen.of("rank") < int(params["m"]), -seen.of("entropy"), math.nan)


SCORES: dict[str, tuple[tuple[str, ...], Callable[[Grids, Params], torch.Tensor]]] = {
    "strict": ((), _never),
    "mars": (("rank",), _mars),
    "medusa": (("logsumexp", "entropy"), _medusa),
    "trtllm": (("logsumexp", "rank"), _trtllm),
    "vllm": (("rank",), _vllm),
    "fly": (("top",), _fly),
    "additive": (("logsumexp",), lambda seen, params: seen.p1 - seen.p),
    "multiplicative": ((), lambda seen, params: -(-seen.regret).exp()),
    "topm": (("rank",), lambda seen, params: seen.of("rank").double()),
    "entropy": (("rank", "entropy"), _entropy),
}
"""Rules that read nothing but the target's row and the block: columns that each needs, and its score."""


def scorer_of(layout: Layout) -> Callable[[Grids, Params], torch.Tensor]:
    """Return the score of another rule than ASD.

    Raises
    ------
    UsageError
        If the rule reads more than the target's row, or follows a thinking phase.
    """
    if layout.rule not in SCORES:
        raise UsageError(
            f"rule {layout.rule} reads more than the target's logits and cannot run in an engine",
            fix=f"use asd or one of {', '.join(SCORES)}",
        )
    if float(dict(layout.params).get("begin", -1)) >= 0:
        raise UsageError(
            f"rule {layout.rule}: a thinking phase is not followed in an engine", fix="leave begin and end at -1"
        )
    return SCORES[layout.rule][1]


def needs_of(layout: Layout) -> set[str]:
    """Return the columns of :class:`Rows` that a layout reads besides argmax and the two logits."""
    if layout.rule == "asd":
        return {"logsumexp"} if layout.regret == "probability" else set()
    scorer_of(layout)
    return set(SCORES[layout.rule][0])


# --- decisions ----------------------------------------------------------------------------------------------------


def reach(
    blocks: Blocks, draft_ids: torch.Tensor, remaining: torch.Tensor, stop_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """Return int64 (N,): draft tokens that can be committed at all, up to the first stop id and the token limit.

    Parameters
    ----------
    blocks : Blocks
    draft_ids : int (T,)
    remaining : int (N,)
        Tokens that each request may still generate.
    stop_ids : int (N, S) or None
        Ids that end each request; -1 fills a row.
    """
    longest = torch.minimum(blocks.widths, remaining.long().clamp(min=0))
    if stop_ids is None or not stop_ids.shape[1] or not blocks.inside.shape[1]:
        return longest
    ends = (blocks.grid(draft_ids.long())[:, :, None] == stop_ids[:, None, :].long()).any(-1) & blocks.inside
    first = torch.where(ends, torch.arange(1, ends.shape[1] + 1, device=ends.device), ends.shape[1] + 1).amin(1)
    return torch.minimum(longest, first)


def _refusals(
    semantics: str, score: torch.Tensor, before: torch.Tensor, charge: torch.Tensor, settings: Settings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where gate and budget refuse, as the judges of :mod:`asdsim.rules.asd`; a NaN never passes."""
    spent, budget, gate = settings.spent[:, None], settings.budget[:, None], settings.gate[:, None]
    shut = ~(score <= gate)
    if semantics == "core":
        return shut | (gate == 0.0), (budget == 0.0) | ~(charge <= (budget - spent) + 1e-9)
    if semantics == "dspark":
        left = budget - spent
        return shut, ~((before < left) & (charge <= left))
    over = ~(spent + charge <= budget)
    return shut, over if semantics == "lightllm" else over | (budget == 0.0)


def accept_blocks(
    mismatch: torch.Tensor,
    score: torch.Tensor,
    charge: torch.Tensor,
    stop: torch.Tensor,
    settings: Settings,
    reading: Reading,
) -> Decision:
    """Decide every block, equations (5) to (10) of :mod:`asdsim.rules.asd`.

    Parameters
    ----------
    mismatch, score, charge : (N, K)
        Of :func:`score_blocks`.
    stop : int64 (N,)
        Draft tokens that can be committed at all, see :func:`reach`.
    settings : Settings
    reading : Reading
    """
    seen = settings
    if reading.ledger == "block":  # which starts anew in every block
        seen = settings._replace(spent=torch.zeros_like(settings.spent))
    number, longest = mismatch.shape
    mismatch = mismatch & (torch.arange(longest, device=stop.device) < stop[:, None])
    each = torch.where(mismatch, charge, 0.0)
    total = torch.zeros((number, longest + 1), dtype=torch.float64, device=stop.device)
    for i in range(longest):  # a scan would add in another order
        torch.add(total[:, i], each[:, i], out=total[:, i + 1])
    count = mismatch.cumsum(1)
    shut, over = _refusals(reading.semantics, score, total[:, :-1], total[:, 1:], seen)
    verdicts = torch.where(
        shut, GATE, torch.where(over, BUDGET, torch.where(count > settings.cap[:, None], CAP, ACCEPT))
    )
    verdicts = torch.where(mismatch, verdicts, ACCEPT)
    # One more column: a block in which nothing is refused ends at its stop.
    ended = torch.nn.functional.pad(verdicts != ACCEPT, (0, 1), value=True)
    first = ended.int().argmax(1)
    verdict = torch.nn.functional.pad(verdicts, (0, 1), value=ACCEPT).gather(1, first[:, None])[:, 0]
    accepted = torch.where(verdict == ACCEPT, stop, first)
    spend = total.gather(1, first[:, None])[:, 0]
    relaxed = torch.nn.functional.pad(count, (1, 0)).gather(1, first[:, None])[:, 0]
    spent = settings.spent + spend
    if reading.semantics in FLOAT32_LEDGER:
        spent = spent.float().double()
    return Decision(accepted, spend, relaxed, verdict, spent)


def lift(logits: torch.Tensor, rows: Rows, blocks: Blocks, decision: Decision) -> None:
    """Raise every accepted draft token above its row, in place, so that greedy matching accepts it too.

    Rows of refused mismatches and of matches stay as they are.

    Parameters
    ----------
    logits : float (T, V)
    rows, blocks, decision
        What was decided about these logits.
    """
    inside = torch.arange(blocks.inside.shape[1], device=logits.device) < decision.accepted[:, None]
    wanted = inside & blocks.inside & blocks.grid(rows.draft_ids != rows.argmax_ids)
    # Positions outside a block point at row 0 and add nothing to it.
    raised = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
    raised.index_add_(0, blocks.rows.flatten(), wanted.flatten().int())
    old = logits.gather(1, rows.draft_ids[:, None])
    height = torch.finfo(logits.dtype).max / 2
    logits.scatter_(1, rows.draft_ids[:, None], torch.where(raised[:, None] > 0, height, old).to(logits.dtype))
