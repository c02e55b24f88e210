"""Figures show the numbers that they were given, mark what is not exact, and are the same bytes each time."""

from __future__ import annotations

import json
import math
import re

import numpy as np
import polars as pl
import pytest
from matplotlib.collections import PatchCollection
from matplotlib.colors import to_hex

from asdsim.errors import AsdsimError, UsageError
from asdsim.plots.acceptance import acceptance_by_position, acceptance_distribution, match_share
from asdsim.plots.all import draw_all
from asdsim.plots.heatmap import acceptance_heatmap
from asdsim.plots.regret import _cumulative, accepted_mismatches, mismatch_groups, regret_distribution
from asdsim.plots.rows import focus, pick_settings, select
from asdsim.plots.style import NO_COLOUR, inline_svg, provenance, save
from asdsim.rules.settings import Policy
from asdsim.trace.graph import END, MISSING, Graph
from asdsim.walk.off_trace import OFF_TRACE


def row(B: float, g: float, M: float, histogram: list[int], *, exact: float = 1.0, off_trace: str = "stop") -> dict:
    steps = sum(histogram)
    accepted = sum(count * number for count, number in enumerate(histogram))
    return {
        "rule": "asd",
        "semantics": "paper",
        "B": float(B),
        "g": float(g),
        "M": float(M),
        "off_trace": off_trace,
        "requests": 4,
        "exact_share": exact,
        "mean_acceptance_length": (accepted + steps) / steps if steps else None,
        "accepted_per_proposal": accepted / steps if steps else None,
        "num_spec_steps": steps,
        "acceptance_histogram": histogram,
    }


@pytest.fixture
def frame() -> pl.DataFrame:
    return pl.DataFrame(
        [
            row(0, 0.25, 1, [4, 3, 2, 1]),
            row(0, 0.5, 1, [4, 3, 2, 1]),
            row(2, 0.25, 1, [2, 2, 2, 2]),
            row(2, 0.5, 1, [1, 1, 2, 4], exact=0.75),
        ]
    )


@pytest.fixture
def graph() -> Graph:
    """One request, K = 3: a step that mismatches at 0 (r/q .1) and 2 (r/q .5), then one that does at 1 (r/q .5)."""
    ints = lambda *values: np.array(values, np.int32)  # noqa: E731
    return Graph(
        request_ids=["toy/0"],
        root=ints(0),
        limit=ints(9),
        step_request=ints(0, 0),
        drafted=ints(3, 3),
        proposed=ints(3, 3),
        start=ints(0, 1),
        mm_ptr=np.array([0, 2, 3]),
        mm_pos=ints(0, 2, 1),
        mm_regret=np.array([0.3, 0.5, 1.0]),
        mm_score=np.array([0.1, 0.5, 0.5]),
        mm_charge=np.array([0.3, 0.5, 1.0]),
        edge_next=ints(1, MISSING, MISSING, END, END),
        edge_accepted=ints(0, 2, 3, 1, 3),
        edge_tokens=ints(1, 3, 4, 2, 4),
        edge_margin=np.full(5, np.inf),
        path_ptr=np.array([0, 2]),
        path_step=ints(0, 1),
        align_ptr=np.array([0, 5]),
        align_step=ints(0, 1, 1, 1, 1),
        max_draft=3,
    )


def legend(figure) -> list[str]:
    (box,) = figure.legends
    return [text.get_text() for text in box.get_texts()] + [box.get_title().get_text()]


def test_bars_are_shares_of_steps(frame: pl.DataFrame) -> None:
    figure = acceptance_distribution(frame)
    (axes,) = figure.axes
    heights = [[bar.get_height() for bar in group] for group in axes.containers]
    assert heights == [[40.0, 30.0, 20.0, 10.0], [25.0, 25.0, 25.0, 25.0], [12.5, 12.5, 25.0, 50.0]]
    assert [bool(group[0].get_hatch()) for group in axes.containers] == [False, False, True]
    words = legend(figure)
    assert words[0] == "strict: 2.00 tokens per step, 1.00 without the bonus"
    assert "exact for 75 % of requests" in words[2]
    assert "stayed on captured steps" in words[-1]


def test_positions_count_every_step_and_those_that_got_there(frame: pl.DataFrame) -> None:
    figure = acceptance_by_position(frame, match_share=np.array([0.5, 0.25, 0.125]))
    left, right = figure.axes
    assert left.lines[0].get_ydata().tolist() == pytest.approx([60.0, 30.0, 10.0])
    assert right.lines[0].get_ydata().tolist() == pytest.approx([60.0, 50.0, 100 / 3])
    assert left.lines[-1].get_ydata().tolist() == [50.0, 25.0, 12.5]
    assert left.lines[2].get_markerfacecolor() == "white"  # not exact
    assert left.lines[0].get_markerfacecolor() != "white"


