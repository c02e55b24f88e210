"""All draft heads: where their states come from, and that a proposal is a function of the prefix."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asdsim.capture.cover import BatchRunner, Job, Missing
from asdsim.capture.drafters import make_drafter
from asdsim.capture.drafters.heads import Head, HeadDrafter
from asdsim.capture.loop import decode
from asdsim.capture.record import Recorder
from asdsim.cli import main
from asdsim.engines.protocol import Proposal
from asdsim.engines.transformers.model import HFTarget
from asdsim.errors import CaptureError
from asdsim.live.cover import cover_with
from asdsim.live.verify import verify_trace
from asdsim.records import RequestRecord, StepRecord
from asdsim.rules.settings import STRICT, Grid, Policy
from asdsim.trace.reader import read_trace
from asdsim.trace.writer import TraceWriter
from tests.support.heads import dspark_config, dspark_tensors, eagle3_config, eagle3_tensors, medusa_tensors, save

from .conftest import VOCAB, generate
from .test_cover_models import manifest_of
from .test_devices import assert_same

Requests = Callable[..., list[RequestRecord]]

WIDTH, K = 32, 4
LOOSE = Policy(200, 100, 3)  # random heads guess badly: what they draft is accepted for a large budget only
GRID = Grid.product([0, 20, 200], [4, 100], [1, 3])
KINDS = ("medusa", "eagle3", "eagle3-small", "eagle3-window", "dspark")


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Drafter names of saved heads."""
    folder = tmp_path_factory.mktemp("heads")
    medusa = save(folder / "medusa", medusa_tensors(WIDTH, VOCAB, K), {}, "medusa_lm_head.pt")
    eagle3 = save(folder / "eagle3", eagle3_tensors(WIDTH, VOCAB), eagle3_config(WIDTH, VOCAB))
    small = eagle3_tensors(WIDTH, VOCAB, draft_vocab=40, seed=1)
    small_path = save(folder / "small", small, eagle3_config(WIDTH, VOCAB))
    window = save(folder / "window", eagle3_tensors(WIDTH, VOCAB, seed=2), eagle3_config(
        WIDTH, VOCAB, layer_types=["sliding_attention"], sliding_window=5))  # fmt: skip
    dspark = save(folder / "dspark", dspark_tensors(WIDTH, VOCAB, 2), dspark_config(WIDTH, VOCAB, K, (0, 2)))
    return {
        "medusa": f"medusa:{medusa}", "eagle3": f"eagle3:{eagle3}", "eagle3-small": f"eagle3:{small_path}",
        "eagle3-window": f"eagle3:{window}", "dspark": f"dspark:{dspark}",
    }  # fmt: skip


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, heads: dict[str, str], llama: Any) -> tuple[HFTarget, HeadDrafter]:
    target = HFTarget(llama, "tiny-llama")
    return target, make_drafter(heads[request.param], target, keep_logits=True)


def same(a: Proposal, b: Proposal) -> None:
    assert a.ids == b.ids
    if a.ids:
        torch.testing.assert_close(a.logits, b.logits, rtol=0, atol=1e-5)


def walk(rng: random.Random, steps: int) -> list[list[int]]:
    """Return prefixes as decoding meets them, and some that go back."""
    text = [rng.randrange(VOCAB) for _ in range(200)]
    at, found = 1, []
    for _ in range(steps):
        found.append(text[:at])
        if rng.random() < 0.25 and at > 3:
            at = rng.randrange(1, at)
            text[at:] = [rng.randrange(VOCAB) for _ in range(200 - at)]
        else:
            at += rng.randint(0, K + 1)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_incremental_is_from_scratch(pair: tuple[HFTarget, HeadDrafter], seed: int) -> None:
    target, drafter = pair
    verifying = target.session([])
    drafting = drafter.session_beside([], verifying)
    for prefix in walk(random.Random(seed), 25):
        proposal = drafting.propose(prefix, K)
        same(proposal, drafter.session([]).propose(prefix, K))
        assert (proposal.ids == []) == (len(prefix) < 2)
        verifying.score(prefix, proposal.ids)


