"""Would the tests notice? Small changes of meaning, each put into a copy of the tree, and the tests that must fail.

    python tests/mutants.py                    # all of them; or make mutants
    python tests/mutants.py studies quality    # those whose path holds one of these words
    python tests/mutants.py --list

Each entry of :data:`MUTANTS` is (file, old text, new text, tests): the old text occurs once in the file. The selected
tests first run on the copy as it is, then with each change alone, up to the first failure. A mutant that no test
notices has survived: the tests lack a right value there. Not part of CI: it takes some ten minutes.

To add mutants of another room, add rows. A change that cannot be told apart from outside (an equivalent one) is not
worth a row.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 600
"""Seconds for one selection of tests; a mutant that makes them hang is noticed, too."""


class Mutant(NamedTuple):
    """One change, and the tests that should notice it."""

    path: str
    old: str
    new: str
    tests: str


QUALITY = "tests/unit/test_quality.py"
STATS = "tests/unit/test_stats.py"
CALIBRATE = "tests/unit/test_calibrate.py"
COMPARE = "tests/unit/test_compare.py"
SCORERS = "tests/unit/test_scorers.py"
FIDELITY = "tests/unit/test_fidelity.py"
CLI = "tests/cli/test_quality.py"
RULES_CLI = "tests/cli/test_rules.py"

MUTANTS = [
    # --- stats -----------------------------------------------------------------------------------------------------
    Mutant("asdsim/stats.py", "away = centre[:, None] - left_out", "away = left_out - centre[:, None]", STATS),
    Mutant("asdsim/stats.py", "(below + 0.5 * equal)", "(below + equal)", STATS),
    Mutant("asdsim/stats.py", "np.maximum(cross - total / 2, 0.0)", "cross", STATS),
    Mutant("asdsim/stats.py", "change = (b - c) / total", "change = (c - b) / total", STATS),
    Mutant("asdsim/stats.py", "np.where(k == 0, 0.0,", "np.where(k == 1, 0.0,", STATS),
    Mutant("asdsim/stats.py", "(kept < FEWEST) | ", "(kept < FEWEST - 1) | ", STATS),
    Mutant("asdsim/stats.py", " | outside\n", "\n", STATS),
    Mutant("asdsim/stats.py", "if least >= FEW:", "if least > FEW:", STATS),
    Mutant("asdsim/stats.py", "np.where(sure, self.high, np.nan)", "self.high", QUALITY),
    # --- evaluate/quality ------------------------------------------------------------------------------------------
    Mutant("asdsim/evaluate/quality.py", "sure = np.asarray((exact & strict_exact).all(axis=1))",
           "sure = np.asarray(exact.all(axis=1))", QUALITY),
    Mutant("asdsim/evaluate/quality.py", "sure = np.asarray((exact & strict_exact).all(axis=1))",
           "sure = np.asarray((exact & strict_exact).any(axis=1))", QUALITY),
    Mutant("asdsim/evaluate/quality.py", "keep = strict_exact & (exact if", "keep = (exact if", QUALITY),
    Mutant("asdsim/evaluate/quality.py", 'counted(table["scored"], self.strict["correct"])',
           'counted(table["scored"], table["correct"])', QUALITY),
    Mutant("asdsim/evaluate/quality.py", "both, gained, lost, scored", "both, lost, gained, scored", QUALITY),
    Mutant("asdsim/evaluate/quality.py", "np.stack([gained, lost], axis=1)", "np.stack([lost, gained], axis=1)", QUALITY),
    Mutant("asdsim/evaluate/quality.py", "np.where(quality.exact, p, np.nan)", "p", QUALITY),
    Mutant("asdsim/evaluate/quality.py", "out[n] = (first >= 0,", "out[n] = (first > 0,", QUALITY),
    Mutant("asdsim/evaluate/quality.py", 'counted(table["ended"], self.strict["ended"])',
           'counted(self.strict["ended"], table["ended"])', QUALITY),
    Mutant("asdsim/evaluate/quality.py", "len(self.rows), self.resamples, evaluator.seed)",
           "len(self.rows), self.resamples, 0)", QUALITY),
    Mutant("asdsim/evaluate/quality.py", 'replace(grid.strict, layout=grid.layout) if grid.layout.rule == "asd" else',
           "replace(grid.strict, layout=grid.layout) if True else", QUALITY),
    Mutant("asdsim/evaluate/quality.py", "cost.plain_seconds(table[\"tokens\"]", "cost.plain_seconds(table[\"steps\"]", CLI),
    Mutant("asdsim/evaluate/quality.py", "if key not in self.scores:", "if True:", CALIBRATE),
    Mutant("asdsim/evaluate/quality.py", "[which, everyone][None]", "[0, everyone][None]", CALIBRATE),
    Mutant("asdsim/evaluate/quality.py", "return text if right else", "return text if not right else", QUALITY),
    # --- evaluate/cost and figures ---------------------------------------------------------------------------------
    Mutant("asdsim/evaluate/cost.py", "np.maximum(tokens - 1, 0) * each", "tokens * each", QUALITY),
    Mutant("asdsim/evaluate/cost.py", "- self.draft.at(0, prompt) - self.select", "- self.select", QUALITY),
    Mutant("asdsim/evaluate/figures.py", '/ (s["tokens_strict"] / s["plain_strict"])',
           '/ (s["tokens"] / s["plain_strict"]) * 1.0001', QUALITY),
    # --- studies/calibrate -----------------------------------------------------------------------------------------
    Mutant("asdsim/studies/calibrate.py", "cost = -(interval.low if self.bound else interval.value)",
           "cost = -interval.value", CALIBRATE),
    Mutant("asdsim/studies/calibrate.py", "cost = -(interval.low if self.bound else interval.value)",
           "cost = -(interval.high if self.bound else interval.value)", CALIBRATE),
    Mutant("asdsim/studies/calibrate.py", "np.maximum(np.abs(interval.low), np.abs(interval.high))",
           "np.abs(interval.high)", CALIBRATE),
    Mutant("asdsim/studies/calibrate.py", "np.maximum(np.abs(interval.low), np.abs(interval.high))",
           "np.abs(interval.low)", CALIBRATE),
    Mutant("asdsim/studies/calibrate.py", "cost = interval.high if self.bound else interval.value",
           "cost = interval.value", CALIBRATE),
    Mutant("asdsim/studies/calibrate.py", "known = quality.scored[:, 1] > 0", "known = quality.scored[:, 0] > 0", CALIBRATE),
    Mutant("asdsim/studies/calibrate.py", "min(equal, key=lambda n: tuple(keys[n][1:]))", "equal[0]", CALIBRATE),
    Mutant("asdsim/studies/calibrate.py", "tuple(keys[n][1:])", "tuple(-keys[n][1:])", CALIBRATE),
    Mutant("asdsim/studies/calibrate.py", "* (1 - 1e-12)", "* (1 - 1e-9)", CALIBRATE),
    Mutant("asdsim/studies/calibrate.py", 'table.figures["speed_up" if "speed_up" in table.figures else "mean_acceptance_length"]',
           'table.figures["mean_acceptance_length"]', CALIBRATE),
    Mutant("asdsim/studies/calibrate.py", "and 0 < graph.mm_score[first] < math.inf", "and graph.mm_score[first] < math.inf",
           CALIBRATE),
    Mutant("asdsim/studies/calibrate.py", "self.q, method=\"linear\"", "self.q, method=\"lower\"", CALIBRATE),
    Mutant("asdsim/studies/calibrate.py", "np.flatnonzero(table.exact)", "np.arange(len(table))", CALIBRATE),
    Mutant("asdsim/studies/calibrate.py", "if any(rows.any() for rows in there):", "if False:", CALIBRATE),
    Mutant("asdsim/studies/calibrate.py", "np.flatnonzero(part_of != part)", "np.flatnonzero(part_of == part)", CALIBRATE),
    Mutant("asdsim/studies/calibrate.py", "np.random.default_rng(evaluator.seed).permutation", "np.random.default_rng(0).permutation",
           CALIBRATE),
    Mutant("asdsim/studies/calibrate.py", "self.calibration.figures[name].value[0] - self.holdout.figures[name].value[0]",
           "self.holdout.figures[name].value[0] - self.calibration.figures[name].value[0]", CALIBRATE),
    Mutant("asdsim/studies/calibrate.py", "check_disjoint(evaluator.trace, holdout.trace)\n", "\n", CALIBRATE),
    Mutant("asdsim/studies/calibrate.py", 'seen[" ".join(record.prompt_text.split())] = record.request_id', "pass", CALIBRATE),
    Mutant("asdsim/studies/calibrate.py", "seen[record.prompt_ids] = record.request_id", "pass", CALIBRATE),
    Mutant("asdsim/studies/calibrate.py", "holdout.evaluate(calibration.grid, off_trace=off_trace)",
           "evaluator.evaluate(calibration.grid, off_trace=off_trace)", CALIBRATE),
    # --- studies/frozen --------------------------------------------------------------------------------------------
    Mutant("asdsim/studies/frozen.py", 'if key in ("name", "revision") and same_weights:', 'if key == "name":', CALIBRATE),
    Mutant("asdsim/studies/frozen.py", 'if one["num_draft_tokens"] != other["num_draft_tokens"]:', "if False:", CALIBRATE),
    Mutant("asdsim/studies/frozen.py", 'if record.get("holdout") and not judged:', 'if record.get("holdout"):', CLI),
    Mutant("asdsim/studies/frozen.py", 'if record.get("holdout") and not judged:', "if False:", CLI),
    Mutant("asdsim/studies/frozen.py", 'float(value) if value in ("inf", "-inf") else value', "value", CALIBRATE),
    Mutant("asdsim/studies/frozen.py", "if len(grids) != 1 or len(grids[0]) != 1:", "if len(grids) != 1:", CALIBRATE),
    Mutant("asdsim/studies/frozen.py", "Grid.product(B, g, M, semantics, **reading)", "Grid.product(B, g, M, semantics)",
           CALIBRATE),
    # --- studies/compare -------------------------------------------------------------------------------------------
    Mutant("asdsim/studies/compare.py", "within = tried.risk(risk) <= level", "within = tried.risk(risk) < level", COMPARE),
    Mutant("asdsim/studies/compare.py", "values[max(0, rung - 1) : rung + 2]", "values[max(0, rung - 1) : rung + 1]", COMPARE),
    Mutant("asdsim/studies/compare.py", "values[max(0, rung - 1) : rung + 2]", "values[rung : rung + 2]", COMPARE),
    Mutant("asdsim/studies/compare.py", "        within &= tried.exact.all(axis=1)", "        pass", COMPARE),
    Mutant("asdsim/studies/compare.py", "np.argmax(np.where(within, length, -np.inf))", "np.argmax(within)", COMPARE),
    Mutant("asdsim/studies/compare.py", "setting.steps.sum(axis=1) + cost * setting.drafted", "setting.steps.sum(axis=1) + setting.drafted",
           COMPARE),
    Mutant("asdsim/studies/compare.py", "    if exact:\n        row[\"gain_low\"]", "    if True:\n        row[\"gain_low\"]", COMPARE),
    Mutant("asdsim/studies/compare.py", "if exact.all() else {})", "if True else {})", COMPARE),
    Mutant("asdsim/studies/compare.py", "self.paired = np.flatnonzero(strict.exact[0])", "self.paired = self.paired", COMPARE),
    Mutant("asdsim/studies/compare.py", "gain(setting, asd, keep, weights)", "gain(asd, setting, keep, weights)", COMPARE),
    Mutant("asdsim/studies/compare.py", "true.counts[..., RELAXED] > 0", "true.counts[..., RELAXED] > 1", COMPARE),
    Mutant("asdsim/studies/compare.py", "self.spent.sum(axis=1) / np.maximum(self.tokens", "self.spent.mean(axis=1) / np.maximum(self.tokens",
           COMPARE),
    Mutant("asdsim/studies/compare.py", "stats.resample_weights(len(meter.paired), resamples, seed)",
           "stats.resample_weights(len(meter.paired), resamples, 0)", COMPARE),
    # --- studies/audit and fidelity --------------------------------------------------------------------------------
    Mutant("asdsim/studies/audit.py", 'if trace.manifest.stop != "natural":', "if False:", CALIBRATE),
    Mutant("asdsim/studies/audit.py", "if verdict is not None]", "]", CALIBRATE),
    Mutant("asdsim/studies/audit.py", 'descending=[True, True, False, False, False]', 'descending=[False, True, False, False, False]',
           CALIBRATE),
    Mutant("asdsim/studies/audit.py", "        check_same_models(dict(policy), identity(trace), str(trace.path))", "        pass", CLI),
    Mutant("asdsim/studies/fidelity.py", 'point[name][figure][0] / point["exact"][figure][0] - 1.0',
           'point["exact"][figure][0] / point[name][figure][0] - 1.0', FIDELITY),
    Mutant("asdsim/studies/fidelity.py", "if step.wave == 0]", "]", FIDELITY),
    # --- live/timing -----------------------------------------------------------------------------------------------
    Mutant("asdsim/live/timing.py", "if abs(found.drift) > max_drift:", "if found.drift > max_drift + 1:", CLI),
    Mutant("asdsim/live/timing.py", "if (made != made[0]).any():", "if (made != made).any():", CLI),
    Mutant("asdsim/live/timing.py", "rates[1] / (0.5 * (rates[0] + rates[2]))", "rates[1] / rates[0]", CLI),
    Mutant("asdsim/live/timing.py", "if replayed.exact[0] else None", "if True else None", CLI),
    # --- command line ----------------------------------------------------------------------------------------------
    Mutant("asdsim/cli/timing.py", "print_json(\"timing\", payload)\n        return 1 if found.problems else 0",
           "print_json(\"timing\", payload)\n        return 0", CLI),
    Mutant("asdsim/cli/timing.py", "        note(text)\n    return 1 if found.problems else 0", "        note(text)\n    return 0", CLI),
    Mutant("asdsim/cli/calibrate.py", "    if force:\n        return\n", "", CLI),
    Mutant("asdsim/cli/calibrate.py", "_check_output(output, holdout is not None or split > 0, force)",
           "_check_output(output, True, force)", CLI),
    Mutant("asdsim/cli/calibrate.py", "limits = Limits(*most, bound=bound)", "limits = Limits(*most)", CLI),
    Mutant("asdsim/cli/calibrate.py", "if grid.layout.rule == rule]", "]", CLI),
    Mutant("asdsim/cli/quality_options.py", 'inexact = [column.get("exact") is False', "inexact = [False", CLI),
    Mutant("asdsim/cli/quality_options.py", 'and column.get("strict_right") == 0', 'and column.get("strict_right") == 1', CLI),
    Mutant("asdsim/cli/compare.py", "known = [row for row in known if row[\"exact\"]]", "pass", COMPARE),
    Mutant("asdsim/cli/compare.py", '(row["mean_acceptance_length"], row is asd)', '(row["mean_acceptance_length"], row is not asd)',
           COMPARE),
    Mutant("asdsim/cli/__init__.py", "sys.exit(130)", "sys.exit(0)", CLI),
    Mutant("asdsim/cli/__init__.py", "            raise ReaderGone from None", "            raise", CLI),
    # --- evaluate/scorers ------------------------------------------------------------------------------------------
    Mutant("asdsim/evaluate/scorers/custom.py", "answer = groups[-1] if groups", "answer = groups[0] if groups", SCORERS),
    Mutant("asdsim/evaluate/scorers/custom.py", "compiled.search(text) is not None", "compiled.match(text) is None", SCORERS),
    Mutant("asdsim/evaluate/scorers/custom.py", "and bool(reference.strip()) and", "and", SCORERS),
    Mutant("asdsim/evaluate/scorers/__init__.py", 'if record.reference is None and not (name and ":" in name):',
           "if record.reference is None:", SCORERS),
    Mutant("asdsim/evaluate/scorers/__init__.py", 'task, equals, name = item.partition("=")',
           'task, equals, name = item.rpartition("=")', SCORERS),
]  # fmt: skip


def main(args: Sequence[str] | None = None) -> int:
    """Run the mutants that were asked for; status 1 if one survived or a row no longer fits the code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="run mutants whose path holds one of these words")
    parser.add_argument("--list", action="store_true", help="list them, and say which rows no longer fit the code")
    given = parser.parse_args(args)
    chosen = [one for one in MUTANTS if not given.words or any(word in one.path for word in given.words)]
    stale = [one for one in chosen if not fits(one)]
    for one in stale:
        print(f"stale: {describe(one)}", flush=True)
    if given.list:
        print("\n".join(map(describe, chosen)))
        return bool(stale)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder) / "tree"
        copy_tree(tree)
        for tests in dict.fromkeys(one.tests for one in chosen):
            if not passes(tree, tests):
                sys.exit(f"{tests} fails without any change")
        survivors = [one for one in chosen if one not in stale and survives(tree, one)]
    number = len(chosen) - len(stale)
    print(f"{number - len(survivors)} of {number} killed" + ("; survivors:" if survivors else ""))
    for one in survivors:
        print(describe(one))
    return bool(survivors or stale)


