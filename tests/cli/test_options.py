"""What commands share: every wrong option at once, configuration files, --quiet and --verbose, progress, threads."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest

from asdsim.cli import COMMANDS, cli, command
from asdsim.cli.common import OutputPath
from tests.cli.test_rules import run, write


@pytest.mark.parametrize(
    ("args", "messages"),
    [
        (
            ["capture", "--K", "x"],
            ["Missing option '-o'", "Missing option '--task'", "'--K': 'x' is not a valid integer"],
        ),
        (["capture", "--limti", "3", "--K", "x"], ["No such option '--limti'", "--task", "'--K'"]),
        (["capture", "--ofline", "-o", "t"], ["--ofline", "Missing option '--task'"]),
        (["cover", "nowhere", "--batch", "x"], ["nowhere", "'--batch': 'x' is not a valid integer"]),
        (["convert-policy", "--K", "1.5", "--B", "many"], ["'--to'", "'--K': '1.5'", "'--B': 'many'"]),
        (["verify", "nowhere", "--seed", "x", "--sample", "y"], ["nowhere", "'--seed': 'x'", "'--sample': 'y'"]),
        (["timing", "--limit", "x"], ["'TRACE'", "'--policy'", "'--limit': 'x'"]),
    ],
)
def test_all_that_is_wrong_is_one_line(capsys, args: list[str], messages: list[str]) -> None:
    status, out, err = run(capsys, *args)
    assert (status, out) == (2, "") and err.count("\n") == 1 and err.count("asdsim: error: ") == 1
    for message in messages:
        assert err.count(message) == 1, (message, err)


def test_an_unknown_option_alone_keeps_its_message(capsys) -> None:
    status, _, err = run(capsys, "rules", "--jso")
    assert status == 2 and "--jso" in err and "--json" in err and "argument" not in err
    status, _, err = run(capsys, "capture", "--xyzzy", "7")
    assert status == 2 and "--xyzzy" in err and "argument" not in err
    status, _, err = run(capsys, "rules", "MARS", "x", "y")
    assert status == 2 and "unexpected extra argument" in err


def test_the_value_of_an_unknown_option_is_not_taken_for_the_trace(capsys, tmp_path: Path) -> None:
    trace = write(tmp_path / "t")
    only = "asdsim: error: No such option '--targte'. Did you mean '--target'?\n"
    assert run(capsys, "cover", "--targte", "3", trace)[::2] == (2, only)
    assert run(capsys, "cover", "--targte=3", trace)[::2] == (2, only)
    status, _, err = run(capsys, "cover", "--targte", 3, trace, "--ofline", "--group", "x")
    assert status == 2 and err.count(";") == 2 and "--ofline" in err and "'--group': 'x'" in err


def test_axes_that_are_missing_or_wrong_are_named_together(capsys, tmp_path: Path) -> None:
    trace = write(tmp_path / "t")
    status, _, err = run(capsys, "cover", trace, "--g", "x")
    assert status == 2 and "Missing options '--B', '--M'" in err and "g: 'x' is not a number" in err
    status, _, err = run(capsys, "cover", trace, "--B=-1", "--g", "1", "--M", ".5")
    assert status == 2 and "B=-1 is negative" in err and "M=0.5 is not a whole number" in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("g = .25\n", "(write 0.25)"),
        ("B = 1\ng = [1.0, -.5]\n", "(write -0.5)"),
        ("B = 3.\n", "(write 3.0)"),
        ("# .5\nB = +.5 # .7\n", "(write +0.5)"),
        ("B = 'x\n", "not valid TOML"),
        ('\ufeffB = 1\r\ng = "\u2028"\r\nx = 1\r\n', "unknown key 'x'"),
        ("capture = 3\n", "'capture' is not a table"),
        ('"\\u001b[31m" = 1\n', "unknown key '\\\\x1b[31m'"),
        ("[capture]\nK = {}\n", "key 'K' is a table"),
        ("x = " + "[" * 3000, "not valid TOML"),
        ("x = " + "9" * 5000, "not valid TOML"),
    ],
)
def test_a_bad_configuration_file_is_one_line(capsys, tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text, encoding="utf-8", newline="")
    status, out, err = run(capsys, "capture", "-o", tmp_path / "t", "--task", "gsm8k", "--config", file)
    assert (status, out) == (2, "") and message in err and str(file) in err and err.count("\n") == 1


def test_a_configuration_file_is_read_from_a_pipe_and_flags_win(capsys, tmp_path: Path) -> None:
    trace, file = write(tmp_path / "t"), tmp_path / "c.toml"
    file.write_text("\ufeffB = [0, 0.5]\r\n[replay]\r\ng = 1\r\nM = inf\r\n", encoding="utf-8", newline="")
    status, out, _ = run(capsys, "replay", trace, "--config", file, "--M", "1", "--json")
    assert status == 0 and out.count('"M": 1.0') == 2


def test_every_command_is_quiet_or_verbose_if_asked(capsys, tmp_path: Path) -> None:
    for name in COMMANDS:
        status, out, _ = run(capsys, name, "--help")
        assert status == 0 and "--quiet" in out and "--verbose" in out
    trace = write(tmp_path / "t")
    loud = run(capsys, "convert", trace, "-o", tmp_path / "a.jsonl")
    quiet = run(capsys, "convert", trace, "-o", tmp_path / "b.jsonl", "-q")
    assert "wrote 8 rows" in loud[2] and quiet == (loud[0], loud[1], "")
    status, _, err = run(capsys, "convert", tmp_path / "a.jsonl", "--from", "x", "--quiet")
    assert status == 2 and "unknown format 'x'" in err and "Traceback" not in err
    status, _, err = run(capsys, "convert", tmp_path / "a.jsonl", "--from", "x", "--verbose")
    assert status == 2 and "Traceback" in err and err.splitlines()[-1].startswith("asdsim: error: unknown format")


def test_progress_without_a_terminal_is_a_line_now_and_then(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(command.time, "monotonic", lambda: clock[0])
    with command.progress_bar(4, "capture", "request") as bar:
        for second in (10, 31, 40, 62):
            clock[0] = second
            bar.set_postfix_str(f"{second} tokens", refresh=False)
            bar.update(1)
    assert capsys.readouterr().err == (
        "asdsim: capture: 2 of 4 requests, 31 tokens (31 s)\nasdsim: capture: 4 of 4 requests, 62 tokens (62 s)\n"
    )
    silent = command.Lines(4, "capture", "request", silent=True)
    clock[0] = 1000
    silent.update()
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        written = ""

        def isatty(self) -> bool:
            return True

        def write(self, text: str) -> int:
            self.written += text
            return len(text)

        def flush(self) -> None: ...

    terminal: Any = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with command.progress_bar(2, "cover", "pair") as bar:
        bar.update(2)
        bar.refresh()
    assert "cover" in terminal.written and "2/2" in terminal.written


THREADS = """
import sys
from asdsim.cli import main
from asdsim.engines.transformers import load
load.check_name = lambda name: sys.exit(print(load.use_threads()))
import asdsim.capture.run as run
run.check_name = lambda name: None
run.load_prompts = lambda *args, **more: []
main(["capture", "-o", "/nowhere/t", "--task", "gsm8k", *sys.argv[1:]])
"""


@pytest.mark.parametrize(
    ("flags", "environment", "expected"),
    [
        (["--threads", "3"], {"OMP_NUM_THREADS": "2"}, "3"),
        ([], {"OMP_NUM_THREADS": "2"}, "2"),
        ([], {"ASDSIM_THREADS": "4", "OMP_NUM_THREADS": "2"}, "4"),
    ],
)
def test_threads_of_models(flags: list[str], environment: dict[str, str], expected: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, "-c", THREADS, *flags], capture_output=True, text=True, timeout=120,
        env={**os.environ, "ASDSIM_THREADS": "", **environment},
    )  # fmt: skip
    assert done.stdout.split() == [expected], done.stderr


def test_threads_leave_busy_cores_alone(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from asdsim.engines.transformers import load

    cores = load.Path("/nowhere")
    monkeypatch.setattr(load, "Path", lambda name: cores)  # every CPU a core, no quota
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for busy, expected in ((0.0, 8), (3.2, 5), (7.9, 1), (40.0, 1)):
        monkeypatch.setattr(os, "getloadavg", lambda busy=busy: (busy, 0.0, 0.0))
        assert load.idle_cores() == expected
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(os, "getloadavg", lambda: (4.0, 0.0, 0.0))  # a quarter of it on our two
    assert load.idle_cores() == 1
    status, _, err = run(capsys, "cover", "nowhere", "--threads", "0")
    assert status == 2 and "--threads" in err


@pytest.mark.parametrize(
    ("command_line", "name"),
    [
        ("report T -o", "manifest.json"),
        ("replay T --B 2 --g 1 --M 1 -o", "steps-00000.parquet"),
        ("audit T --sweep -o", "requests-00000.parquet"),
        ("calibrate T --quality agreement --table", "positions-00000.parquet"),
        ("calibrate T --quality agreement -o", "manifest.json"),
        ("convert T --B 2 --g 1 --M 1 -o", "vocabulary-0123456789ab.parquet"),
        ("profile T -o", "manifest.json"),
        ("convert-policy --B 2 --g 1 --M 1 --to core -o", "manifest.json"),
        ("judge T --policy p.json --cache", "manifest.json"),
    ],
)
def test_no_output_overwrites_a_file_of_a_trace(capsys, tmp_path: Path, command_line: str, name: str) -> None:
    trace = write(tmp_path / "T")
    before = {file.name: file.read_bytes() for file in trace.iterdir()}
    (tmp_path / "link").symlink_to(trace / name)
    for output in (trace / name, tmp_path / "link"):
        words = [trace if word == "T" else word for word in command_line.split()]
        status, out, err = run(capsys, *words, output)
        assert (status, out) == (2, ""), err
        assert f"{output}: is part of a trace" in err and "name a file outside the trace directory" in err
    assert {file.name: file.read_bytes() for file in trace.iterdir()} == before


def test_every_option_that_writes_a_file_refuses_files_of_a_trace() -> None:
    folders = {"advise", "capture", "compare", "demo", "fidelity", "plot"}
    options = {
        (name, option.name): isinstance(option.type, OutputPath)
        for name in COMMANDS
        for option in cli.get_command(click.Context(cli), name).params  # type: ignore[union-attr]
        if {"-o", "--output", "--table", "--cache"} & set(option.opts)
    }
    assert {name for (name, _), refuses in options.items() if not refuses} == folders and len(options) > 12


def test_an_output_of_another_name_may_lie_in_a_trace(capsys, tmp_path: Path) -> None:
    trace = write(tmp_path / "T")
    status, _, err = run(capsys, "replay", trace, "--B", 2, "--g", 1, "--M", 1, "-o", trace / "rows.parquet")
    assert status == 0 and (trace / "rows.parquet").exists(), err


def test_threads_that_wait_do_not_spin_unless_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set before torch loads OpenMP, which reads it once."""
    capture = import_module("asdsim.cli.capture").command
    option = next(param for param in capture.params if param.name == "threads")
    with capture.make_context("capture", [], resilient_parsing=True) as context:
        for before, loaded, after in ((None, False, "PASSIVE"), ("ACTIVE", False, "ACTIVE"), (None, True, None)):
            monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
            if before:
                monkeypatch.setenv("OMP_WAIT_POLICY", before)
            modules = {name: held for name, held in sys.modules.items() if name != "torch"}
            monkeypatch.setattr(sys, "modules", modules | ({"torch": sys} if loaded else {}))
            assert option.callback is not None
            option.callback(context, option, None)
            assert os.environ.get("OMP_WAIT_POLICY") == after
            monkeypatch.undo()
