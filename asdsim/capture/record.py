"""From logit rows to the columns of a trace.

Everything is computed in float32 where the logits lie (CPU or GPU), in a few passes over the vocabulary, and comes over
as small arrays. Ties are settled by token id everywhere; a library's order among equal logits is never relied upon.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..engines.protocol import Logits, Proposal
from ..errors import CaptureError, UsageError, unknown_name
from ..records import FORBIDDEN_LOGIT, StepRecord
from ..trace.schema import DIVERGENCES, MIN_TOP_K


@dataclass(frozen=True)
class Scan:
    """What the rule needs of one verified block.

    Attributes
    ----------
    logits : float32 tensor (K + 1, V)
        -inf replaced by :data:`asdsim.records.FORBIDDEN_LOGIT`.
    argmax_ids : int32 (K + 1,)
        y_i, lowest id on a tie.
    draft_logits : float32 (K,)
    regrets : float64 (K,)
        r_i = float64(max logit) - float64(draft logit), in logits.
    """

    logits: torch.Tensor
    argmax_ids: npt.NDArray[np.int32]
    draft_logits: npt.NDArray[np.float32]
    regrets: npt.NDArray[np.float64]

    @property
    def forbidden(self) -> int:
        """First draft position whose token the target rules out (logit -inf), or K."""
        hits = np.flatnonzero(self.draft_logits == FORBIDDEN_LOGIT)
        return int(hits[0]) if hits.size else int(self.draft_logits.shape[0])


def check_ids(ids: Sequence[int], vocab_size: int, where: str) -> None:
    """Refuse a token id that the target does not have, before anything gathers with it."""
    for position, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise CaptureError(
                f"draft token {token} is outside the target's vocabulary of {vocab_size}",
                where=f"{where}, position {position}",
                fix="use a drafter with the target's tokenizer and vocabulary",
            )


def scan(logits: Logits, draft_ids: Sequence[int], where: str) -> Scan:
    """Check logits and read off argmax, draft logits and regrets.

    Parameters
    ----------
    logits : Logits (K + 1, V)
        Any float dtype; upcast to float32.
    draft_ids : sequence of int (K,)
    where : str
        Request and step, for errors.

    Raises
    ------
    CaptureError
        If the shape is wrong, or a row holds NaN or +inf, or nothing but -inf.
    """
    rows = torch.as_tensor(logits)
    width = len(draft_ids)
    if rows.ndim != 2 or rows.shape[0] != width + 1:
        raise CaptureError(f"expected {width + 1} logit rows, got shape {tuple(rows.shape)}", where=where)
    rows = rows.float().clamp(min=FORBIDDEN_LOGIT)  # NaN stays NaN
    best, argmax = rows.max(dim=-1)  # a row's first maximum; NaN where the row holds one
    draft = torch.as_tensor(list(draft_ids), dtype=torch.int64, device=rows.device)
    drafted = rows[:width].gather(1, draft[:, None])[:, 0]
    best_np = best.cpu().numpy()
    draft_logits = drafted.cpu().numpy()
    bad = np.flatnonzero(~(np.isfinite(best_np) & (best_np > FORBIDDEN_LOGIT)))
    if bad.size:
        value = best_np[bad[0]]
        kind = "NaN" if np.isnan(value) else "+inf" if value > 0 else "nothing but -inf"
        raise CaptureError(
            f"the target's logits hold {kind}",
            where=f"{where}, position {bad[0]}",
            fix="check the weights, or use a wider dtype (--dtype float32)",
        )
    regrets = best_np[:width].astype(np.float64) - draft_logits.astype(np.float64)
    return Scan(rows, argmax.cpu().numpy().astype(np.int32), draft_logits, regrets)


def top_k(rows: torch.Tensor, k: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Return ids and logits of the k largest entries of each row, ordered by (-logit, id).

    Among equal logits at the k-th place the lowest ids are chosen.
    """
    k = min(k, rows.shape[1])
    values, ids = torch.topk(rows, k, dim=-1)
    last = values[:, -1:]
    crowded = (rows >= last).sum(dim=-1).cpu().numpy() > k  # more candidates than places: the choice was arbitrary
    top_ids = ids.cpu().numpy()
    top_logits = values.cpu().numpy()
    for row in np.flatnonzero(crowded):
        candidates = torch.nonzero(rows[row] >= last[row])[:, 0]  # by id
        kept = torch.sort(rows[row][candidates], descending=True, stable=True)
        top_ids[row] = candidates[kept.indices[:k]].cpu().numpy()
        top_logits[row] = kept.values[:k].cpu().numpy()
    order = np.lexsort((top_ids, -top_logits), axis=-1)
    return (
        np.take_along_axis(top_ids, order, -1).astype(np.int32),
        np.take_along_axis(top_logits, order, -1).astype(np.float32),
    )


