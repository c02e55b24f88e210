"""Settings and the sweep grammar."""

import math

import numpy as np
import pytest

from asdsim.errors import UsageError
from asdsim.rules.asd import Reading
from asdsim.rules.settings import Grid, Policy, parse_axis
from asdsim.trace.covered import covered_grids, grid_entry


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0,2,4", [0.0, 2.0, 4.0]),
        (".5", [0.5]),
        ("0:2:.5", [0.0, 0.5, 1.0, 1.5, 2.0]),
        ("0:1:.3", [0.0, 0.3, 0.6, 0.9]),
        ("0:.5:.1", [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]),  # the very floats that .1, .2, .3 denote
        ("1,2,inf", [1.0, 2.0, math.inf]),
        ("0:1:1, 4 ,4", [0.0, 1.0, 4.0]),
        ("3:3:0", [3.0]),
    ],
)
def test_reads_lists_and_inclusive_ranges(text, values):
    assert parse_axis("B", text) == values


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("B", "-1", "negative"),
        ("B", "nan", "NaN"),
        ("g", "", "empty item"),
        ("g", "1,,2", "empty item"),
        ("g", "a", "not a number"),
        ("B", "0:inf:1", "never ends"),
        ("B", "0:1:0", "never ends"),
        ("B", "0:1:-1", "never ends"),
        ("B", "2:1:1", "empty"),
        ("B", "0:1", "not a range"),
        ("B", "0:1:2:3", "not a range"),
        ("B", "0:1000000:.0001", "values"),
        ("M", "1.5", "whole"),
        ("M", "0:2:.5", "whole"),
        ("B", "0:nan:1", "never ends"),
    ],
)
def test_refuses_what_cannot_be_meant(name, text, message):
    with pytest.raises(UsageError, match=message):
        parse_axis(name, text)


def test_grid_is_a_product_with_the_cap_innermost():
    grid = Grid.product("0,4", [0.1, 0.25], "1,inf")
    assert grid.budget.tolist() == [0, 0, 0, 0, 4, 4, 4, 4]
    assert grid.gate.tolist() == [0.1, 0.1, 0.25, 0.25] * 2
    assert grid.cap.tolist() == [1, np.inf] * 4
    assert grid.policy(6) == Policy(4.0, 0.25, 1.0)


def test_unknown_semantics_is_answered_with_the_closest():
    with pytest.raises(UsageError, match="did you mean 'paper'"):
        Grid.product(1, 1, 1, "papr")


def test_the_ledger_is_a_field_of_a_setting():
    grid = Grid.product([0, 4], 0.25, 2, "core", ledger="block")
    assert (grid.semantics, grid.ledger, grid.reading) == ("core", "block", Reading("core", "block"))
    assert grid.policy(1) == Policy(4.0, 0.25, 2.0, "core", ledger="block") != Policy(4.0, 0.25, 2.0, "core")
    assert grid.strict.policy(0) == Policy(0.0, 0.0, 0.0, "core", ledger="block")
    assert Grid.of([grid.policy(0), grid.policy(1)]).ledger == grid[1:].ledger == "block"
    assert grid.parameters(0) == "ledger=block"
    with pytest.raises(UsageError, match="several semantics or rules"):
        Grid.of([grid.policy(0), Policy(1.0, 0.25, 2.0, "core")])


def test_no_ledger_is_an_unlimited_budget():
    grid = Grid.product([0, 4], 0.25, 2, ledger="none")
    assert (grid.budget.tolist(), grid.ledger, grid.parameters(0)) == ([math.inf], "request", "")
    for make in (lambda: Grid.product(1, 1, 1, ledger="blok"), lambda: Policy(1.0, 1.0, 1.0, ledger="blok")):
        with pytest.raises(UsageError, match="did you mean 'block'"):
            make()


def test_a_covered_grid_keeps_its_ledger_on_disk():
    """The manifest names it apart from the semantics, as it always has."""
    grid = Grid.product([0.0, math.inf], 0.25, 2, "paper", ledger="block")
    entry = grid_entry(grid, False)
    assert entry == {
        "rule": "asd", "semantics": "paper", "regret": "logit", "value": "suffix", "ledger": "block",
        "B": [0.0, "inf"], "g": [0.25], "M": [2.0], "faithful": False,
    }  # fmt: skip
    [back] = covered_grids([entry])
    assert (back.reading, back.layout, back.budget.tolist()) == (grid.reading, grid.layout, grid.budget.tolist())
    assert "ledger" not in grid_entry(Grid.product(4, 0.25, 2), False)