def test_a_fork_goes_its_own_way(pair: tuple[HFTarget, HeadDrafter]) -> None:
    target, drafter = pair
    verifying = target.session([])
    drafting = drafter.session_beside([], verifying)
    common = [1, 2, 3, 4, 5]
    drafting.propose(common, K)
    twin = verifying.fork()
    forked = drafting.fork_beside(twin)
    other = drafting.fork()
    for session, tail in ((drafting, [6, 7]), (forked, [8]), (other, [9, 10, 11]), (drafting, [6, 7, 12])):
        same(session.propose(common + tail, K), drafter.session([]).propose(common + tail, K))


@pytest.mark.parametrize("kv_bytes", [0, 20_000, 1 << 30])
def test_many_are_one_by_one(pair: tuple[HFTarget, HeadDrafter], kv_bytes: int) -> None:
    target, drafter = pair
    pool = target.pooled(kv_bytes)
    batch = drafter.pooled_beside(pool, kv_bytes)
    rng = random.Random(1)
    for _ in range(4):
        prefixes = walk(rng, 7)
        proposals = batch.propose_many(prefixes, K)
        for prefix, proposal in zip(prefixes, proposals, strict=True):
            same(proposal, drafter.session([]).propose(prefix, K))
        for prefix, rows in zip(prefixes, pool.score_many(prefixes, [p.ids for p in proposals]), strict=True):
            expected = target.session([]).score(prefix, proposals[prefixes.index(prefix)].ids)
            torch.testing.assert_close(rows, expected, rtol=0, atol=1e-5)
    assert drafter.propose_many([], K) == [] and batch.propose_many([], K) == []
    for own, alone in zip(drafter.pooled(kv_bytes).propose_many(prefixes, K), proposals, strict=True):
        same(own, alone)


def test_proposals_nest_in_their_length(pair: tuple[HFTarget, HeadDrafter]) -> None:
    _, drafter = pair
    for prefix in walk(random.Random(2), 10):
        longest = drafter.session([]).propose(prefix, K)
        for width in range(1, K):
            short = drafter.session([]).propose(prefix, width)
            assert short.ids == longest.ids[:width]
            if short.ids:
                torch.testing.assert_close(short.logits, longest.logits[:width], rtol=0, atol=1e-5)


@pytest.mark.parametrize("policy", [STRICT, Policy(0, 1, 2)])
def test_zero_budget_is_what_generate_decodes(
    pair: tuple[HFTarget, HeadDrafter], requests: Requests, generated: Callable[..., list[int]], policy: Policy
) -> None:
    for request in requests(20, seed=5):
        assert decode(*pair, request, policy, K).tokens == generated(request)


@pytest.mark.parametrize("policy", [STRICT, LOOSE])
def test_no_token_runs_through_the_target_twice(
    pair: tuple[HFTarget, HeadDrafter], requests: Requests, monkeypatch: pytest.MonkeyPatch, policy: Policy
) -> None:
    target, drafter = pair
    run, counts = target.lm.run, []
    monkeypatch.setattr(target.lm, "run", lambda tokens, *rest: counts.append(tokens.numel()) or run(tokens, *rest))
    relaxed = 0
    for request in requests(6, seed=7):
        counts.clear()
        decoded = decode(target, drafter, request, policy, K, Recorder())
        blocks = [outcome.num_draft_tokens + 1 for outcome in decoded.outcomes]
        assert sum(counts) == len(request.prompt_ids) - 1 + sum(blocks)  # a block is the anchor and the draft
        assert counts == [len(request.prompt_ids) - 1, *blocks][len(request.prompt_ids) == 1 :]
        relaxed += sum(outcome.relaxed for outcome in decoded.outcomes)
    assert (relaxed > 10) == (policy is LOOSE)


