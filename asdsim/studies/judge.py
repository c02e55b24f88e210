"""Compare the answers of a setting with those of strict matching, by a judge model.

The win rate counts a tie as half. The length-controlled one is what it would be if both answers were of one length, by
the logistic model of AlpacaEval 2 (Dubois et al. 2024) without its term for the difficulty of a prompt, which takes
many models to fit: P(win) = sigmoid(theta + phi tanh(d / sd(d))), d the difference in characters, at d = 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .. import stats
from ..errors import UsageError
from ..evaluate.judge import CHARACTERS_PER_TOKEN, MAX_TOKENS, Answers, Endpoint, Messages, question, verdict_of
from ..evaluate.quality import Evaluator
from ..evaluate.scorers import OPEN
from ..rules.settings import Grid
from .audit import outputs_beside_strict

if TYPE_CHECKING:
    from ..trace.reader import Trace

RIDGE = 0.01
"""Penalty on theta^2 and phi^2: keeps them finite where one side wins all or length decides all."""

POINTS: dict[tuple[str | None, ...], float] = {("A", "B"): 1.0, ("B", "A"): 0.0}
"""By the verdicts in both orders, the setting first and second; any other two are a tie."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Pair:
    """Two answers to one request."""

    request_id: str
    prompt: str
    strict: str
    setting: str

    def questions(self) -> list[Messages]:
        """Return what is asked of the judge: both orders, the setting first; nothing where the answers are equal."""
        if self.strict == self.setting:
            return []
        return [question(self.prompt, self.setting, self.strict), question(self.prompt, self.strict, self.setting)]


@dataclass(frozen=True)
class Price:
    """What a comparison will take: calls, and tokens by a rough estimate."""

    calls: int
    prompt_tokens: int
    answer_tokens: int

    def money(self, per_million: tuple[float, float]) -> float:
        """Return the cost for prices per million tokens read and written."""
        return (self.prompt_tokens * per_million[0] + self.answer_tokens * per_million[1]) / 1e6


@dataclass(frozen=True)
class Judged:
    """Wins, losses and ties of a setting against strict, and its win rates as (value, low, high).

    ``no_verdict`` pairs are not counted; ``equal`` ones are ties that nobody was asked about.
    """

    wins: int
    losses: int
    ties: int
    equal: int
    no_verdict: int
    win_rate: tuple[float, float, float]
    length_controlled: tuple[float, float, float]


def pairs_of(trace: Trace, grid: Grid, decode: Callable[[list[int]], str]) -> list[Pair]:
    """Return the answers to the open questions of a trace, under strict and under one setting.

    Raises
    ------
    UsageError
        If the setting is not exact on the trace, or there is no open question.
    """
    evaluator = Evaluator(trace)
    records = trace.request_records()
    if not any(record.task in OPEN for record in records):
        raise UsageError(
            f"the trace has no open questions ({', '.join(OPEN)})", fix="score its answers with asdsim audit"
        )
    outputs = outputs_beside_strict(evaluator, grid)
    texts = [[decode(np.frombuffer(tokens, "<i4").tolist()) for tokens in pair] for pair in outputs]
    return [
        Pair(record.request_id, record.prompt_text, *text)
        for record, text in zip(records, texts, strict=True)
        if record.task in OPEN
    ]


def price(pairs: list[Pair], answers: Answers, endpoint: Endpoint) -> Price:
    """Return what the comparisons that are not known yet will take, at most."""
    asked = [q for pair in pairs for q in pair.questions() if answers.known(endpoint, q) is None]
    characters = sum(len(message["content"]) for q in asked for message in q)
    return Price(len(asked), -(-characters // CHARACTERS_PER_TOKEN), len(asked) * MAX_TOKENS)


def judge(
    pairs: list[Pair], answers: Answers, endpoint: Endpoint, *, resamples: int = stats.RESAMPLES, seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Judged:  # fmt: skip
    """Have every pair judged in both orders.

    Raises
    ------
    EngineError
        If the judge cannot be asked; what it said before is kept in ``answers``.
    """
    points: list[float] = []
    longer: list[int] = []
    equal = no_verdict = 0
    for pair in pairs:
        said = [verdict_of(answers.ask(endpoint, q)) for q in pair.questions()]
        if progress:
            progress(1)
        if None in said:
            no_verdict += 1
            continue
        equal += not said
        points.append(POINTS.get(tuple(said), 0.5))
        longer.append(len(pair.setting) - len(pair.strict))
    won = np.array(points)
    return Judged(
        int((won == 1).sum()), int((won == 0).sum()), int((won == 0.5).sum()), equal, no_verdict,
        *win_rates(won, np.array(longer, np.float64), resamples, seed),
    )  # fmt: skip


def win_rates(
    won: Floats, longer: Floats, resamples: int = stats.RESAMPLES, seed: int = 0
) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Return the win rate and the length-controlled one, each with its bootstrap interval over requests.

    Parameters
    ----------
    won : float64 (R,)
        1 for a win, 0 for a loss, .5 for a tie.
    longer : float64 (R,)
        Characters that the setting's answer is longer.
    """
    none = (float("nan"),) * 3
    if not len(won):
        return none, none
    spread = longer.std()
    x = np.tanh(longer / spread) if spread > 0 else np.zeros(len(longer))
    weights = stats.resample_weights(len(won), resamples, seed)
    parts = [np.ones((1, len(won))), weights, 1.0 - np.eye(len(won))]
    rates = []
    for rate in (lambda w: (w @ won) / w.sum(axis=1), lambda w: _at_equal_length(won, x, w)):
        with np.errstate(divide="ignore", invalid="ignore"):
            value, drawn, left_out = (rate(part) for part in parts)
        low, high = stats.bca(value, drawn[None], left_out[None], len(won))
        rates.append((float(value[0]), float(low[0]), float(high[0])))
    return rates[0], rates[1]


def _at_equal_length(won: Floats, x: Floats, weights: Floats, steps: int = 25) -> Floats:
    """Return sigmoid(theta) of the model fitted under each row of weights (B, R), by Newton's method."""
    columns = np.stack([np.ones_like(x), x, x * x])  # (3, R)
    theta = np.zeros((len(weights), 2))
    for _ in range(steps):
        p = 1.0 / (1.0 + np.exp(-np.clip(theta @ columns[:2], -30, 30)))
        slope = (weights * (won - p)) @ columns[:2].T - RIDGE * theta
        bend = ((weights * p * (1 - p)) @ columns.T)[:, [[0, 1], [1, 2]]] + RIDGE * np.eye(2)
        move = np.clip(np.linalg.solve(bend, slope[:, :, None])[:, :, 0], -4, 4)
        theta += move
        if np.abs(move).max() < 1e-9:  # the next move would be of the order of its square
            break
    return np.asarray(1.0 / (1.0 + np.exp(-theta[:, 0])))
