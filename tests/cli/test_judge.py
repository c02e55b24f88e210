"""``asdsim judge`` against a stub of an endpoint on the loopback."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asdsim.cli import main
from asdsim.evaluate.judge import Answers, Endpoint, question, verdict_of
from asdsim.studies.judge import RIDGE, win_rates
from tests.cli.test_quality import AXES, CAL, HELD, run


class Stub(HTTPServer):
    """A judge: ``decide`` maps both answers to a text; ``failures`` are sent before the first answer."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.decide: Any = lambda first, second: "[[C]]"
        self.failures: list[int] = []
        self.seen: list[tuple[dict[str, Any], str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Stub

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((body, self.headers["Authorization"]))
        assert self.path == "/v1/chat/completions"
        if self.server.failures:
            self.send_response(self.server.failures.pop(0))
            self.end_headers()
            return
        text = body["messages"][1]["content"]
        first, second = re.search(r"# Answer A\n\n(.*)\n\n# Answer B\n\n(.*)\n\n# End", text, re.DOTALL).groups()
        reply = {"choices": [{"message": {"content": self.server.decide(first, second)}}]}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr("asdsim.evaluate.judge.time.sleep", lambda seconds: None)
    server = Stub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("policy") / "policy.json"
    with pytest.raises(SystemExit):
        main(["calibrate", str(CAL), "-o", str(file), *AXES, "--resamples", "50"])
    return file


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode to the sum of the tokens, without a tokenizer."""
    decode = lambda *_, **__: lambda ids: f"answer {sum(ids)}"  # noqa: E731
    monkeypatch.setattr("asdsim.engines.transformers.text.load_decoder", decode)


def by_letters(first: str, second: str) -> str:
    a, b = (int(re.sub(r"\D", "", text) or 0) for text in (first, second))
    return "I think [[B]], no: " + ("[[A]]" if a > b else "[[B]]" if b > a else "[[C]]")


def test_the_cost_is_shown_first_and_nothing_is_paid_twice(
    capsys, tmp_path: Path, stub: Stub, policy: Path, words, monkeypatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    stub.decide = by_letters
    asked = ["judge", HELD, "--policy", policy, "--endpoint", stub.url, "--model", "m", "--key-env", "JUDGE_KEY",
             "--cache", tmp_path / "c.sqlite", "--resamples", 200]  # fmt: skip
    status, out, err = run(capsys, *asked, "--price", "2,10")
    assert status == 0 and "nothing was asked" in out and not stub.seen
    calls, read, written = map(int, re.search(r"(\d+) comparisons .*some (\d+) tokens .*most (\d+) to", err).groups())
    assert f"at most some {(2 * read + 10 * written) / 1e6:.2f} at these prices" in err and 0 < calls <= 16
    status, out, err = run(capsys, *asked, "--yes", "--json")
    judged = json.loads(out)["judged"]
    assert status == 0 and len(stub.seen) == calls == 2 * (8 - judged["equal"])
    assert judged["wins"] + judged["losses"] + judged["ties"] == json.loads(out)["pairs"] == 8
    assert judged["no_verdict"] == 0 and judged["ties"] == judged["equal"]
    assert judged["win_rate"][0] == (judged["wins"] + judged["ties"] / 2) / 8
    assert all(key == "Bearer secret" and body["temperature"] == 0 for body, key in stub.seen)
    status, again, err = run(capsys, *asked, "--json")
    assert json.loads(again)["judged"] == judged and len(stub.seen) == calls and "0 comparisons" in err
    assert "secret" not in (tmp_path / "c.sqlite").read_bytes().decode("latin-1")


def test_a_judge_that_always_says_a_gives_ties_and_one_without_a_verdict_nothing(
    capsys, tmp_path: Path, stub: Stub, policy: Path, words
) -> None:
    asked = ["judge", HELD, "--policy", policy, "--endpoint", stub.url, "--resamples", 50, "--yes"]
    stub.decide = lambda first, second: "[[A]]"
    _, out, _ = run(capsys, *asked, "--model", "m", "--cache", tmp_path / "a")
    assert "0 wins, 0 losses, 8 ties" in out and "win rate (50 %: no difference): 50.0" in out
    stub.decide = lambda first, second: "I cannot tell."
    _, out, _ = run(capsys, *asked, "--model", "n", "--cache", tmp_path / "a")
    equal = int(re.search(r"\((\d+) of them equal", out)[1])
    assert (f"{8 - equal} without a verdict, not counted" in out) or equal == 8


def test_servers_that_fail(tmp_path: Path, stub: Stub) -> None:
    from asdsim.errors import EngineError

    asked = question("p", "1", "2")
    with Answers(tmp_path / "c") as answers:
        stub.failures = [503, 429]
        assert verdict_of(answers.ask(Endpoint(stub.url, "m"), asked)) == "C" and len(stub.seen) == 3
        assert answers.known(Endpoint("http://elsewhere", "m"), asked) == "[[C]]"
        assert answers.known(Endpoint(stub.url, "other"), asked) is None
        stub.failures = [401]
        with pytest.raises(EngineError, match="answers 401"):
            answers.ask(Endpoint(stub.url, "k"), asked)
        stub.failures = [500] * 3
        with pytest.raises(EngineError, match="answers 500"):
            answers.ask(Endpoint(stub.url, "k"), asked)
        with pytest.raises(EngineError, match="cannot reach the judge"):
            answers.ask(Endpoint("http://127.0.0.1:9/v1", "k"), asked)


@pytest.mark.parametrize(("text", "verdict"), [("[[A]]", "A"), ("[[A]] or [[B]]", "B"), ("[A]", None), ("[[D]]", None)])
def test_verdicts(text: str, verdict: str | None) -> None:
    assert verdict_of(text) == verdict


def test_win_rates_at_equal_length() -> None:
    rng = np.random.default_rng(3)
    longer = rng.normal(0, 100, 3000)
    x = np.tanh(longer / longer.std())
    for theta, phi in ((0.0, 2.0), (0.5, 1.0), (-0.4, 0.0)):
        won = (rng.random(3000) < 1 / (1 + np.exp(-(theta + phi * x)))).astype(float)
        plain, equal = win_rates(won, longer, 80)
        assert plain[0] == won.mean() and equal[1] < 1 / (1 + np.exp(-theta)) < equal[2]
    # Longer answers win because they are longer: nothing is left at equal length.
    long = rng.normal(200, 100, 3000)
    won = (rng.random(3000) < 1 / (1 + np.exp(-2 * np.tanh(long / long.std())))).astype(float)
    plain, equal = win_rates(won, long, 80)
    assert plain[1] > 0.75 and equal[1] < 0.5 < equal[2]


def test_win_rates_without_a_difference_or_with_nothing_else() -> None:
    plain, equal = win_rates(np.full(20, 0.5), np.zeros(20), 50)
    assert plain[0] == equal[0] == 0.5
    plain, equal = win_rates(np.ones(20), np.zeros(20), 50)
    assert plain[0] == 1.0 and 0.9 < equal[0] < 1.0 and RIDGE > 0  # finite
    assert np.isnan(win_rates(np.zeros(0), np.zeros(0), 50)).all()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--endpoint", "localhost"], "is no address"),
        (["--price", "2"], "is not READ,WRITTEN"),
        (["--price", "-1,2"], "negative"),
    ],
)
def test_what_is_refused(capsys, tmp_path: Path, policy: Path, words, flags: list[str], message: str) -> None:
    asked = ["judge", HELD, "--policy", policy, "--endpoint", "http://127.0.0.1:9/v1", "--model", "m", *flags]
    status, out, err = run(capsys, *asked, "--cache", tmp_path / "c")
    assert status == 2 and message in err and not out and err.count("\n") == 1