def test_nor_in_a_batch_of_cover(
    pair: tuple[HFTarget, HeadDrafter], requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = pair
    counts: list[int] = []
    run = target.lm.run

    def counted(tokens: Any, cache: Any, keep: int, mask: Any, positions: Any) -> Any:
        counts.append(tokens.numel())
        return run(tokens, cache, keep, mask, positions)

    monkeypatch.setattr(target.lm, "run", counted)
    entries: list[int] = []  # of a head with a memory; an EAGLE head has none for the first token
    draft = drafter.head.draft_behind
    monkeypatch.setattr(
        drafter.head, "draft_behind", lambda tokens, *rest: entries.append(tokens.numel()) or draft(tokens, *rest)
    )
    runner = BatchRunner(target, drafter, K, Recorder())
    request = requests(1, seed=8, longest=24)[0]
    request = RequestRecord("r", "t", tuple(range(20)), "", None, 24, request.eos_ids, "fixed")
    jobs = [Job(request, n, 1, Missing(0, 0, 0, (30 + n,), 1)) for n in range(3)]
    steps = list(runner(jobs))
    assert [step.num_draft_tokens for step in steps] == [K] * 3
    assert counts == [3 * 20, 3 * (1 + K)]
    memory = drafter.head.memory()
    assert entries == ([] if memory is None else [3 * (20 + memory.lag)])
    counts.clear()
    entries.clear()
    later = [Job(request, 3, 2, Missing(0, 0, 0, (30, int(steps[0].draft_ids[0]), 77), 1))]
    list(runner(later))
    assert counts == [1 + K] and entries == ([] if memory is None else [2])


class Copying(Head):
    """Drafts what the target itself would say, by running it; looks at the states it is given."""

    kind, taps, token_ids = "copying", (0, 3, 1), None

    def __init__(self, target: HFTarget) -> None:
        super().__init__()
        self.target, self.seen = [target.model], 0
        self.hidden_size, self.vocab_size = WIDTH, VOCAB

    def draft(self, ids: list[int], states: torch.Tensor, memory: Any, width: int) -> Any:
        hidden = self.target[0](input_ids=torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
        torch.testing.assert_close(states, torch.cat([hidden[tap][0] for tap in self.taps], -1), rtol=0, atol=1e-5)
        self.seen += 1
        text, rows = ids[:], []
        for _ in range(width):
            rows.append(self.target[0](input_ids=torch.tensor([text])).logits[0, -1])
            text.append(int(rows[-1].argmax()))
        return text[len(ids) :], torch.stack(rows)

    def draft_many(self, ids: Any, states: Any, width: int, pool: Any = None) -> Any:
        return [self.draft(row, part, None, width) for row, part in zip(ids, states, strict=True)]


def test_a_head_that_copies_the_target_never_mismatches(llama: Any, requests: Requests) -> None:
    target = HFTarget(llama, "tiny-llama")
    drafter = HeadDrafter(Copying(target), target, "copying")
    for request in requests(8, seed=9):
        decoded = decode(target, drafter, request, STRICT, K, Recorder())
        assert decoded.tokens == generate(llama, request.prompt_ids, request.max_new_tokens)
        for step in decoded.steps[len(request.prompt_ids) == 1 :]:
            assert (step.draft_ids == step.argmax_ids[:K]).all() and step.num_draft_tokens == K
    assert drafter.head.seen > 20
    for many in (drafter, drafter.pooled(1 << 30)):
        many.propose_many([[1, 2, 3], [1, 2, 3, 4], [1, 2, 9, 8, 7, 6]], K)


def test_two_heads_share_a_target(llama: Any, heads: dict[str, str], requests: Requests) -> None:
    """The second taps more layers while sessions of the first are under way."""
    target = HFTarget(llama, "tiny-llama")
    first = make_drafter(heads["medusa"], target, keep_logits=True)
    verifying, pool = target.session([]), target.pooled(1 << 30)
    drafting, batch = first.session_beside([], verifying), first.pooled_beside(pool, 1 << 30)
    before, many = drafting.propose([1, 2, 3, 4], K), batch.propose_many([[1, 2, 3, 4]], K)
    second = make_drafter(heads["eagle3"], target, keep_logits=True)
    same(drafting.propose([1, 2, 3, 4], K), before)
    same(batch.propose_many([[1, 2, 3, 4]], K)[0], many[0])
    same(second.session_beside([], verifying).propose([1, 2, 3, 4], K), second.session([]).propose([1, 2, 3, 4], K))


def test_a_layer_that_the_target_lacks_is_refused(llama: Any) -> None:
    target = HFTarget(llama, "tiny-llama")
    with pytest.raises(CaptureError, match=r"hidden state 4, the target has 3 layers.*--draft-layer-ids"):
        target.tap((1, 4))


def covered(pair: tuple[HFTarget, HeadDrafter], path: Path, some: list[RequestRecord], **how: Any) -> list[StepRecord]:
    """Capture strictly and cover; return all steps."""
    recorder = Recorder(divergences=("js",))
    with TraceWriter.create(path, manifest_of(*pair, settings={"divergences": ["js"]})) as writer:
        for request in some:
            writer.add_request(request, decode(*pair, request, STRICT, K, recorder).steps)
    with TraceWriter.append(path) as writer:
        progress = cover_with(writer, pair, GRID, batch=5, **how)
    assert progress.complete and progress.steps_added > 5
    trace = read_trace(path)
    return [step for request in some for step in trace.steps_of(request.request_id)]


@pytest.mark.parametrize("faithful", [False, True])
def test_covered_walks_equal_live_decoding(
    pair: tuple[HFTarget, HeadDrafter], requests: Requests, tmp_path: Path, faithful: bool
) -> None:
    some = requests(3, seed=3, limit=16)
    steps = covered(pair, tmp_path / "trace", some, faithful=faithful)
    found = verify_trace(tmp_path / "trace", models=pair)
    assert (found.pairs, found.identical, found.not_captured) == (3 * len(GRID), 3 * len(GRID), 0)
    for kv_bytes in () if faithful else (20_000, 0):  # room for hardly any KV, or for none
        assert_same(covered(pair, tmp_path / str(kv_bytes), some, kv_bytes=kv_bytes), steps)


def test_a_group_is_covered_as_if_alone(pair: tuple[HFTarget, HeadDrafter], requests: Requests, tmp_path: Path) -> None:
    some = requests(3, seed=3, limit=16)
    together = covered(pair, tmp_path / "together", some, group=1)
    alone = [step for one in some for step in covered(pair, tmp_path / one.request_id.replace("/", "-"), [one])]
    assert_same(together, alone, tolerance=0)


def test_the_entries_of_a_head_count_in_the_bound(pair: tuple[HFTarget, HeadDrafter]) -> None:
    target, drafter = pair
    bound = 60_000
    scorer = target.pooled(bound)
    batch = drafter.pooled_beside(scorer, 0)  # the target's bound counts
    pools, rng, full, tipped = (scorer.pool, batch._pool), random.Random(5), 0, 0
    for _ in range(60):
        prefixes = walk(rng, 6)
        used = [len(pool._child) * pool._slot_bytes() for pool in pools]
        scorer.score_many(prefixes, [proposal.ids for proposal in batch.propose_many(prefixes, K)])
        if sum(used) >= bound:  # both were dropped, and hold this batch alone
            assert all(len(pool._child) <= sum(len(prefix) + K for prefix in prefixes) for pool in pools)
            full, tipped = full + 1, tipped + (used[0] < bound)
    assert full > 5 and (tipped > 0) == (drafter.head.memory() is not None)


def cli(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    return int(stopped.value.code or 0), out, err


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "dspark"])
def test_capture_cover_and_verify(
    saved: Path, heads: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    trace, flags = tmp_path / "t", []
    if kind == "eagle3":
        flags = ["--draft-layer-ids", "3,0,2", "--draft-rope-theta", "1000", "--divergences", "js"]
    status, out, err = cli(
        capsys, "capture", "-o", trace, "--target", saved / "model", "--drafter", heads[kind], "--K", K,
        "--task", f"jsonl:{saved / 'prompts.jsonl'}", "--limit", 3, "--max-new-tokens", 12, *flags,
    )  # fmt: skip
    assert (status, err) == (0, "")
    told = read_trace(trace).manifest.drafter
    assert (told["kind"], told["dtype"]) == (kind, "float32")
    if kind == "eagle3":
        assert told["taps"] == [3, 0, 2]
        assert told["overrides"] == {"layer_ids": [3, 0, 2], "rope_theta": 1000.0}
    status, out, _ = cli(capsys, "inspect", trace)
    assert status == 0 and heads[kind] in out
    settings = ("--B", "0,200", "--g", "100", "--M", "1,2")
    assert cli(capsys, "cover", trace, *settings)[0] == 0
    status, out, _ = cli(capsys, "verify", trace, "--json")
    found = json.loads(out)
    assert status == 0 and found["pairs"] == found["identical"] == 12
    moved = shutil.copytree(heads[kind].partition(":")[2], tmp_path / "moved")
    assert cli(capsys, "verify", trace, "--drafter", f"{kind}:{moved}", "--sample", 2)[0] == 0
    other = save(tmp_path / "other", eagle3_tensors(WIDTH, VOCAB, seed=8), eagle3_config(WIDTH, VOCAB))
    status, _, err = cli(capsys, "verify", trace, "--drafter", f"eagle3:{other}")
    assert status == 2 and f"captured with drafter {heads[kind]}, weights_sha256" in err
    # The weights alone do not say what a model computes.
    for flag, folder in (("--drafter", moved), ("--target", shutil.copytree(saved / "model", tmp_path / "target"))):
        file = folder / "config.json"
        content = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**content, "transformers_version": "0"}))
        spec = f"{kind}:{folder}" if flag == "--drafter" else folder
        assert cli(capsys, "verify", trace, flag, spec, "--sample", 1)[0] == 0
        file.write_text(json.dumps({**content, "rope_theta": 777.0, "rope_parameters": None}))
        for command in ("verify", "cover"):
            status, _, err = cli(capsys, command, trace, flag, spec, *(settings if command == "cover" else ()))
            assert status == 2 and f"{flag[2:]} " in err and "config_sha256" in err


