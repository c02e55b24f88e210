"""``asdsim capture`` from end to end on a tiny model, and every bad input: one line, exit code 2, nothing written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asdsim.cli import main
from asdsim.trace import read_trace
from tests.capture.conftest import EOS, VOCAB, generate, tiny_llama
from tests.support.tracefiles import difference

Capsys = pytest.CaptureFixture[str]


def run(capsys: Capsys, *args: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["capture", *map(str, args)])
    out, err = capsys.readouterr()
    return int(stopped.value.code or 0), out, err


def usual(saved: Path, out: Path, *more: object) -> list[object]:
    return [
        "-o", out, "--target", saved / "model", "--drafter", "layer-skip:1",
        "--task", f"jsonl:{saved / 'prompts.jsonl'}", "--max-new-tokens", 20, "--K", 4, *more,
    ]  # fmt: skip


def test_a_capture_is_a_valid_trace_of_what_was_decoded(saved: Path, tmp_path: Path, capsys: Capsys) -> None:
    status, out, err = run(capsys, *usual(saved, tmp_path / "t", "--limit", 6, "--offset", 2, "--json"))
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert (found["schema_version"], found["command"]) == (1, "capture")
    row = found["rows"][0]
    trace = read_trace(tmp_path / "t")
    assert trace.request_ids() == [f"prompts/{n}" for n in range(2, 8)]
    assert trace.manifest.num_draft_tokens == 4 and trace.manifest.vocab_size == VOCAB
    assert trace.manifest.tasks == ["jsonl:prompts.jsonl"] and trace.manifest.rule == {"name": "strict"}
    assert row["requests"] == 6 and row["num_spec_steps"] == trace.steps.num_rows
    assert row["mean_acceptance_length"] == row["completion_tokens"] / row["num_spec_steps"]
    model = tiny_llama()
    total = 0
    for request in trace.request_records():
        tokens = generate(model, request.prompt_ids, 20)
        total += len(tokens)
        assert request.eos_ids == (EOS,) and request.reference is not None
        ends = {step.start_pos for step in trace.steps_of(request.request_id)}
        assert max(ends) < len(tokens) and 0 in ends
    assert row["completion_tokens"] == total


def test_rules_drafters_and_fixed_length(saved: Path, tmp_path: Path, capsys: Capsys) -> None:
    status, out, _ = run(
        capsys,
        *usual(saved, tmp_path / "a", "--limit", 3, "--rule", "asd", "--B", 4, "--g", ".5", "--M", 2),
        "--drafter", "lookup:2", "--stop", "fixed", "--divergences", "",
    )  # fmt: skip
    assert status == 0 and "3 requests captured" in out and "mean_acceptance_length" in out
    manifest = read_trace(tmp_path / "a").manifest
    assert manifest.rule == {"name": "asd", "B": 4.0, "g": 0.5, "M": 2.0, "semantics": "paper"}
    assert manifest.drafter == {"name": "lookup:2", "kind": "lookup", "ngram": 2} and manifest.stop == "fixed"
    status, out, _ = run(
        capsys, *usual(saved, tmp_path / "b", "--limit", 2, "--divergences", "kl,tv", "--json"),
        "--drafter", f"model:{saved / 'model'}", "--rule", "asd", "--B", "inf",
    )  # fmt: skip
    assert status == 0
    trace = read_trace(tmp_path / "b")
    assert trace.manifest.rule == {"name": "asd", "B": "inf", "g": "inf", "M": "inf", "semantics": "paper"}
    assert json.loads(out)["rows"][0]["accepted_per_proposal"] > 2  # the drafter is the target
    assert np.nanmax(trace.column("positions", "kl")) < 1e-6


def test_a_finished_capture_is_refused_or_resumed(saved: Path, tmp_path: Path, capsys: Capsys) -> None:
    short = usual(saved, tmp_path / "t", "--limit", 4)
    assert run(capsys, *short)[0] == 0
    before = {p.name: p.read_bytes() for p in (tmp_path / "t").iterdir()}
    status, _, err = run(capsys, *short)
    assert status == 2 and "already holds a trace" in err and "--resume" in err
    status, _, err = run(capsys, *short, "--resume", "--K", 5)
    assert status == 2 and "num_draft_tokens is 4 there and 5 now" in err
    assert {p.name: p.read_bytes() for p in (tmp_path / "t").iterdir()} == before
    status, out, _ = run(capsys, *short, "--resume", "--json")
    row = json.loads(out)["rows"][0]
    assert (status, row["requests"], row["skipped"], row["mean_acceptance_length"]) == (0, 0, 4, None)


def test_other_prompts_under_the_same_name_are_another_run(saved: Path, tmp_path: Path, capsys: Capsys) -> None:
    mine = tmp_path / "prompts.jsonl"
    mine.write_text('{"prompt": "w1 w2"}\n{"prompt": "w3"}\n')
    args = [*usual(saved, tmp_path / "t"), "--task", f"jsonl:{mine}"]
    assert run(capsys, *args)[0] == 0
    mine.write_text('{"prompt": "w1 w2"}\n{"prompt": "w4"}\n')
    status, _, err = run(capsys, *args, "--resume")
    assert status == 2 and "settings.prompts_sha256" in err


BAD: dict[str, tuple[list[str], str]] = {
    "target": (["--target", "smolm2-135m"], "did you mean 'smollm2-135m'"),
    "target path": (["--target", "./nowhere"], "there is no directory './nowhere'"),
    "drafter": (["--drafter", "lokup"], "did you mean 'lookup'"),
    "drafter layers": (["--drafter", "layer-skip:7"], "layer 7 does not exist, the target has 3 layers"),
    "drafter model": (["--drafter", "model:./nowhere"], "there is no directory"),
    "task": (["--task", "gsmk8"], "did you mean 'gsm8k'"),
    "task file": (["--task", "jsonl:/nowhere.jsonl"], "there is no file '/nowhere.jsonl'"),
    "task twice": (["--task", "humaneval,humaneval"], "twice"),
    "task argument": (["--task", "humaneval:x"], "humaneval:x: there is no such split or file"),
    "rule": (["--rule", "asdd"], "did you mean 'asd'"),
    "B under strict": (["--B", "1"], "--B has no effect under --rule strict"),
    "no B": (["--rule", "asd"], "needs a budget"),
    "negative B": (["--rule", "asd", "--B=-1"], "B=-1 is negative"),
    "NaN g": (["--rule", "asd", "--B", "1", "--g", "nan"], "g is NaN"),
    "broken M": (["--rule", "asd", "--B", "1", "--M", "1.5"], "M=1.5 is not a whole number"),
    "many B": (["--rule", "asd", "--B", "1,2"], "names 2 values"),
    "endless B": (["--rule", "asd", "--B", "0:inf:1"], "never ends"),
    "K": (["--K", "0"], "--K 0 is too small"),
    "tokens": (["--max-new-tokens", "0"], "--max-new-tokens 0 is too small"),
    "positions": (["--max-new-tokens", "9999"], "but the target has 256"),
    "limit": (["--limit", "0"], "--limit 0 is too small"),
    "offset": (["--offset", "99"], "none after offset 99"),
    "negative offset": (["--offset", "-1"], "--offset -1 is too small"),
    "top-k": (["--top-k", "3"], "--top-k 3 is too small"),
    "temperature": (["--temperature", "0.7"], "only greedy decoding"),
    "stop": (["--stop", "naturl"], "did you mean 'natural'"),
    "dtype": (["--dtype", "float31"], "did you mean 'float32'"),
    "logits dtype": (["--logits-dtype", "flot32"], "did you mean 'float32'"),
    "device": (["--device", "nonsense"], "unknown device 'nonsense'"),
    "divergence": (["--divergences", "kl,reverse-kl"], "did you mean 'reverse_kl'"),
    "lookup divergence": (["--drafter", "lookup", "--divergences", "kl"], "no distribution"),
    "flag": (["--limti", "3"], "--limti"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_nothing_written(case: str, saved: Path, tmp_path: Path, capsys: Capsys) -> None:
    flags, message = BAD[case]
    status, out, err = run(capsys, *usual(saved, tmp_path / "t"), *flags)
    assert (status, out) == (2, "")
    assert message in err and err.startswith("asdsim: error: ") and err.count("\n") == 1
    assert not (tmp_path / "t").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_cuda_device(saved: Path, tmp_path: Path, capsys: Capsys) -> None:
    status, _, err = run(capsys, *usual(saved, tmp_path / "t"), "--device", "cuda")
    assert status == 2 and "there is no CUDA device here" in err
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{]\n", "prompts.jsonl, line 1: not valid JSON"),
        ('{"prompt": "w1"}\n[1]\n', "prompts.jsonl, line 2, item 1: not a JSON object"),
        ('{"prompt": 5}\n', "prompts.jsonl, line 1: prompt is 5, not a prompt"),
        ('{"turns": []}\n', "prompts.jsonl, line 1: turns is [], not a list with a prompt"),
        ('{"id": "a", "prompt": "w1"}\n{"id": "a", "turns": ["w2"]}\n', "two prompts are called 'a'"),
        ("\n", "the file holds no prompt"),
        (b"\xff\xfe", "prompts.jsonl: text in UTF-16"),
        (b'{"prompt": "\xff"}', "prompts.jsonl, line 1: not text in UTF-8"),
    ],
)
def test_bad_prompt_files(text: str | bytes, message: str, saved: Path, tmp_path: Path, capsys: Capsys) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    status, _, err = run(capsys, *usual(saved, tmp_path / "t"), "--task", f"jsonl:{file}")
    assert status == 2 and message in err and err.count("\n") == 1
    assert not (tmp_path / "t").exists()


def test_outputs_that_hold_something_else(saved: Path, tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    for name, message in (("file", "is a file"), ("full", "not empty")):
        for more in ([], ["--resume"]):
            status, _, err = run(capsys, *usual(saved, tmp_path / name), *more)
            assert status == 2 and err.count("\n") == 1
            assert message in err or more
    assert (tmp_path / "file").read_text() == (tmp_path / "full" / "notes.txt").read_text() == "mine"


def test_models_that_cannot_be_read(saved: Path, tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "empty").mkdir()
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in (saved / "model").iterdir():
        (broken / file.name).write_bytes(file.read_bytes()[: 3000 if file.suffix == ".safetensors" else None])
    mute = tmp_path / "mute"
    tiny_llama().save_pretrained(mute)
    for name, message in (
        ("empty", "cannot load model"),
        ("broken", "cannot load model"),
        ("mute", "the target has no tokenizer"),
    ):
        status, _, err = run(capsys, *usual(saved, tmp_path / "t"), "--target", tmp_path / name)
        assert status == 2 and message in err.splitlines()[-1], err
        assert not (tmp_path / "t").exists()


def test_a_model_that_goes_wrong_half_way_leaves_a_readable_trace(
    saved: Path, tmp_path: Path, capsys: Capsys
) -> None:  # fault 8, from end to end
    sick = tiny_llama()
    with torch.no_grad():
        sick.model.embed_tokens.weight[50] = float("nan")
    sick.save_pretrained(tmp_path / "sick")
    for file in (saved / "model").glob("tokenizer*"):
        (tmp_path / "sick" / file.name).write_bytes(file.read_bytes())
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "w1 w2"}\n{"prompt": "w3 w50"}\n')
    status, _, err = run(
        capsys, *usual(saved, tmp_path / "t", "--flush-every", 1, "--max-new-tokens", 2),
        "--target", tmp_path / "sick", "--drafter", "lookup", "--task", f"jsonl:{prompts}",
    )  # fmt: skip
    assert status == 2
    assert "request prompts/1, step 0, position 0: the target's logits hold NaN" in err
    assert read_trace(tmp_path / "t").request_ids() == ["prompts/0"]


def test_ctrl_c_keeps_what_is_done_and_resume_finishes(saved: Path, tmp_path: Path, capsys: Capsys) -> None:
    from asdsim.capture import run as runs

    plain = usual(saved, tmp_path / "whole", "--limit", 6)
    assert run(capsys, *plain)[0] == 0

    def stop(what: str, done: int, total: int, tokens: int) -> None:
        if what == "capture" and done == 3:
            raise KeyboardInterrupt

    fields: dict[str, Any] = {"target": str(saved / "model"), "drafter": "layer-skip:1"}
    plan = runs.Plan(
        out=tmp_path / "t", task=f"jsonl:{saved / 'prompts.jsonl'}", limit=6, K=4, max_new_tokens=20, **fields
    )
    summary = runs.capture(plan, stop)
    assert summary.interrupted and summary.requests == 3
    assert read_trace(tmp_path / "t").requests.num_rows == 3
    assert run(capsys, *usual(saved, tmp_path / "t", "--limit", 6, "--resume"))[0] == 0
    assert difference(read_trace(tmp_path / "t"), read_trace(tmp_path / "whole"), times=False) is None


def test_help_loads_no_model_code() -> None:
    code = "import sys; from asdsim.cli import main\ntry: main(['capture', '--help'])\nexcept SystemExit: pass\n"
    code += "print([m for m in ('torch', 'transformers', 'polars', 'numba', 'pyarrow') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert done.stdout.splitlines()[-1] == "[]" and "--max-new-tokens" in done.stdout, done.stderr


def test_all_that_is_wrong_with_a_capture_is_one_line(saved: Path, tmp_path: Path, capsys: Capsys) -> None:
    flags = ["--K", "0", "--stop", "naturl", "--rule", "asd", "--template-date", "x", "--target", "./nowhere"]
    status, out, err = run(capsys, *usual(saved, tmp_path / "t"), *flags, "--temperature", "1")
    assert (status, out) == (2, "") and err.count("\n") == 1
    for message in ("--K 0 is too small", "'natural'?", "needs a budget", "is not a date", "./nowhere", "greedy"):
        assert err.count(message) == 1, err
