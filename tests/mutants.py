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


def changes(path: str, tests: str, pairs: Sequence[tuple[str, str]]) -> list[Mutant]:
    """Return the mutants of one file, each (old text, new text)."""
    return [Mutant(path, old, new, tests) for old, new in pairs]


THRESHOLD = "tests/unit/test_threshold.py tests/properties/test_threshold.py"
BY_BATCH = "tests/twins/test_by_batch.py tests/twins/test_batch.py"
LOAD = "tests/unit/test_load_cost.py tests/unit/test_advise.py tests/unit/test_draft_length.py"
QUALITY = "tests/unit/test_quality.py"
PASSES = "tests/capture/test_passes.py"
STATS = "tests/unit/test_stats.py"
CALIBRATE = "tests/unit/test_calibrate.py"
COMPARE = "tests/unit/test_compare.py"
SCORERS = "tests/unit/test_scorers.py"
PARITY = "tests/unit/test_scorer_parity.py"
MARGIN = "tests/unit/test_margin.py"
TASKS = "tests/capture/test_tasks.py"
SHOTS = "tests/capture/test_shots.py"
FIDELITY = "tests/unit/test_fidelity.py"
CLI = "tests/cli/test_quality.py"
RESULTS = "tests/unit/test_results.py tests/unit/test_outputs.py tests/unit/test_likelihood.py"
REPLAY = "tests/cli/test_commands.py tests/cli/test_rules.py"
REFUSALS = "tests/unit/test_trace_refusals.py"
MEMORY = "tests/unit/test_trace_memory.py"
GRAPH = "tests/unit/test_graph.py"
JOIN = "tests/unit/test_join.py"
CONVERT = "tests/cli/test_convert.py"
FILES = "tests/unit/test_files.py"
PROMPTS = "tests/capture/test_prompts.py"
STORE = "tests/unit/test_store.py"
OPTIONS = "tests/cli/test_options.py"
RULES = "tests/cli/test_rules.py"