@pytest.mark.parametrize(
    ("drafter", "flags", "text"),
    [
        ("eagle3:./nowhere", [], "no file or directory './nowhere'"),
        ("medusa", [], "names no head"),
        ("layer-skip:1", ["--draft-rope-theta", "5"], "--draft-rope-theta has no effect on drafter layer-skip"),
        ("eagle3", ["--draft-anchor", "first"], "--draft-anchor has no effect"),
        ("eagle3", ["--draft-layer-ids", "a,2"], "'a,2' is not a list of hidden states"),
        ("eagle3", ["--draft-rope-theta", "-5"], "is not a base"),
        ("dspark", ["--draft-anchor", "second"], "unknown draft anchor 'second'"),
    ],
)
def test_bad_flags_are_refused_before_anything_is_loaded(
    saved: Path, heads: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], drafter: str,
    flags: list[str], text: str,
) -> None:  # fmt: skip
    if flags and drafter in ("eagle3", "dspark"):
        drafter = f"{drafter}:{heads['eagle3'].partition(':')[2]}"
    status, _, err = cli(
        capsys, "capture", "-o", tmp_path / "t", "--target", saved / "model", "--drafter", drafter,
        "--task", f"jsonl:{saved / 'prompts.jsonl'}", *flags,
    )  # fmt: skip
    assert status == 2 and text in err and len(err.strip().splitlines()) == 1
    assert not (tmp_path / "t").exists()


