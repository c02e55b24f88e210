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
        "after an end of sequence or past the token limit do not count.", "",
        "## Rows of a replay", "", "| column | meaning |", "|---|---|",
        *(f"| `{name}` | {meaning} |" for name, meaning in COLUMNS.items()), "",
        "## What a row can tell you", "",
        "A row is a result where `exact` is true and `paired_requests` equals `requests`: every walk of the setting and every",
        "strict walk met captured steps only, so both cover the same requests and equal live decoding. Only such a row has 95 %",
        "intervals. Printed tables mark all figures of a row that is not exact with `~`.", "",
        "- **Not exact, `--off-trace stop`.** The row is the mean over the requests that stayed on the trace. Those are the ones",
        "  on which the setting deviates least, so the mean is biased, and it covers other requests than every other row does.",
        "  Such a row has no gain and no interval, and is never ranked. `asdsim cover` makes it exact.",
        "- **Not exact, another mode.** An estimate over all requests, without an interval: an interval over requests would leave",
        "  out the error of the estimate, which `asdsim fidelity` measures.",
        "- **Exact, but `paired_requests` below `requests`.** The trace was captured under a rule other than strict, and the",
        "  strict walk of some requests is missing. It tends to be known where the setting changed nothing, so a gain over these",
        "  pairs would be biased towards 0: `strict_*` and the gain are null. `asdsim cover TRACE --B 0 --g 0 --M 0`",
        "  adds the strict walks.", "",
        "`baseline` names what gains are measured against. It is strict matching by token id, except under the reading `lightllm`,",
        "which accepts ties at every setting; its baseline is its own B = 0. For settings that cut blocks (`--K`,",
        "`--draft-threshold`, the rule `truncate`) it is strict matching on whole blocks. `num_draft_tokens` counts the draft",
        "tokens that were verified, not those that a threshold dropped.", "",
        "`asdsim replay TRACE` without settings shows those that the trace is covered for, since they are exact. If it is covered",
        "for none under the rule's reading, a default grid is estimated with `pooled`, which was the closest of the three estimates",
        "on two of the three traces measured ([exact or estimated](exactness.md)); the requests that `stop` would leave say less.",
        "If you name settings, `stop` is the default on every trace: nothing is estimated unless you ask for it. An explicit",
        "`--off-trace` always wins.", "",
        "## Figures with a 95 % interval", "",
        "`result.quality()`, `asdsim calibrate`, `asdsim audit`. All resamples draw whole requests, and every setting and the",
        "strict baseline see the same draws. The bootstrap is bias-corrected and accelerated (Efron 1987) and widened for few",
        "requests as Student's t is (Hesterberg 2015); shares of requests have Wilson's interval, changes of accuracy",
        "Newcombe's for paired shares (1998, method 10), with McNemar's exact test beside it.",
        "Fewer than five requests give no bootstrap interval, nor do resamples so skewed that the interval would miss the value.",
        "A row that is not exact has no interval either, for the setting or for the strict baseline: requests that stayed on the",
        "trace are a biased sample, and an estimate has errors beyond the sampling of requests. Requests whose strict walk is not",
        "captured are left out of every figure.", "",
        "| figure | meaning | interval |", "|---|---|---|",
        *(f"| `{name}` | {figure.meaning} | {interval(name)} |" for name, figure in FIGURES.items()), "",
        "## Suffix reuse", "",
        "Suffix reuse is defined for a regret tau and a length p. Take the mismatches of captured steps with regret <= tau that have",
        "at least p draft positions after them in their block: it is the share of those whose next p draft tokens all equal the",
        "target's choice.", "",
        "## Sequence likelihood, and what B certifies", "",
        "The log-probability of an output is the sum of (logit - logsumexp) over its tokens, from recorded values. The same sum",
        "with the target's largest logit at each position, on the output's own prefixes, is larger by the regret of the relaxed",
        "tokens: the shortfall is the ledger, which is at most B. Tests check this on the committed covered traces, for every",
        "setting and request. The log-probability of the strict output belongs to other prefixes; `logprob_change_mean` compares",
        "with it and may have either sign.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(document(), encoding="utf-8")