MUTANTS = [
    *changes("asdsim/trace/rows.py", REFUSALS, [
        ("twice |= (ids[:rank] == ids[rank]).any(0)", "pass"),
        ("draft_id[far] > last_id", "draft_id[far] != last_id"),
        ("(draft_logit[far] == last) & (", "(draft_logit[far] == last) | ("),
        (" | (ids[far] == draft_id[far, None]).any(1)", ""),
        ("(lse > top + most + slack)", "(lse > top + 100 + slack)"),
        ("(lse < top - slack)", "(lse < top - 100)"),
        ("rows.refuse(logits[0] == FORBIDDEN_LOGIT", "rows.refuse(logits[0] != logits[0]"),
        ("(ids[:-1] < ids[1:]))", "(ids[:-1] != ids[1:]))"),
        ("rank < 0) | (rank >= vocab)", "rank < 0) | (rank > vocab)"),
        ("(entropy < -1e-2)", "(entropy < -1)"),
        ("twice[order[1:]] |= np.diff(place[order]) == 0", "pass"),
        ("rows.refuse(known & bonus,", "rows.refuse(known & bonus & ~known,"),
        ("bad = np.isnan(values) | (values < -1e-2)", "bad = ~np.isfinite(values) | (values < -1e-2)"),
        ("| (values < -1e-2) | (values > 1.01)", "| (values > 1.01)"),
    ]),
    *changes("asdsim/trace/check.py", REFUSALS, [
        ('refuse(trace, "steps", root & (wave != 0), "step 0', 'refuse(trace, "steps", root & (wave < 0), "step 0'),
        ('refuse(trace, "steps", root & (start != 0)', 'refuse(trace, "steps", root & (start < 0)'),
        ("(start < 0) | (start >= limit)", "(start >= limit)"),
        ("(parent_id[child] < 0) | (parent_id[child] >= count)", "(parent_id[child] >= count)"),
        ("outside = (ids < 0) | (ids >= trace", "outside = (ids < 0) | (ids > trace"),
        ("index != np.arange(trace.first, trace.first + len(index))", "index < 0"),
        ("~(np.isfinite(time) & (time >= 0))", "~(time >= 0)"),
        ("start[child] != start[parent] + accepted[child] + 1", "start[child] < start[parent]"),
        ("refuse_child(path & (wave[parent] != 0)", "refuse_child(path & (wave[parent] < 0)"),
    ]),
    *changes("asdsim/trace/reader.py", MEMORY, [
        ("check_size(unpacked_bytes(parquet.metadata, expected), room, file)", "pass"),
        ("taken += text_bytes(raw)", "pass"),
        ("check_fits(folder, manifest)", "pass"),
    ]),
    *changes("asdsim/trace/tables.py", MEMORY, [
        ("read_row_group(group, columns, use_threads=False)", "read_row_group(group, columns)"),
        ("parquet.read(columns, use_threads=False)", "parquet.read(columns)"),
        (", pre_buffer=False)", ")"),
    ]),
    *changes("asdsim/trace/sizes.py", MEMORY, [
        ("width * max(chunk.num_values, rows.num_rows)", "width * rows.num_rows"),
    ]),
    *changes("asdsim/trace/graph.py", GRAPH, [
        ("if other != step:", "if False:"),
        ("node = self.after.setdefault(node << 32 | token, len(self.after) + 1)", "node = len(self.after) + step"),
        ("yield MISSING if corrected is None else", "yield MISSING if corrected is not None else"),
        ("blocks.start[edges.step] + edges.tokens >= ", "blocks.start[edges.step] + edges.tokens > "),
    ]),
    *changes("asdsim/trace/tokens.py", GRAPH, [
        ("| (parent >= child))", "| (parent > child + 1))"),
        ("if tokens > accepted:", "if tokens >= accepted:"),
    ]),
    *changes("asdsim/trace/join.py", JOIN, [
        ("        if lock is not None:\n            _remove_stale(target)\n", ""),
        ("lock = lock_directory(folders[0])", "lock = None"),
        ("if all(TEMPORARY", "if any(names) or all(TEMPORARY"),
    ]),
    *changes("asdsim/files.py", "tests/unit/test_files.py", [
        ("            os.fsync(handle.fileno())\n        os.replace(temporary, file)\n",
         "        os.replace(temporary, file)\n        os.sync()\n"),
        ("    sync_directory(file.parent)\n", ""),
        ("os.O_CREAT | os.O_EXCL |", "os.O_CREAT |"),
    ]),
    *changes("asdsim/trace/manifest.py", "tests/cli/test_inspect.py", [
        ("        _check_inside(manifest, where)\n", ""),
    ]),
    *changes("asdsim/stats.py", STATS, [
        ("away = centre[:, None] - left_out", "away = left_out - centre[:, None]"),
        ("(below + 0.5 * equal)", "(below + equal)"),
        ("np.maximum(cross - total / 2, 0.0)", "cross"),
        ("change = (b - c) / total", "change = (c - b) / total"),
        ("np.where(k == 0, 0.0,", "np.where(k == 1, 0.0,"),
        ("(kept < FEWEST) | ", "(kept < FEWEST - 1) | "),
        (" | outside\n", "\n"),
        ("if least >= FEW:", "if least > FEW:"),
    ]),
    *changes("asdsim/stats.py", QUALITY, [
        ("np.where(sure, self.high, np.nan)", "self.high"),
    ]),
    *changes("asdsim/evaluate/quality.py", QUALITY, [
        ("sure = np.asarray((exact & strict_exact).all(axis=1))", "sure = np.asarray(exact.all(axis=1))"),
        ("sure = np.asarray((exact & strict_exact).all(axis=1))",
         "sure = np.asarray((exact & strict_exact).any(axis=1))"),
        ("keep = strict_exact & (exact if", "keep = (exact if"),
        ('counted(table["scored"], self.strict["correct"])', 'counted(table["scored"], table["correct"])'),
        ("both, gained, lost, scored", "both, lost, gained, scored"),
        ("np.stack([gained, lost], axis=1)", "np.stack([lost, gained], axis=1)"),
        ("np.where(quality.exact, p, np.nan)", "p"),
        ("out[n] = (first >= 0,", "out[n] = (first > 0,"),
        ('counted(table["ended"], self.strict["ended"])', 'counted(self.strict["ended"], table["ended"])'),
        ("len(self.rows), self.resamples, evaluator.seed)", "len(self.rows), self.resamples, 0)"),
        ('if grid.layout.rule == "asd":\n        return replace(grid.strict',
         "if True:\n        return replace(grid.strict"),
        ("return text if right else", "return text if not right else"),
    ]),
    *changes("asdsim/evaluate/quality.py", CLI, [
        ('cost.plain_seconds(table["tokens"]', 'cost.plain_seconds(table["steps"]'),
    ]),
    *changes("asdsim/evaluate/quality.py", CALIBRATE, [
        ("if key not in self.scores:", "if True:"),
        ("[which, everyone][None]", "[0, everyone][None]"),
    ]),
    *changes("asdsim/evaluate/cost.py", QUALITY, [
        ("np.maximum(tokens - 1, 0) * each", "tokens * each"),
        ("- self.draft_us(0, prompt) - self.select", "- self.select"),
    ]),
    *changes("asdsim/evaluate/step_table.py", LOAD, [
        ("batch * self.context", "self.context"),
        ("np.maximum(value, values[-1])", "values[-1]"),
        ("per_context * batches[:, None] *", "per_context *"),
    ]),
    *changes("asdsim/evaluate/roofline.py", LOAD, [
        ("** np.asarray(tokens, np.float64))", "** 1.0)"),
        ("fixed += 2 * size.layers * ALL_REDUCE_US", "fixed += size.layers * ALL_REDUCE_US"),
        ("return K * self._pass(size", "return self._pass(size"),
    ]),
    *changes("asdsim/studies/advise.py", LOAD, [
        ("exact = walks.exact.all(axis=1)", "exact = walks.exact.any(axis=1)"),
        ("return self.best.length(self.batch) if self.pays else 0", "return self.best.length(self.batch)"),
        ("one_each + width * (table - one_each)", "width * table"),
    ]),
    *changes("asdsim/rules/settings.py", LOAD, [
        ("mismatch=mismatch, width=K,", "mismatch=mismatch,"),
    ]),
    *changes("asdsim/rules/scoring.py", THRESHOLD, [
        ("value < math.log(layout.threshold)", "value <= math.log(layout.threshold)"),
        ('np.argmax(doubted, axis=1) + (layout.stop == "after")', "np.argmax(doubted, axis=1)"),
        ("np.cumsum(given, axis=1)", "given"),
        ("np.where(doubted.any(axis=1), kept, length)", "kept"),
    ]),
    *changes("asdsim/rules/scoring.py", "tests/unit/test_draft_length.py", [
        ('return self.whole if self.rule == "asd" else DEFAULT', "return self.whole"),
        ("return replace(self, width=0, threshold=0.0)", "return replace(self, width=0)"),
        ("if not self.cuts:", "if not self.width:"),
    ]),
    *changes("asdsim/trace/stored.py", MEMORY, [
        ("fractions < np.uint64((most << 64) // total)", "fractions < np.uint64((most << 63) // total)"),
        ("np.arange(first, first + number, dtype=np.uint64)", "np.arange(number, dtype=np.uint64)"),
    ]),
    *changes("asdsim/trace/graph.py", THRESHOLD, [
        ("np.minimum(verified + np.int32(1), most)", "verified + np.int32(1)"),
    ]),
    *changes("asdsim/walk/ladder.py", BY_BATCH, [
        ("return row % self.base, outcome", "return row, outcome"),
        ("replace(layout, width=length or NO_DRAFT)", "replace(layout, width=length)"),
        ("for rung in rungs:\n", "for rung in rungs[:1]:\n"),
    ]),
    *changes("asdsim/walk/batch.py", BY_BATCH, [
        ("together, kept = busy, 0", "together, kept = batch, 0"),
        ("widest = max(widest, walks.proposed[row])", "widest = max(widest, walks.drafted[row] - 1)"),
        ("mixed = (mixed ^ (edge + 1))", "mixed = np.int64(edge + 1)"),
    ]),
    *changes("asdsim/evaluate/figures.py", QUALITY, [
        ('/ (s["tokens_strict"] / s["plain_strict"])', '/ (s["tokens"] / s["plain_strict"]) * 1.0001'),
    ]),
    *changes("asdsim/studies/calibrate.py", CALIBRATE, [
        ("cost = -(interval.low if self.bound else interval.value)", "cost = -interval.value"),
        ("cost = -(interval.low if self.bound else interval.value)",
         "cost = -(interval.high if self.bound else interval.value)"),
        ("np.maximum(np.abs(interval.low), np.abs(interval.high))", "np.abs(interval.high)"),
        ("np.maximum(np.abs(interval.low), np.abs(interval.high))", "np.abs(interval.low)"),
        ("cost = interval.high if self.bound else interval.value", "cost = interval.value"),
        ("known = quality.scored[:, 1] > 0", "known = quality.scored[:, 0] > 0"),
        ("min(equal, key=lambda n: tuple(keys[n][1:]))", "equal[0]"),
        ("tuple(keys[n][1:])", "tuple(-keys[n][1:])"),
        ("* (1 - 1e-12)", "* (1 - 1e-9)"),
        ('table.figures[name if name in table.figures else "mean_acceptance_length"]',
         'table.figures["mean_acceptance_length"]'),
        ("and 0 < part.mm_score[first] < math.inf", "and part.mm_score[first] < math.inf"),
        ('self.q, method="linear"', 'self.q, method="lower"'),
        ("np.flatnonzero(table.exact)", "np.arange(len(table))"),
        ("if any(rows.any() for rows in there):", "if False:"),
        ("np.flatnonzero(part_of != part)", "np.flatnonzero(part_of == part)"),
        ("np.random.default_rng(evaluator.seed).permutation", "np.random.default_rng(0).permutation"),
        ("self.calibration.figures[name].value[0] - self.holdout.figures[name].value[0]",
         "self.holdout.figures[name].value[0] - self.calibration.figures[name].value[0]"),
        ("check_disjoint(evaluator.trace, holdout.trace)\n", "\n"),
        ('seen[" ".join(record.prompt_text.split())] = record.request_id', "pass"),
        ("seen[record.prompt_ids] = record.request_id", "pass"),
        ("holdout.evaluate(calibration.grid, off_trace=off_trace)",
         "evaluator.evaluate(calibration.grid, off_trace=off_trace)"),
    ]),
    *changes("asdsim/studies/frozen.py", CALIBRATE, [
        ('if key in ("name", "revision") and same_weights:', 'if key == "name":'),
        ('if one["num_draft_tokens"] != other["num_draft_tokens"]:', "if False:"),
    ]),
    *changes("asdsim/rules/frozen.py", CALIBRATE, [
        ("if len(grids) != 1 or len(grids[0]) != 1:", "if len(grids) != 1:"),
        ("Grid.product(B, g, M, semantics, **reading)", "Grid.product(B, g, M, semantics)"),
    ]),
    *changes("asdsim/studies/frozen.py", CLI, [
        ('if record.get("holdout") and not judged:', 'if record.get("holdout"):'),
        ('if record.get("holdout") and not judged:', "if False:"),
    ]),
    *changes("asdsim/studies/compare.py", COMPARE, [
        ("within = tried.risk(risk) <= level", "within = tried.risk(risk) < level"),
        ("values[max(0, rung - 1) : rung + 2]", "values[max(0, rung - 1) : rung + 1]"),
        ("values[max(0, rung - 1) : rung + 2]", "values[rung : rung + 2]"),
        ("        within &= tried.exact.all(axis=1)", "        pass"),
        ("np.argmax(np.where(within, length, -np.inf))", "np.argmax(within)"),
        ("cost.seconds(setting.steps, setting.drafted,", "cost.seconds(setting.steps, setting.steps,"),
        ('    if exact:\n        row["gain_low"]', '    if True:\n        row["gain_low"]'),
        ("if exact.all() else {})", "if True else {})"),
        ("self.paired = np.flatnonzero(strict.exact[0])", "self.paired = self.paired"),
        ("gain(setting, asd, keep, weights)", "gain(asd, setting, keep, weights)"),
        ("true.counts[..., RELAXED] > 0", "true.counts[..., RELAXED] > 1"),
        ("self.spent.sum(axis=1) / np.maximum(self.tokens", "self.spent.mean(axis=1) / np.maximum(self.tokens"),
        ("stats.Draws(len(meter.paired), resamples, seed)", "stats.Draws(len(meter.paired), resamples, 0)"),
    ]),
    *changes("asdsim/studies/audit.py", CALIBRATE, [
        ('if trace.manifest.stop != "natural":', "if False:"),
        ("if verdict is not None]", "]"),
        ("descending=[True, True, False, False, False]", "descending=[False, True, False, False, False]"),
    ]),
    *changes("asdsim/studies/audit.py", CLI, [
        ("        check_same_models(dict(policy), identity(trace), str(trace.path))", "        pass"),
    ]),
    *changes("asdsim/studies/fidelity.py", FIDELITY, [
        ("error = guess / true - 1.0", "error = true / guess - 1.0"),
        ("if step.wave == 0]", "]"),
    ]),
    *changes("asdsim/live/timing.py", CLI, [
        ("if abs(timing.drift) > max_drift:", "if timing.drift > max_drift + 1:"),
        ("if (made != made[0]).any():", "if (made != made).any():"),
        ('(0.5 * (s["t1"] / s["s1"] + s["t3"] / s["s3"]))', '(s["t1"] / s["s1"])'),
        ('s["t2"] / s["s2"] / (s["t0"] / s["s0"])', 's["t2"] / s["s2"]'),
        ("    if timed.problems:\n        return False\n", ""),
        ('if held.get("setting") != setting]', "]"),
        ("if replayed.exact[0] else None", "if True else None"),
    ]),
    *changes("asdsim/capture/passes.py", PASSES, [
        ("            if repeat:\n", "            if True:\n"),
        ("1e3 * (t0 - before + self.clock() - t2)", "1e3 * (self.clock() - t2)"),
        ("float(np.median(passes))", "float(np.mean(passes))"),
        ("if abs(there / here - 1) > MAX_APART:", "if there / here - 1 < -MAX_APART:"),
        ("if spread > MAX_SPREAD:", "if spread > 10 * MAX_SPREAD:"),
        ("if load <= cores + 0.5:", "if load <= cores + 5:"),
    ]),
    *changes("asdsim/evaluate/cost_spec.py", PASSES, [
        ("cost.remarks.extend(_measured(notes))", "pass"),
        ("predicted / measured - 1:+.0%", "measured / predicted - 1:+.0%"),
        ("elif notes.get(TIMING, None) is None:", "elif True:"),
    ]),
    *changes("asdsim/cli/timing.py", CLI, [
        ('print_json("timing", payload)\n        return 1 if timed.problems else 0',
         'print_json("timing", payload)\n        return 0'),
        ("        note(text)\n    return 1 if timed.problems else 0", "        note(text)\n    return 0"),
    ]),
    *changes("asdsim/cli/calibrate.py", CLI, [
        ("    if force:\n        return\n", ""),
        ("_check_output(output, holdout is not None or split > 0, force)", "_check_output(output, True, force)"),
        ("limits = Limits(*most, bound=bound)", "limits = Limits(*most)"),
        ("if grid.layout.rule == rule]", "]"),
    ]),
    *changes("asdsim/cli/quality_options.py", CLI, [
        ('inexact = [column.get("exact") is False', "inexact = [False"),
        ('and column.get("strict_right") == 0', 'and column.get("strict_right") == 1'),
    ]),
    *changes("asdsim/cli/compare.py", COMPARE, [
        ('known = [row for row in known if row["exact"]]', "pass"),
        ('(row["mean_acceptance_length"], row is asd)', '(row["mean_acceptance_length"], row is not asd)'),
    ]),
    *changes("asdsim/cli/__init__.py", CLI, [
        ("sys.exit(130)", "sys.exit(0)"),
        ("            raise ReaderGone from None", "            raise"),
    ]),
    *changes("asdsim/evaluate/scorers/custom.py", SCORERS, [
        ("answer = groups[-1] if groups", "answer = groups[0] if groups"),
        ("compiled.search(text) is not None", "compiled.match(text) is None"),
        ("and bool(reference.strip()) and", "and"),
    ]),
    *changes("asdsim/evaluate/scorers/__init__.py", SCORERS, [
        ('if record.reference is None and not (name and ":" in name):', "if record.reference is None:"),
        ('task, equals, name = item.partition("=")', 'task, equals, name = item.rpartition("=")'),
    ]),
    *changes("asdsim/walk/sweep.py", RESULTS, [
        ("np.where(sums.kept == requests, gain, np.nan)", "gain"),
        ("np.where(matched, ratio(sums.base[2], sums.base[0]), np.nan)", "ratio(sums.base[2], sums.base[0])"),
        ("np.where(matched, ratio(sums.base[1], sums.base[0]), np.nan)", "ratio(sums.base[1], sums.base[0])"),
        ('"exact": exact_share == 1.0', '"exact": exact_share > 0.5'),
        ("paired = (keep & strict.exact[0]).astype(np.int64)", "paired = keep.astype(np.int64)"),
    ]),
    *changes("asdsim/walk/sums.py", RESULTS, [
        ("out.paired[setting] += row[PAIRED]", "out.paired[setting] += row[KEPT]"),
    ]),
    *changes("asdsim/walk/estimate.py", RESULTS, [
        ("counts.append(np.where(true.exact[..., None], true.counts, walks.counts))",
         "counts.append(walks.counts.copy())"),
        ("histogram + draws * _beyond(graph, grid, true)", "histogram"),
        ("counts[-1][..., LEFT] = true.counts[..., LEFT]", "pass"),
        ("np.where(exact, true.spent, spent / draws)", "spent / draws"),
    ]),
    *changes("asdsim/evaluate/outputs.py", RESULTS, [
        ("np.where(exact, ratio(count, total), np.nan)", "ratio(count, total)"),
        ("known = (self.which != UNKNOWN) & (self.strict == 0)[None, :]", "known = self.which != UNKNOWN"),
        ("np.isfinite(draft_logit) & (draft_logit != FORBIDDEN_LOGIT)", "np.isfinite(draft_logit)"),
        ("(of_draft[end] - of_draft[row]) + best_row[end]", "(of_draft[end] - of_draft[row])"),
        ("extra = np.where(corrected, best_row[last], 0.0)", "extra = best_row[last]"),
    ]),
    *changes("asdsim/trace/tokens.py", RESULTS, [
        ("return -1 if len(tokens) == len(other) else min(len(tokens), len(other))", "return -1"),
    ]),
    *changes("asdsim/result.py", RESULTS, [
        ("if not 0 <= number < size:", "if not 0 <= number <= size:"),
        ('(grid, "pooled") if covered is None', '(grid, "stop") if covered is None'),
        ("off_trace=off_trace or mode, **how", "off_trace=mode, **how"),
        ("walk_on(whole, grid.strict) if grid.layout.cuts else None", "None"),
        ('if frame["exact"].any() or not OFF_TRACE[self.off_trace].estimate:', 'if frame["exact"].any():'),
    ]),
    *changes("asdsim/evaluate/figures.py", RESULTS, [('if semantics == "lightllm"', 'if semantics == "core"')]),
    *changes("asdsim/cli/replay.py", REPLAY, [
        ('return text if text == "-" or row["exact"] else INEXACT + text', "return text"),
        ("name: row[name] if row[name][1] is not None else None", "name: row[name]"),
        ('best = ["exact", "mean_acceptance_length"]', 'best = ["mean_acceptance_length"]'),
        (' if row["exact"] and row["paired_requests"] == row["requests"]]', "]"),
    ]),
    *changes("asdsim/errors.py", REPLAY, [
        ('raise UsageError("; ".join(dict.fromkeys(map(str, self.errors))))', "raise self.errors[0]"),
    ]),
    *changes("asdsim/cli/common.py", REPLAY, [
        ("if flag != usual[name]:", "if False:"),
    ]),
    *changes("asdsim/formats/acceptance.py", CONVERT, [
        ("most = accepted + steps + (0 if own else requests)", "most = accepted + steps + requests"),
        ("if accepted > drafted:", "if accepted >= drafted:"),
        ("if drafted and not steps:", "if False:"),
        ('own = row.get("engine") == "asdsim" or bool(unnamed and tokens < accepted + steps)',
         'own = row.get("engine") == "asdsim"'),
        ("bool(unnamed and tokens < accepted + steps)", "bool(tokens is not None and tokens < accepted + steps)"),
        ("if own and tokens is not None and steps:", "if False:"),
        ("if a > d:", "if a >= d:"),
        ("len(values) != steps or sum(values) != total", "len(values) != steps"),
        ("if largest > most:", "if largest >= most:"),
        ("default=-(-accepted // steps) if steps else 0", "default=accepted // steps if steps else 0"),
        ("if per_drafted and max(per_drafted) > most:", "if False:"),
        ("if most > MAX_DRAFT:", "if False:"),
        ("if flat is not None and len(flat) > MAX_DRAFT + 1:", "if False:"),
        ("without += not inner", "without += bool(inner)"),
        ('failed += Fields(record, where, ImportRefused).whole("failed", 0)', "pass"),
        ('row["num_accepted_draft_tokens"] + row["num_spec_steps"]', 'row["num_accepted_draft_tokens"]'),
        ('sum(row.get("requests", 1) for row in records)', "len(records)"),
        ("emitted = min(int(part[at]), K + 1)", "emitted = min(int(part[at]), K)"),
        ("per_step.append(min(emitted - 1, taken))", "per_step.append(emitted - 1)"),
        ("per_step.append(min(emitted - 1, taken))", "per_step.append(min(emitted, taken) - 1)"),
        ("at += emitted", "at += taken + 1"),
        ("more = [len(part) - total", "more = [total - len(part)"),
        ("if not value > 0:", "if not value >= 0:"),
        ("if not regret > 0:", "if not regret >= 0:"),
        ("rel_tol=RATIO_RELATIVE", "rel_tol=1e-2"),
        ("[0.25, 0.5, 0.75]", "[0.25, 0.5, 0.8]"),
        ("if not exact:", "if exact is None:"),
        ("rows = chain(ahead, rows)", "rows = chain(rows)"),
    ]),
    *changes("asdsim/formats/responses.py", CONVERT, [
        ('if layer.get("error") or layer.get("success") is False or layer.get("object") == "error":',
         'if layer.get("error") or layer.get("object") == "error":'),
        ('reason.get("type") == "abort"', 'reason.get("type") == "length"'),
        ("if len(found) > 1:  # usage", "if len(found) > 2:  # usage"),
        ("name if len(found) == 1 else", "name if len(found) >= 1 else"),
        ("places = max(2, len", "places = max(1, len"),
        ("0.5000001 * 10.0**-places", "5 * 10.0**-places"),
        ("agrees(rate, 100 * accepted / drafted)", "agrees(rate, accepted / drafted) or True"),
        ("whole = all(abs(share * steps - n) < 1e-6", "whole = all(abs(share * steps - n) < 1"),
        ('record["num_spec_tokens"] = len(shares)', 'record["num_spec_tokens"] = len(shares) - 1'),
        ('agrees(fields.number("spec_accept_length"), tokens / steps)',
         'agrees(fields.number("spec_accept_length"), tokens / steps + 1)'),
        ('"requests": row.whole("completed", 1)', '"requests": 1'),
        ("for key, value in (outer or {}).items() if value is not None}",
         'for key, value in (outer or {}).items() if key == "usage"}'),
    ]),
    *changes("asdsim/formats/policies.py", RULES, [
        ('g = g * block_size if to == "dspark" else g / block_size',
         'g = g / block_size if to == "dspark" else g * block_size'),
        ('if rule != "asd":', "if False:"),
        ('size = fields.whole("block_size", least=1)', 'size = fields.whole("block_size")'),
        ('strict = B == 0 or M == 0 or (old == "core" and g == 0)', "strict = B == 0 or M == 0"),
        ('if to == "core" and g == 0 and not strict:', "if False:"),
        ("if math.isinf(value):", "if False:"),
    ]),
    *changes("asdsim/files.py", FILES, [
        ('value in ("inf", "-inf")', 'value in ("inf",)'),
        ("if isinstance(value, bool) or not isinstance(value, (int, float)):",
         "if not isinstance(value, (int, float)):"),
        ("if end < len(self.window) or self.ended:", "if True:"),
        ("os.fsync(handle.fileno())", "pass"),
        ("| os.O_EXCL", "| os.O_TRUNC"),
        ("text = decoder.decode(data, final=not data)", "text = decoder.decode(data)"),
        ("if size > MAX_FILE:", "if False:"),
        ("line = lines + 1 +", "line = lines +"),
    ]),
    *changes("asdsim/cli/convert.py", CONVERT, [
        ("if as_json:\n        print_json", "if not as_json:\n        print_json"),
        ("if grids is not None and (len(grids) != 1 or len(grids[0]) != 1):", "if False:"),
        ("    if left:\n        note(", "    if False:\n        note("),
        ('if output.suffix != ".jsonl":', "if False:"),
    ]),
    *changes("asdsim/cli/command.py", OPTIONS, [
        ("or now - self.last < LINE_SECONDS", "or now - self.start < LINE_SECONDS"),
        ("args[:place] + args[place + 1 + takes :]", "args[:place] + args[place + 1 :]"),
    ]),
    *changes("asdsim/capture/tasks/jsonl.py", PROMPTS, [
        ("return messages[: first + 1]", "return messages[:first]"),
        ('if messages[-1].role == "user":', "if True:"),
        ('(f"\\n\\n{more}" if more.strip() else "")', '(f"\\n\\n{more}")'),
        ("(where.rpartition(' ')[2]) - 1", "(where.rpartition(' ')[2])"),
        ("return [Message(\"user\", first_turn)], later", "return [Message(\"user\", first_turn)], later[1:]"),
        ('for message in messages[first + 1 :] if message.role == "user"', "for message in messages[first + 1 :]"),
    ]),
    *changes("asdsim/capture/tasks/sets.py", TASKS, [
        ('.strip().replace(",", "")', ".strip()"),
        ("if value is not None} for given", "} for given"),
        ("LETTERS[answer]", "LETTERS[answer - 1]"),
        ("argument not in splits and not _is_file(argument)", "argument not in splits"),
    ]),
    *changes("asdsim/capture/tasks/shots.py", SHOTS, [
        ("if pair[0] != question]", "if pair]"),
        ('row.whole("task_id") >= 2', 'row.whole("task_id") >= 1'),
        ('f"{seed}/{question}"', 'f"{question}"'),
        ("group.sort(key=lambda pair: order(shots.seed, pair[0]))", "group.reverse()"),
        ("shots.path is not None and len(names) > 1", "len(names) > 9"),
    ]),
    *changes("asdsim/evaluate/scorers/gsm8k.py", PARITY, [
        ("part = number / below", "part = number"),
        ("Decimal(whole) + part)", "Decimal(whole))"),
    ]),
    *changes("asdsim/evaluate/scorers/mmlu.py", PARITY, [
        ('text.partition("\\n")[0].strip()', 'text.strip().partition("\\n")[0]'),
    ]),
    *changes("asdsim/evaluate/scorers/ifeval.py", PARITY, [
        ("return count < threshold if", "return count <= threshold if"),
        ("(lines[1:], lines[:-1], lines[1:-1])", "(lines[1:], lines[:-1])"),
        ('.replace("*", "") for part in cut', " for part in cut"),
        ("for part in parts[1:-1]", "for part in parts"),
        ('.lstrip("\'").lstrip(\'"\')', ""),
        ("single, *double", "single"),
        ("for part in parts if part.strip()]", "for part in parts]"),
    ]),
    *changes("asdsim/stats.py", MARGIN, [
        ("c = lost * margin * (1 + margin)", "c = lost * margin * (1 - margin)"),
        ("(2 * chance - margin * (1 + margin))", "(2 * chance)"),
        ("changed = (gained + lost + 1) / (total + 1)", "changed = (gained + lost) / total"),
        ("FRACTIONS / (1 - self.margin)", "FRACTIONS / (1 + self.margin)"),
        ("np.maximum(self._best, np.exp", "np.minimum(self._best, np.exp"),
    ]),
    *changes("asdsim/capture/tasks/__init__.py", PROMPTS, [
        ("if ids[row] in seen:", "if False:"),
        ("not known and not Path", "Path"),
        ("end if shuffle is None else None", "end"),
        ("rows = rows[offset:end]", "rows = rows[:end]"),
    ]),
    *changes("asdsim/trace/groups.py", STORE, [
        ("(lowest < needed.stop and highest >= needed.start)", "(lowest < needed.stop and highest > needed.start)"),
        ("stream.until(needed.start)", "stream.until(0)"),
        ("(weight * each)", "each"),
    ]),
    *changes("asdsim/capture/prompts.py", PROMPTS, [
        ("while ids[:2] == [bos, bos]:", "if ids[:2] == [bos, bos]:"),
        ('add_special_tokens=False)["input_ids"]', 'add_special_tokens=True)["input_ids"]'),
        ("and len(prompt.asked) == 1 and", "and"),
        ("frame.removeprefix(bos)", "frame"),
        ("self.day or date.today()).isoformat()", "date.today()).isoformat()"),
    ]),
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
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True,
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
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", *tests.split()]
    try:
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return False
    if done.returncode > 2:  # 1 is a failure, 2 an error on import; the others are faults of the call
        said = (done.stdout + done.stderr).decode(errors="replace")[-1000:]
        sys.exit(f"pytest ends with status {done.returncode}: {said}")
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