def test_more_tokens_than_medusa_has_heads_are_refused(llama: Any, heads: dict[str, str], requests: Requests) -> None:
    target = HFTarget(llama, "tiny-llama")
    with pytest.raises(CaptureError, match=f"K={K + 1} is more than drafter medusa:.* can draft.*K <= {K}"):
        decode(target, make_drafter(heads["medusa"], target), requests(1)[0], STRICT, K + 1)


def test_a_model_that_forgets_drafts_as_well(heads: dict[str, str], requests: Requests) -> None:
    """Sliding windows cannot be cropped at will: sessions start anew, and batches run without a pool."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(3)
    model = MistralForCausalLM(
        MistralConfig(
            vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, sliding_window=8, initializer_range=0.15,
            bos_token_id=None, eos_token_id=7, pad_token_id=None,
        )
    ).eval()  # fmt: skip
    target = HFTarget(model, "mistral")
    assert not target.lm.rewinds
    drafter = make_drafter(heads["eagle3"], target, keep_logits=True)
    for request in requests(6, seed=11):
        decoded = decode(target, drafter, request, STRICT, K)
        assert decoded.tokens == generate(model, request.prompt_ids, request.max_new_tokens)
    prefixes = walk(random.Random(4), 6)
    for prefix, proposal in zip(prefixes, drafter.pooled(1 << 30).propose_many(prefixes, K), strict=True):
        same(proposal, drafter.session([]).propose(prefix, K))


def test_a_head_in_the_cache_of_the_hub(
    llama: Any, heads: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Laid out as the hub's own library lays it out; nothing is fetched."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--some--head"
    shutil.copytree(heads["eagle3"].partition(":")[2], repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    target = HFTarget(llama, "tiny-llama")
    told = make_drafter("eagle3:some/head", target, offline=True).describe()
    assert (told["name"], told["checkpoint"], told["revision"]) == ("eagle3:some/head", "some/head", commit)
    again = make_drafter("eagle3:some/head", target, offline=True, revision=commit)
    assert again.describe() == told
    for name, more in (("other/head", {}), ("some/head", {"revision": "f" * 40})):
        with pytest.raises(CaptureError, match="cannot load head"):
            make_drafter(f"eagle3:{name}", target, offline=True, **more)
