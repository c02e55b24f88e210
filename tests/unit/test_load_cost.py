"""Costs by batch: measured passes interpolated, the roofline beside published speeds, and what each says it assumes."""

from __future__ import annotations

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
import pytest

import asdsim
from asdsim.errors import UsageError
from asdsim.evaluate.cost import CostModel, Linear, fit_trace
from asdsim.evaluate.cost_spec import read_cost
from asdsim.evaluate.roofline import DEVICES, MISSED, Roofline, size_of
from asdsim.evaluate.step_table import StepTable, from_pass_rows

ROOT = Path(__file__).resolve().parents[2]
# vllm-mlx, pull request 763: M5 Max, one request, widths 1, 2, 3, 5, 8.
MLX = {1: 8.47, 2: 13.49, 3: 15.64, 5: 20.67, 8: 28.13}
MIXTRAL = {
    "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


def mlx() -> StepTable:
    return from_pass_rows([{"width": width, "milliseconds": ms} for width, ms in MLX.items()], "mlx")


def test_a_table_gives_back_what_was_measured_and_lines_between() -> None:
    table = mlx()
    for width, ms in MLX.items():
        assert float(table.pass_us(width)) == pytest.approx(1e3 * ms, rel=1e-12)
    assert float(table.pass_us(4)) == pytest.approx(1e3 * (15.64 + 20.67) / 2)
    assert table.verification(7, 0) == pytest.approx(28.13 / 8.47)
    assert table.notes() == ["drafting is taken to cost nothing: the table has no draft_milliseconds"]
    assert float(table.pass_us(9)) == pytest.approx(1e3 * (28.13 + (28.13 - 20.67) / 3))
    assert "extrapolated: width up to 9, measured up to 8" in table.notes()


def test_a_table_by_batch_and_context() -> None:
    rows = [
        {"batch": batch, "width": width, "milliseconds": 5 + batch + 0.5 * batch * width + 0.01 * batch * context,
         "context": context, "draft_milliseconds": 0.2 * (width - 1)}
        for batch in (1, 4) for width in (1, 4) for context in (100, 300)
    ]  # fmt: skip
    table = from_pass_rows(rows, "rows")
    # 2 requests of 3 tokens each on 50 tokens each: linear in all three.
    assert float(table.pass_us(6, 100, 2)) == pytest.approx(1e3 * (5 + 2 + 3 + 1.0))
    assert float(table.draft_us(3, 0, 2)) == pytest.approx(600) and float(table.draft_us(0, 0, 2)) == 0.0
    assert table.notes() == []
    times = table.times(4, 3, 10)
    assert times.memory[2, 6] + times.memory_per_context * 100 == pytest.approx(1e-3 * 11)
    assert times.draft[4, 3] == pytest.approx(6e-4)
    assert not any("extrapolated" in note for note in table.notes())  # what no iteration asks for is not asked


def test_cells_measured_at_other_contexts_are_brought_to_one() -> None:
    """5 + batch + .01 a token of context: batch 4 was measured at 300 tokens only, and is asked for at 100."""
    cells = [(1, 100), (1, 300), (4, 300)]
    rows = [{"batch": batch, "width": 1, "milliseconds": 5 + batch + 0.01 * batch * context, "context": context}
            for batch, context in cells]  # fmt: skip
    table = from_pass_rows(rows, "rows")
    for batch, context in [*cells, (4, 100), (2, 200)]:
        assert float(table.pass_us(batch, batch * context, batch)) == pytest.approx(
            1e3 * (5 + batch + 0.01 * batch * context)
        )


def test_prompts_are_read_along_their_line() -> None:
    rows = [{"width": 1, "milliseconds": 8}, *({"prompt": n, "milliseconds": 3 + 0.2 * n} for n in (20, 50, 100))]
    table = from_pass_rows(rows, "rows")
    assert float(table.first_us(0, 70)) == pytest.approx(1e3 * (3 + 14 + 8)) and not any(
        "prompt" in n for n in table.notes()
    )
    with pytest.raises(UsageError, match="no passes"):
        from_pass_rows(rows[1:], "rows")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"width": 0, "milliseconds": 1}], "row 1.*width 0 is no whole number"),
        ([{"width": 1}], "no milliseconds"),
        ([{"width": 1, "milliseconds": -2}], "is no time"),
        (
            [{"width": 1, "milliseconds": 1}, {"batch": 2, "width": 2, "milliseconds": 1}],
            "no row with batch 1 and width 2",
        ),
        ([{"width": 1, "milliseconds": 1, "micro": 3}], "unknown column"),
    ],
)
def test_tables_with_holes_are_refused(rows, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        from_pass_rows(rows, "rows")


def test_a_table_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "passes.csv"
    file.write_text("batch,width,milliseconds\n1,1,8.47\n1,8,28.13\n")
    assert float(read_cost(str(file)).pass_us(8)) == pytest.approx(28130)


def test_the_roofline_beside_published_speeds() -> None:
    spec = spec_from_file_location("roofline_rows", ROOT / "analysis" / "roofline.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, _, _, error, used in module.errors():
        assert abs(error) < (0.01 if used else 0.50 if "Mixtral" in name else 0.20), (name, error)
    errors = [one.error for one in module.STEPS]
    assert (min(errors), max(errors)) == pytest.approx(MISSED, abs=0.005)
    assert len({one.system.partition(",")[0] for one in module.STEPS}) >= 3
    page = (ROOT / "docs" / "load.md").read_text()
    for one in module.STEPS:
        told = (f"| {one.batch} | {one.width} | {one.predicted:.2f} | {one.ms:.2f} | {one.error:+.0%} |")  # fmt: skip
        assert f"| {one.system} | {one.model}, {one.bits:g} bits {told}" in page


def test_sizes_are_those_of_the_models() -> None:
    llama = size_of(
        {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 11008,
         "vocab_size": 32000}, "x",
    )  # fmt: skip
    embeddings = 32000 * 4096
    assert llama.dense + embeddings == pytest.approx(6.738e9, rel=1e-3)  # 6.74 B parameters, the norms left out
    assert llama.kv * 2 == 524_288  # bytes a token in bfloat16
    mixtral = size_of(MIXTRAL, "x")
    assert mixtral.dense + mixtral.expert * 8 + embeddings == pytest.approx(46.70e9, rel=1e-3)
    assert mixtral.used + embeddings == pytest.approx(12.88e9, rel=1e-3)
    assert float(mixtral.read(1.0)) == pytest.approx(mixtral.used)
    assert float(mixtral.read(1e4)) == pytest.approx(mixtral.dense + 8 * mixtral.expert)
    with pytest.raises(UsageError, match="kv_lora_rank"):
        size_of({**MIXTRAL, "kv_lora_rank": 512}, "x")


def test_the_roofline_turns_from_memory_to_arithmetic() -> None:
    cost = Roofline(DEVICES["h100"], size_of(MIXTRAL, "x"), 2, 16, 16, "head", "test")
    assert cost.verification(4, 500, 1) > 1.2  # more tokens meet more experts
    assert cost.verification(4, 500, 4096) > 4.0  # arithmetic
    times = cost.times(8, 4, 100)
    for batch, drafted, context in ((1, 0, 50), (8, 4, 4000), (3, 4, 900)):
        tokens = batch * (drafted + 1)
        whole = max(
            times.memory[batch, tokens] + times.memory_per_context * context,
            times.compute[batch, tokens] + times.compute_per_context * context,
        )
        assert whole == pytest.approx(1e-6 * float(cost.pass_us(tokens, context, batch)), rel=1e-6)
    assert times.draft[8, 0] == 0.0 and times.draft[8, 4] == pytest.approx(4 * times.draft[8, 1])


def test_a_roofline_on_the_command_line(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MIXTRAL))
    cost = read_cost(f"roofline:h100,model={config},draft=lookup,tp=2,bits=8")
    assert isinstance(cost, Roofline) and cost.tp == 2 and cost.bits == 8 and "not a measurement" in cost.notes()[0]
    for spec, message in (
        (f"roofline:h100,model={config}", "lacks draft"),
        (f"roofline:h1000,model={config},draft=head", "unknown device"),
        (f"roofline:h100,model={config},draft=head,tp=1.5", "tp=1.5"), ("roofline:h100,size=7", "unknown part"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            read_cost(spec)


def test_one_request_at_a_time_says_nothing_of_a_batch() -> None:
    model = fit_trace(asdsim.load(ROOT / "traces" / "smollm2-layerskip"))
    assert model.times(1, 7, 50).memory.shape == (2, 9)
    with pytest.raises(UsageError, match="nothing of a batch of 2"):
        model.times(2, 7, 50)
    assert "a pass over one token is taken to last as long as a verification" in model.notes()[0]
    assert CostModel(Linear(1), Linear(5, 1), Linear(0), Linear(9), "x").notes() == []


def test_a_table_of_one_batch_says_nothing_of_two() -> None:
    table = mlx()
    assert table.times(1, 7, 50).memory.shape == (2, 9)
    with pytest.raises(UsageError, match="a batch of 1, and say nothing of a batch of 2"):
        table.times(2, 7, 50)


def test_passes_that_spread_are_flagged() -> None:
    rows = [{"width": width, "milliseconds": 5, "draft_milliseconds": 1, "spread": spread}
            for width, spread in ((1, 0.02), (4, 0.3))]  # fmt: skip
    (note,) = from_pass_rows(rows, "rows").notes()
    assert note.startswith("these passes spread by 30%") and "means little" in note
    assert from_pass_rows(rows[:1], "rows").notes() == []


def test_a_batch_of_one_is_the_sum_of_its_steps() -> None:
    """The event loop and the sum over steps are one model."""
    from asdsim.walk.batch import Paths, simulate

    model = CostModel(Linear(1000, 50), Linear(2000, 100, 10), Linear(50), Linear(9000, 0, 20), "test")
    paths = Paths(np.array([0, 3]), np.array([5, 5, 5], np.int32), np.array([4, 4, 4], np.int32))
    served = simulate(paths, np.array([0]), np.array([30]), model.times(1, 5, 30), batch=1)
    first = float(model.first_us(0, 30) - model.step(0, 30) + model.step(5, 30))
    assert served.seconds == pytest.approx(1e-6 * (first + float(model.step(5, 34)) + float(model.step(5, 38))))


@pytest.mark.parametrize("key", ["head_dim", "num_key_value_heads", "num_attention_heads", "vocab_size"])
def test_no_size_of_a_model_is_0(tmp_path: Path, key: str) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**sizes, "intermediate_size": 128, key: 0}))
    with pytest.raises(UsageError, match=f"{key} is 0, not a whole number >= 1"):
        read_cost(f"roofline:h100,model={config},draft=lookup")