def test_a_position_that_no_step_reaches_has_no_rate() -> None:
    figure = acceptance_by_position(pl.DataFrame([row(0, 1, 1, [3, 1, 0, 0])]))
    given = figure.axes[1].lines[0].get_ydata()
    assert given[:2].tolist() == [25.0, 0.0]
    assert np.isnan(given[2])


def test_heatmap_places_settings_and_hatches_what_is_not_exact(frame: pl.DataFrame) -> None:
    figure = acceptance_heatmap(frame)
    axes = figure.axes[0]
    # g upwards, B to the right; a mean over the requests that stayed has no colour and is no part of the scale
    assert axes.images[0].get_array().tolist() == [[2.0, 2.5], [2.0, None]]
    assert axes.images[0].get_clim() == (2.0, 2.5)
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["0", "2"]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["0.25", "0.5"]
    (hatched,) = [item for item in axes.collections if isinstance(item, PatchCollection)]
    (box,) = [path.get_extents().extents.tolist() for path in hatched.get_paths()]
    assert box == [0.5, 0.5, 1.5, 1.5] and hatched.get_hatch()
    assert to_hex(hatched.get_facecolor()[0]) == NO_COLOUR.lower()
    assert legend(figure)[0] == OFF_TRACE["stop"].figure_note + ": no fair sample, so no colour (per cent of all)"
    assert sorted(text.get_text() for text in axes.texts) == ["2.00", "2.00", "2.50", "3.12\n75 %"]


def test_heatmap_has_a_panel_per_cap_and_says_what_an_estimate_is() -> None:
    rows = [row(B, 0.5, M, [1, 1], exact=0.5, off_trace="recorded") for B in (1, 2) for M in (1, 2, math.inf)]
    figure = acceptance_heatmap(pl.DataFrame(rows))
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles[:3] == ["M = 1 per block", "M = 2 per block", "no cap (M = inf)"]
    assert legend(figure)[0] == OFF_TRACE["recorded"].figure_note
    assert figure.axes[0].images[0].get_array().tolist() == [[1.5, 1.5]]  # estimates keep their colour


def test_heatmap_without_a_whole_row_has_no_colours() -> None:
    figure = acceptance_heatmap(pl.DataFrame([row(B, 1, 1, [1, 1], exact=0.5) for B in (1, 2)]))
    (axes,) = figure.axes  # no colour bar
    assert axes.images[0].get_array().tolist() == [[None, None]]
    assert [text.get_text() for text in axes.texts] == ["1.50\n50 %"] * 2


def test_heatmap_without_a_figure_in_a_cell() -> None:
    figure = acceptance_heatmap(pl.DataFrame([row(0, 1, 1, [1, 1]), row(9, 1, 1, [], exact=0.0)]))
    assert any("every request left" in text for text in legend(figure))


def test_an_exact_heatmap_has_no_legend() -> None:
    assert acceptance_heatmap(pl.DataFrame([row(B, 1, 1, [1, 1]) for B in (0, 1)])).legends == []


def test_heatmap_refuses_two_rows_of_one_setting(frame: pl.DataFrame) -> None:
    with pytest.raises(UsageError, match="appears twice"):
        acceptance_heatmap(pl.concat([frame, frame]))


def test_regret_curves_reach_one_at_the_largest_and_the_gate_is_drawn() -> None:
    regret = np.array([0.0, 1.0, 2.0, 4.0])
    figure = regret_distribution({"all": (regret, regret / 4), "none": (regret[:0], regret[:0])}, gate=0.25)
    left, right = figure.axes
    at, share = left.lines[0].get_data()
    assert dict(zip(at.tolist(), share.tolist(), strict=True))[2.0] == 75.0
    assert share[1] == 25.0  # a tie costs nothing and stands at the left edge
    gates = [line for line in right.lines if "gate" in str(line.get_label())]
    assert [line.get_xdata() for line in gates] == [[0.25, 0.25]]
    assert not [line for line in left.lines if "gate" in str(line.get_label())]
    assert "all (n = 4)" in legend(figure)
    assert "none (n = 0)" in legend(figure)
    assert "r/q" in right.get_xlabel()


def test_regret_needs_a_mismatch() -> None:
    empty = np.zeros(0)
    with pytest.raises(UsageError, match="no mismatch"):
        regret_distribution({"all": (empty, empty)})


