"""Write docs/metrics.md: every figure's definition, from the one place where it is defined.

python analysis/definitions.py
"""

# ruff: noqa: E501 (lines of the page)

from __future__ import annotations

from pathlib import Path

from asdsim.evaluate.figures import COLUMNS, FIGURES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
SHARES = ("outputs_differ_share", "accuracy")


def interval(name: str) -> str:
    """Say how a figure's interval is made."""
    if name in SHARES:
        return "Wilson"
    return "Newcombe, paired" if name == "accuracy_change" else "BCa bootstrap"


def document() -> str:
    """Return the page."""
    lines = [
        "# What every figure means", "",
        "Made by `python analysis/definitions.py` from `asdsim/evaluate/figures.py`. Means are ratios of sums over requests. Tokens",
        "behind an end of sequence or the token limit count nowhere.", "",
        "## Rows of a replay", "", "| column | meaning |", "|---|---|",
        *(f"| `{name}` | {meaning} |" for name, meaning in COLUMNS.items()), "",
        "## Figures with a 95 % interval", "",
        "`result.quality()`, `asdsim calibrate`, `asdsim audit`. All resamples draw whole requests, and every setting and the",
        "strict baseline see the same draws. The bootstrap is bias-corrected and accelerated (Efron 1987) and widened for few",
        "requests as Student's t is (Hesterberg 2015); shares of requests have Wilson's interval, changes of accuracy",
        "Newcombe's for paired shares (1998, method 10), with McNemar's exact test beside it.",
        "Fewer than three requests give no bootstrap interval, nor do resamples so lopsided that it would not hold the value.",
        "A row that is not exact has no interval either, for the setting or for the strict baseline: requests that stayed on the",
        "trace are no fair sample, and an estimate is off by more than the sampling of requests. Requests whose strict walk is",
        "not captured leave every figure.", "",
        "| figure | meaning | interval |", "|---|---|---|",
        *(f"| `{name}` | {figure.meaning} | {interval(name)} |" for name, figure in FIGURES.items()), "",
        "## Suffix reuse", "",
        "For a regret tau and a length p: the share, among mismatches of captured steps with regret <= tau that have at least",
        "p draft positions behind them in their block, of those whose next p draft tokens all equal the target's choice.", "",
        "## Sequence likelihood, and what B certifies", "",
        "The log-probability of an output is the sum of (logit - logsumexp) over its tokens, from recorded values. The same sum",
        "with the target's best logit at each position, on the output's own prefixes, is larger by the regret of the relaxed",
        "tokens: the shortfall is the ledger, and at most B. The tests hold this on the committed covered traces, for every",
        "setting and request. The log-probability of the strict output stands on other prefixes; `logprob_change_mean` compares",
        "with it and may have either sign.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(document(), encoding="utf-8")
