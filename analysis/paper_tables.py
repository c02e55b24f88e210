"""The paper's tables as commands, and filled from the traces that these commands leave.

    python analysis/paper_tables.py [TRACE ...] [-o docs/paper-tables.md] [--json analysis/results/paper-tables.json]

Traces are the directories given, or those in ``traces/paper``; each fills the cells of its target, drafter and tasks. A
cell without a trace stays empty. Beside them stand the small pairs that the repository ships, which are not the paper's.

Answers are scored from the text that a trace keeps, so nothing is loaded; programs are not run (``asdsim audit
--allow-code-execution`` runs them).
"""

# ruff: noqa: E501 (a table cell is one line)

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import asdsim
from asdsim.evaluate.cost import fit_trace
from asdsim.evaluate.quality import Evaluator
from asdsim.evaluate.scorers import make_scorer
from asdsim.files import dump_json, plain
from asdsim.rules.settings import Grid

ROOT = Path(__file__).resolve().parents[1]
PAPER: dict[str, Any] = json.loads((ROOT / "analysis" / "paper.json").read_text(encoding="utf-8"))
SMALL = ("smollm2-eagle3", "smollm2-dspark", "smollm2-medusa")
"""Covered traces of the repository, in ``traces/``."""
SETTING = Grid.product(PAPER["settings"]["B"], PAPER["settings"]["g"], PAPER["settings"]["M"])
FIGURES = (
    "mean_acceptance_length", "acceptance_length_gain", "speed_up", "length_change", "outputs_differ_share", "accuracy",
    "accuracy_change",
)  # fmt: skip

TASKS: dict[str, tuple[str, int]] = {
    "gsm8k": ("--task gsm8k:test", 512),
    "math500": ("--task math500:test", 2048),
    "humaneval": ("--task humaneval:test", 1024),
    "mbpp": ("--task mbpp:test", 1024),
    "mmlu": ("--task mmlu:test --shuffle 0 --limit 1000", 1024),
    "mt-bench": ("--task mt-bench --turns all", 1024),
    "alpaca": ("--task alpaca:train --shuffle 0 --limit 1000", 1024),
}
"""Prompts and token limit of each task. The paper names neither, except for 512 tokens on GSM8K."""
OPEN, PROGRAMS = ("mt-bench", "alpaca"), ("humaneval", "mbpp")


def cells() -> list[tuple[str, str, dict[str, float]]]:
    """Return pair, task and published figures of every cell: table 1, then what table 2 adds."""
    main = [("qwen3-14b-dspark", task, cell) for task, cell in PAPER["table_1"].items()]
    known = {(pair, task) for pair, task, _ in main}
    others = [(pair, task, cell) for pair, row in PAPER["table_2"].items() for task, cell in row.items()]
    return main + [cell for cell in others if cell[:2] not in known]


def commands(pair: str, task: str) -> list[str]:
    """Return the commands that fill a cell."""
    about, (prompts, tokens) = PAPER["pairs"][pair], TASKS[task]
    where = f"traces/paper/{pair}-{task}"
    more = list(about.get("options", []))
    if "Qwen3" in about["target"]:
        more += ["--chat-template-arg", "enable_thinking=false"]
    setting = "--B {B:g} --g {g:g} --M {M:g}".format(**PAPER["settings"])
    lines = [
        " ".join([f"asdsim capture -o {where} --target {about['target']} --drafter {about['drafter']}", prompts,
                  f"--K {about['K']} --max-new-tokens {tokens} --dtype bfloat16 --device cuda", *more]),
        f"asdsim cover {where} {setting.replace('--B ', '--B 0,')} --kv-gb 16",
        f"asdsim calibrate {where} {setting} -o {where}.json",
        f"asdsim audit {where} --policy {where}.json"
        + ("" if task in OPEN else " --margin 1")
        + (" --allow-code-execution" if task in PROGRAMS else ""),
    ]  # fmt: skip
    if task in OPEN:
        lines.append(f"asdsim judge {where} --policy {where}.json --endpoint URL --model NAME --yes")
    return [*lines, f"asdsim timing {where} --policy {where}.json --limit 64 --tokens 256"]