def test_a_long_curve_is_thinned_without_moving() -> None:
    sample = np.random.default_rng(3).exponential(size=5000)
    value, share = _cumulative(sample)
    assert len(value) <= 400
    assert value[[0, -1]].tolist() == [sample.min(), sample.max()]
    for at, part in zip(value[::40], share[::40], strict=True):
        assert part == (sample <= at).mean()


@pytest.mark.parametrize(
    ("policy", "off_trace", "taken"),
    [
        (Policy(0, 9, 9), "stop", []),  # strict stays on the path
        (Policy(8, 0.25, 2), "stop", [0]),
        (Policy(8, 0.5, 2), "stop", [0, 1]),
        (Policy(8, 0.5, 1), "stop", [0]),  # the cap
        (Policy(8, 0.5, 2), "recorded", [0, 1, 2]),
        (Policy(8, 0.5, 2), "aligned", [0, 1, 2]),
        (Policy(1, 0.5, 2), "recorded", [0, 1]),  # .8 spent: 1.0 more is over the budget
    ],
)
def test_accepted_mismatches_follow_the_rule(graph: Graph, policy: Policy, off_trace: str, taken: list[int]) -> None:
    assert accepted_mismatches(graph, policy, off_trace).tolist() == taken


def test_mismatch_groups(graph: Graph) -> None:
    groups = mismatch_groups(graph, Policy(8, 0.25, 2))
    numbers = {name: (regret.tolist(), score.tolist()) for name, (regret, score) in groups.items()}
    assert numbers == {
        "all mismatches": ([0.3, 0.5, 1.0], [0.1, 0.5, 0.5]),
        "first of each block": ([0.3, 1.0], [0.1, 0.5]),
        "accepted under B=8 g=0.25 M=2, captured steps only": ([0.3], [0.1]),
    }


def test_match_share_ignores_what_came_before() -> None:
    draft, choice, position = [1, 2, 3, 1, 2], [1, 0, 3, 0, 2], [0, 1, 2, 0, 1]
    assert match_share(np.array(draft), np.array(choice), np.array(position)).tolist() == [0.5, 0.5, 1.0]


def test_pick_spans_the_sweep_and_prefers_exact_rows() -> None:
    rows = [row(0, 1, 1, [9, 1])] + [row(B, 1, 1, [10 - B, B], exact=1.0 if B < 8 else 0.5) for B in range(1, 10)]
    picked = pick_settings(pl.DataFrame(rows))
    assert picked["B"].to_list() == [0.0, 3.0, 5.0, 7.0]
    assert pick_settings(pl.DataFrame(rows[:2])).height == 2
    alike = [*rows[:3], row(20, 1, 1, [9, 1]), row(21, 1, 1, [8, 2])]
    assert pick_settings(pl.DataFrame(alike))["B"].to_list() == [0.0, 1.0, 2.0]
    paper = [*rows, row(8, 0.25, 2, [4, 6])]
    assert pick_settings(pl.DataFrame(paper))["B"].to_list() == [0.0, 3.0, 8.0, 7.0]
    with pytest.raises(UsageError, match="no setting"):
        pick_settings(pl.DataFrame([row(3, 1, 1, [], exact=0.0)], schema=pl.DataFrame(rows).schema))


def test_focus_is_the_papers_setting_or_the_longest_exact_row() -> None:
    rows = [row(0, 1, 1, [1, 9]), row(4, 1, 1, [5, 5]), row(6, 1, 1, [4, 6]), row(7, 1, 1, [1, 9], exact=0.5)]
    assert focus(pl.DataFrame(rows)) == Policy(6, 1, 1)
    assert focus(pl.DataFrame([*rows, row(8, 0.25, 2, [9, 1], exact=0.1)])) == Policy(8, 0.25, 2)
    assert focus(pl.DataFrame(rows[:1])) is None


def test_select_names_what_there_is(frame: pl.DataFrame) -> None:
    assert select(frame, B=[2.0], g=[0.5])["exact_share"].to_list() == [0.75]
    with pytest.raises(UsageError, match=r"no setting with B = 3 \(B in the table: 0, 2\)"):
        select(frame, B=[3.0])
    with pytest.raises(UsageError, match="no column B"):
        select(frame.drop("B"))