def ranks(rows: torch.Tensor, ids: npt.NDArray[np.int32], top_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Return the rank of ``ids[i]`` in row i: 0 for the largest logit, ties ranked by id."""
    found = top_ids[: len(ids)] == ids[:, None]
    result = np.where(found.any(axis=1), found.argmax(axis=1), -1).astype(np.int32)
    for i in np.flatnonzero(result < 0):
        row, token = rows[i], int(ids[i])
        ahead = (row > row[token]).sum() + (row[:token] == row[token]).sum()
        result[i] = int(ahead)
    return result


def spread(rows: torch.Tensor) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return (logsumexp, entropy) of each row, in nats."""
    best = rows.max(dim=-1, keepdim=True).values
    centred = (rows - best).clamp_(min=-1e3)  # exp is 0 there anyway, and 0 * -inf is kept out of the entropy
    weights = centred.exp()
    total = weights.sum(dim=-1)
    log_total = total.log()
    entropy = log_total - (weights.mul_(centred)).sum(dim=-1) / total  # H = log Z - E[z], both less the maximum
    return (best[:, 0] + log_total).cpu().numpy(), entropy.clamp(min=0).cpu().numpy()


def divergences(target: torch.Tensor, draft: torch.Tensor, names: Sequence[str]) -> dict[str, npt.NDArray[np.float32]]:
    """Return divergences between softmax(target) and softmax(draft), each float32 (K,).

    Parameters
    ----------
    target, draft : float32 tensor (K, V)
        Logits.
    names : sequence of str
        ``kl`` is KL(target || draft), ``reverse_kl`` KL(draft || target), ``js`` Jensen-Shannon, all in nats; ``tv`` is
        total variation, 0 to 1. ``kl`` and ``reverse_kl`` are infinite where one side rules out what the other allows.
    """
    log_p, log_q = _log_softmax(target), _log_softmax(draft)
    p, q = log_p.exp(), log_q.exp()
    out: dict[str, torch.Tensor] = {}
    for name in names:
        if name == "kl":
            out[name] = _relative(p, log_p, log_q)
        elif name == "reverse_kl":
            out[name] = _relative(q, log_q, log_p)
        elif name == "js":
            log_m = torch.logaddexp(log_p, log_q) - np.log(2.0)
            out[name] = (_relative(p, log_p, log_m) + _relative(q, log_q, log_m)) / 2
        else:
            out[name] = (p - q).abs().sum(-1) / 2
    return {name: value.clamp(min=0).cpu().numpy() for name, value in out.items()}


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.masked_fill(logits == FORBIDDEN_LOGIT, -torch.inf).log_softmax(-1)


def _relative(p: torch.Tensor, log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Return the sum of p log(p / q) over p > 0; infinite where q rules out what p allows."""
    return torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)


@dataclass(frozen=True)
class Recorder:
    """How much of a step is kept.

    Attributes
    ----------
    top_k : int
        Logits kept per row, at least :data:`asdsim.trace.schema.MIN_TOP_K`; fewer only where the vocabulary has fewer.
    divergences : tuple of str
        Among :data:`asdsim.trace.schema.DIVERGENCES`; needs a drafter with logits.
    """

    top_k: int = MIN_TOP_K
    divergences: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.top_k < MIN_TOP_K:
            raise UsageError(f"top-k {self.top_k} is too small", fix=f"keep at least {MIN_TOP_K} logits per row")
        for name in self.divergences:
            if name not in DIVERGENCES:
                raise unknown_name("divergence", name, list(DIVERGENCES))

    def step(
        self,
        seen: Scan,
        proposal: Proposal,
        *,
        step_id: int,
        parent_step_id: int,
        parent_accepted: int,
        start_pos: int,
        where: str,
        times_us: tuple[float, float, float] = (0.0, 0.0, 0.0),
        wave: int = 0,
    ) -> StepRecord:
        """Return the record of one verified block; ``times_us`` are draft, verify and select."""
        width = len(proposal.ids)
        rows = seen.logits
        draft_ids = np.array(proposal.ids, np.int32)
        top_ids, top_logits = top_k(rows, self.top_k)
        logsumexp, entropy = spread(rows)
        apart: dict[str, npt.NDArray[np.float32]] = {}
        if self.divergences:
            if proposal.logits is None:
                raise CaptureError("the drafter gives no distribution, so no divergence", where=where)
            drafted = torch.as_tensor(proposal.logits).to(rows.device).float().clamp(min=FORBIDDEN_LOGIT)
            apart = divergences(rows[:width], drafted, self.divergences)
        draft_us, verify_us, select_us = times_us
        return StepRecord(
            step_id=step_id,
            parent_step_id=parent_step_id,
            parent_accepted=parent_accepted,
            start_pos=start_pos,
            draft_ids=draft_ids,
            argmax_ids=seen.argmax_ids,
            draft_logits=seen.draft_logits,
            ranks=ranks(rows, draft_ids, top_ids),
            top_ids=top_ids,
            top_logits=top_logits,
            logsumexp=logsumexp,
            entropy=entropy,
            draft_logprobs=proposal.logprobs,
            divergences=apart,
            draft_us=draft_us,
            verify_us=verify_us,
            select_us=select_us,
            wave=wave,
        )