def measured(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what a trace says of each of its tasks under the paper's setting; no figures where it is not exact."""
    trace = asdsim.load(folder)
    records, vocabulary = trace.request_records(), trace.vocabulary
    scorer = None if vocabulary is None else make_scorer(records, vocabulary.text)
    cost = fit_trace(trace)
    evaluator = Evaluator(trace, cost=cost, scorer=scorer)
    found = {}
    for task in dict.fromkeys(record.task for record in records):
        rows = [n for n, record in enumerate(records) if record.task == task]
        row = evaluator.evaluate(SETTING, figures=FIGURES, requests=rows).row(0)
        strict = evaluator.evaluate(SETTING.strict, figures=FIGURES[:1], requests=rows).row(0)
        found[task] = {
            "trace": folder.name, "requests": len(rows), "exact": row["exact"], "scored": row.get("scored_requests", 0),
            "strict_right": row.get("strict_right", 0), "strict_length": _rounded(strict["mean_acceptance_length"]),
            **{name: _rounded(row[name]) for name in FIGURES if name in row and row["exact"]},
        }  # fmt: skip
    return found


def _rounded(values: Iterable[float | None]) -> list[float | None]:
    """Return a figure and its interval to digits that do not depend on the order of a sum."""
    return [None if value is None else round(value, 6) for value in values]


def pair_of(folder: Path) -> str | None:
    """Return which of the paper's pairs a trace is of."""
    manifest = asdsim.load(folder).manifest
    for pair, about in PAPER["pairs"].items():
        kind, _, head = about["drafter"].partition(":")
        drafter = str(manifest.drafter["name"])
        same_head = drafter == about["drafter"] if head != "OWNER/HEAD" else drafter.partition(":")[0] == kind
        if manifest.target["name"] == about["target"] and same_head and manifest.num_draft_tokens == about["K"]:
            return str(pair)
    return None


def rows(folders: Iterable[Path]) -> dict[str, Any]:
    """Return the rows of both tables, as they go into the JSON.

    Raises
    ------
    SystemExit
        If a trace is of no pair of the paper, or two traces fill one cell.
    """
    filled: dict[tuple[str, str], dict[str, Any]] = {}
    for folder in folders:
        pair = pair_of(folder)
        if pair is None:
            raise SystemExit(f"{folder}: its target, drafter and K are none of the paper's (analysis/paper.json)")
        for task, figures in measured(folder).items():
            if (pair, task) in filled:
                raise SystemExit(f"{folder} and {filled[pair, task]['trace']} both hold {task} of {pair}")
            filled[pair, task] = figures
    paper = [
        {"pair": pair, "task": task, "published": cell, "commands": commands(pair, task), "measured": filled.get((pair, task))}
        for pair, task, cell in cells()
    ]  # fmt: skip
    small = []
    for name in SMALL:
        manifest = asdsim.load(ROOT / "traces" / name).manifest
        kind = str(manifest.drafter["name"]).partition(":")[0]
        head = {"pair": f"SmolLM2-135M-Instruct + {kind}", "K": manifest.num_draft_tokens}
        small += [
            {**head, "task": task, "measured": figures} for task, figures in measured(ROOT / "traces" / name).items()
        ]
    return plain({"source": PAPER["source"], "setting": PAPER["settings"], "paper": paper, "small": small})


def _span(values: Sequence[float | None] | None, form: str, scale: float = 1.0) -> str:
    if values is None or values[0] is None:
        return "-"
    value, low, high = values
    ends = "" if low is None or high is None else f" [{form.format(scale * low)}, {form.format(scale * high)}]"
    return form.format(scale * value) + ends


def _figures(found: dict[str, Any] | None) -> list[str]:
    """Return the cells of what was measured; empty ones without a trace, and none that is not exact."""
    if found is None:
        return ["needs a server", "", "", "", "", "", ""]
    if not found["exact"]:
        return [f"{found['requests']}, not covered", "-", "-", "-", "-", "-", "-"]
    accuracy = _span(found.get("accuracy_change"), "{:+.1f}", 100)
    if found["scored"] and not found["strict_right"]:
        accuracy = "strict has none right"
    lengths = [_span(found[name], "{:.2f}") for name in ("strict_length", "mean_acceptance_length")]
    speed = found.get("speed_up")
    faster = None if speed is None else [None if end is None else end - 1 for end in speed]
    return [
        str(found["requests"]), *lengths, _span(found["acceptance_length_gain"], "{:+.1f}", 100), _span(faster, "{:+.1f}", 100),
        _span(found["outputs_differ_share"], "{:.0f}", 100), accuracy if found["scored"] else "not scored",
    ]  # fmt: skip


MEASURED = (
    "requests", "strict, tokens per step", "ASD, tokens per step", "gain in tokens per step (%)",
    "gain in throughput, predicted (%)", "outputs that differ (%)", "change of accuracy (points)",
)  # fmt: skip


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(line)} |" for line in lines)]