def test_saved_files_are_equal_each_time_and_tell_their_source(frame: pl.DataFrame, tmp_path) -> None:
    record = provenance("asdsim plot x.parquet", source={"manifest_checksum": "abc"})
    both = [
        save(acceptance_heatmap(frame), tmp_path / name / "map", record, {"B": frame["B"].to_list()})
        for name in ("one", "two")
    ]
    assert [path.name for path in both[0]] == ["map.svg", "map.png", "map.json"]
    for first, second in zip(*both, strict=True):
        assert first.read_bytes() == second.read_bytes()
    assert both[0][0].read_bytes().startswith(b"<?xml")
    assert both[0][1].read_bytes().startswith(b"\x89PNG")
    told = json.loads(both[0][2].read_text())
    assert told["command"] == "asdsim plot x.parquet"
    assert told["source"] == {"manifest_checksum": "abc"}
    assert told["data"] == {"B": [0.0, 0.0, 2.0, 2.0]}
    assert {"asdsim", "python", "numpy", "matplotlib"} <= set(told["software"])
    assert not list((tmp_path / "one").glob("*.tmp"))


def test_numbers_that_json_cannot_hold(frame: pl.DataFrame, tmp_path) -> None:
    data = {"M": [1.0, math.inf], "length": np.array([np.nan, 2.0])}
    *_, path = save(acceptance_heatmap(frame), tmp_path / "map", provenance("x"), data)
    assert json.loads(path.read_text())["data"] == {"M": [1.0, "inf"], "length": [None, 2.0]}


def test_a_folder_that_cannot_be_made_is_one_clear_error(frame: pl.DataFrame, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AsdsimError, match="cannot write"):
        save(acceptance_heatmap(frame), tmp_path / "file" / "map", provenance("x"))


def test_a_users_matplotlib_settings_change_nothing(frame: pl.DataFrame, tmp_path) -> None:
    import matplotlib

    first = save(acceptance_distribution(frame), tmp_path / "one", provenance("x"))
    with matplotlib.rc_context({"font.size": 20, "axes.grid": False, "image.cmap": "jet"}):
        second = save(acceptance_distribution(frame), tmp_path / "two", provenance("x"))
        assert matplotlib.rcParams["font.size"] == 20
    assert first[1].read_bytes() == second[1].read_bytes()


def test_draw_all_leaves_out_what_the_data_do_not_allow(tmp_path) -> None:
    said: list[str] = []
    paths = draw_all(pl.DataFrame([row(2, 1, 1, [1, 1])]), tmp_path, provenance("x"), note=said.append)
    assert {path.stem for path in paths} == {"acceptance-length", "acceptance-by-position"}
    assert said == ["no heat map: it needs more than one B or g"]


def test_a_heatmap_of_one_value_has_no_scale() -> None:
    figure = acceptance_heatmap(pl.DataFrame([row(B, 1, 1, [1, 1]) for B in (0, 1)]))
    (axes,) = figure.axes  # no colour bar, so no offset such as 1e-9+1.5 beside it
    assert axes.images[0].get_clim() == (1.0, 2.0)
    assert [text.get_text() for text in axes.texts] == ["1.50", "1.50"]


def test_a_figure_names_what_it_stands_for_and_holds_six_digits(frame: pl.DataFrame, tmp_path) -> None:
    record = provenance("x", source={"subject": "target T, drafter D, K = 7, 24 requests"})
    figure = acceptance_heatmap(frame)
    *_, path = save(figure, tmp_path / "map", record, {"a": [1 / 3, 1e-9 / 3], "n": 12345678})
    assert [text.get_text() for text in figure.texts if "drafter" in text.get_text()] == [record["source"]["subject"]]
    assert json.loads(path.read_text())["data"] == {"a": [0.333333, 3.33333e-10], "n": 12345678}


def test_nothing_but_asd_is_orange() -> None:
    import colorsys

    from asdsim.plots.style import ASD, FILLS, LINES

    def hue(colour: str) -> float:
        red, green, blue = (int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5))
        return 360 * colorsys.rgb_to_hsv(red, green, blue)[0]

    assert 15 < hue(ASD) < 45
    assert not [colour for colour in (*FILLS[1:], *LINES[1:]) if 15 < hue(colour) < 45]


def test_a_figure_inside_a_page_has_no_style_and_ids_of_its_own(frame: pl.DataFrame) -> None:
    text = inline_svg(acceptance_heatmap(frame), "map", "Acceptance <length>")
    assert text.startswith("<svg ") and 'aria-label="Acceptance &lt;length&gt;"' in text
    assert " style=" not in text and "<style" not in text and "<metadata" not in text
    ids = set(re.findall(r'\bid="([^"]*)"', text))
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]*)', text))
    assert used <= ids and all(name.startswith("map-") for name in ids)
