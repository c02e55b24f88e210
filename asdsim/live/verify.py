"""Compare a stored trace with live decoding, token for token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..rules.settings import Grid
from ..trace.covered import covered_grids, covered_settings
from ..trace.graph import build_graph

if TYPE_CHECKING:
    from ..capture.reload import Placing
    from ..capture.verify import Difference
    from ..rules.settings import Policy
    from ..trace.manifest import Manifest
    from ..trace.reader import Trace


@dataclass
class Verification:
    """What :func:`verify_trace` found.

    Attributes
    ----------
    pairs : int
        (request, setting) pairs asked for.
    not_captured : int
        Pairs whose walk leaves the trace, so that there is nothing to compare.
    identical : int
        Pairs whose live tokens equal the walk's.
    differences : list of Difference
        The others; ``near_tie`` tells which are explained by rounding.
    threshold : float
        Margin under which a difference counts as a near-tie, in logits.
    """

    pairs: int = 0
    not_captured: int = 0
    identical: int = 0
    differences: list[Difference] = field(default_factory=list)
    threshold: float = 0.0

    def count(self, outcome: Difference | bool) -> None:
        """Add what became of one pair; see :func:`compared`."""
        if outcome is True:
            self.identical += 1
        elif outcome is False:
            self.not_captured += 1
        else:
            self.differences.append(outcome)

    @property
    def real(self) -> list[Difference]:
        """Differences that no near-tie explains."""
        return [one for one in self.differences if not one.near_tie]


def verify_trace(
    path: Path,
    grids: list[Grid] | None = None,
    *,
    sample: int | None = None,
    seed: int = 0,
    near_tie: float | None = None,
    target: str | None = None,
    drafter: str | None = None,
    offline: bool = False,
    placing: Placing | None = None,
    models: tuple[Any, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """Decode live under the rule and compare with the walk, token for token.

    Parameters
    ----------
    path : Path
        Trace directory.
    grids : list of Grid, optional
        Settings; by default the grids that the manifest says are covered.
    sample : int, optional
        Draw so many (request, setting) pairs by ``seed`` instead of all.
    near_tie : float, optional
        Threshold in logits; by default :data:`asdsim.capture.verify.NEAR_TIE` of the trace's logits dtype.
    target, drafter, offline, placing
        See :func:`asdsim.capture.reload.load_pair`.
    models : (Target, Drafter), optional
        At hand already.
    progress : callable, optional
        Called with (pairs done, pairs in all).

    Raises
    ------
    UsageError
        If no grid is given and none is covered.
    """
    from ..capture.reload import live_load, load_pair
    from ..result import load

    trace = load(path)
    pairs = pairs_of(trace, grids, sample, seed)
    at_hand = models or load_pair(
        trace.manifest, target=target, drafter=drafter, offline=offline, placing=placing,
        load=live_load(trace.manifest, trace.request_records()),
    )  # fmt: skip
    found = Verification(pairs=len(pairs), threshold=threshold_of(trace.manifest, near_tie))
    for done, outcome in enumerate(compared(trace, at_hand, pairs, found.threshold), start=1):
        found.count(outcome)
        if progress:
            progress(done, len(pairs))
    return found


def threshold_of(manifest: Manifest, near_tie: float | None) -> float:
    """Return the margin under which a difference counts as a near-tie, in logits."""
    from ..capture.verify import NEAR_TIE

    return NEAR_TIE.get(manifest.logits_dtype, 1e-3) if near_tie is None else near_tie


def pairs_of(trace: Trace, grids: list[Grid] | None, sample: int | None, seed: int) -> list[tuple[int, Policy]]:
    """Return the (request, setting) pairs to verify; of the trace only its manifest and requests are looked at."""
    chosen = grids if grids is not None else covered_grids(trace.manifest.grids) or [covered_settings(trace)]
    policies = list(dict.fromkeys(grid.policy(n) for grid in chosen for n in range(len(grid))))
    pairs = [(r, policy) for policy in policies for r in range(trace.requests.num_rows)]
    if sample is not None and sample < len(pairs):
        picks = np.random.default_rng(seed).choice(len(pairs), sample, replace=False)
        pairs = [pairs[n] for n in sorted(picks.tolist())]
    return pairs


def compared(
    trace: Trace, models: tuple[Any, Any], pairs: Sequence[tuple[int, Policy]], threshold: float
) -> Iterator[Difference | bool]:
    """Yield, of each pair, its difference; True where there is none, False where the walk leaves the trace."""
    from ..capture.verify import Case, verify
    from ..trace.tokens import edge_tokens
    from ..walk.path import visits

    graphs = {layout: build_graph(trace, layout) for layout in {policy.layout for _, policy in pairs}}
    records = trace.request_records()
    for r, policy in pairs:
        graph = graphs[policy.layout]
        walk = visits(graph, policy, r)
        if not walk.exact:
            yield False
            continue
        steps = {step.step_id: step for step in trace.steps_of(records[r].request_id)}
        ids = trace.column("steps", "step_id")
        case = Case(
            records[r], policy, edge_tokens(trace, graph, walk.visits[-1].edge) if walk.visits else [],
            [(steps[int(ids[visit.step])], visit.accepted, visit.closeness) for visit in walk.visits],
        )  # fmt: skip
        for difference in verify(*models, trace.manifest.num_draft_tokens, [case], threshold):
            yield True if difference is None else difference