def document(found: dict[str, Any]) -> str:
    """Return the page."""
    paper = [
        [
            row["pair"], row["task"],
            f"{row['published']['strict_length']:.2f} / {row['published']['asd_length']:.2f}",
            f"{row['published']['gain']:+.2f} ± {row['published']['half_width']:.2f}",
            f"{row['published']['accuracy']:+.2f}", *_figures(row["measured"]),
        ]
        for row in found["paper"]
    ]  # fmt: skip
    small = [[row["pair"], str(row["K"]), row["task"], *_figures(row["measured"])] for row in found["small"]]
    filled = sum(row["measured"] is not None for row in found["paper"])
    lines = [
        "# The paper's tables as commands", "",
        "Made by `python analysis/paper_tables.py`. Tables 1 and 2 of the ASD paper (arXiv 2608.03447v1, B=8 g=.25 M=2) have 15",
        "different cells: seven tasks for Qwen3-14B with DSpark, and GSM8K and MMLU for the four other pairs, which with the same",
        "two of the first are its ten configurations. Below stands what fills each cell, and the table that the script fills from",
        "the resulting traces. **None of these commands has been run**: they need a GPU with 24 to 48 GB.", "",
        "- The paper names the DSpark heads. It names no checkpoint for EAGLE3 and Medusa: those of Llama-3.1 below are public ones",
        "  chosen here, untested, and `eagle3:OWNER/HEAD` for Qwen2.5-7B is yours to name. K is 7 for DSpark's blocks of 7; for",
        "  the others the paper does not say, and 7 and 5 are chosen here.",
        "- Nor does it say how many prompts of MMLU and Alpaca it took, or how long answers may be. Limits here: 1,000 prompts of",
        "  either, and the numbers of tokens in the commands. Qwen3 answers without thinking.",
        "- The paper's gain is measured throughput at equal work. `asdsim timing` measures it by the same protocol, strict, ASD,",
        "  strict on 64 prompts with 256 tokens. The table predicts it from the step times in the trace; its tokens per step are",
        "  exact. The paper does not say whether its tokens per round count the token that the target adds; those here do.",
        "- [Published figures](published.md) lists where the paper's own figures disagree.", "",
        "## The table", "",
        f"{filled} of {len(paper)} cells are filled.", "",
        *_table(["pair", "task", "published tokens per round, strict / ASD", "published gain (%)", "published change of accuracy", *MEASURED], paper), "",
        "## The same from the pairs of this repository", "",
        "These are not the paper's configurations: a target of 135M parameters with heads trained for this repository, answers of",
        "at most 96 tokens, step times of two CPU cores. Tokens per step are exact, with 95 % intervals over requests; MT-Bench has",
        "no right answers, and programs were not run.", "",
        *_table(["pair", "K", "task", *MEASURED], small), "",
        "## The commands", "",
        "Run them in a checkout; then `python analysis/paper_tables.py` fills the table from `traces/paper`. `cover` computes what",
        "the setting and strict matching need, `calibrate` freezes the setting, `audit` compares its answers with strict ones.",
        "`--shard i/n` spreads a capture over several GPUs ([servers](servers.md)).", "",
    ]  # fmt: skip
    for pair, about in PAPER["pairs"].items():
        lines += [
            f"### {about['target']} with {about['drafter'].partition(':')[0]}",
            "",
            f"The head is {about['drafter_is']}.",
            "",
        ]
        lines += [
            "```",
            "\n\n".join("\n".join(row["commands"]) for row in found["paper"] if row["pair"] == pair),
            "```",
            "",
        ]
    return "\n".join(lines[:-1]) + "\n"


def main() -> None:
    """Write the page and its JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", type=Path, metavar="TRACE")
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "docs" / "paper-tables.md")
    parser.add_argument("--json", type=Path, default=ROOT / "analysis" / "results" / "paper-tables.json")
    options = parser.parse_args()
    folders = options.traces or [path.parent for path in sorted((ROOT / "traces" / "paper").glob("*/manifest.json"))]
    found = rows(folders)
    options.json.write_text(dump_json(found, indent=1, ascii_only=False) + "\n", encoding="utf-8")
    options.out.write_text(document(found), encoding="utf-8")
    print(options.out, options.json)


if __name__ == "__main__":
    main()