def fits(mutant: Mutant) -> bool:
    """Tell whether the old text occurs once, and the new one leaves a file that Python reads."""
    text = (ROOT / mutant.path).read_text(encoding="utf-8")
    try:
        compile(text.replace(mutant.old, mutant.new), mutant.path, "exec")
    except SyntaxError:
        return False
    return text.count(mutant.old) == 1


def describe(mutant: Mutant) -> str:
    """Return a mutant in one line."""
    old, new = (" ".join(text.split()) for text in (mutant.old, mutant.new))
    return f"{mutant.path}: {old} -> {new or '(nothing)'} [{mutant.tests}]"


def copy_tree(tree: Path) -> None:
    """Copy what git knows, and new files that it does not ignore."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    ).stdout.decode().split("\0")  # fmt: skip
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


def survives(tree: Path, mutant: Mutant) -> bool:
    """Put a change into the copy, run its tests, take it back; return whether they passed."""
    file = tree / mutant.path
    text = file.read_text(encoding="utf-8")
    begin = time.monotonic()
    file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        alive = passes(tree, mutant.tests)
    finally:
        file.write_text(text, encoding="utf-8")
    print(f"{'SURVIVED' if alive else 'killed'} {time.monotonic() - begin:5.1f} s {describe(mutant)}", flush=True)
    return alive


def passes(tree: Path, tests: str) -> bool:
    """Run a selection of tests on the copy."""
    env = {
        **os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1",
        "NUMBA_CACHE_DIR": str(tree / ".cache/numba"),
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests.split()]
    try:
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
