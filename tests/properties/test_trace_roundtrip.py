"""A trace round-trips, whatever the shape of its steps, the number of its shards and the way it was closed."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from asdsim.trace import TraceWriter, read_trace
from tests.support.toytrace import ToyModel, toy_manifest, toy_requests
from tests.support.tracefiles import difference
from tests.unit.test_trace_store import assert_equal_records

MODELS = st.builds(
    ToyModel,
    seed=st.integers(0, 10**6),
    vocab_size=st.sampled_from([5, 9, 40, 300]),
    top_k=st.sampled_from([5]),
    widths=st.lists(st.integers(0, 16), min_size=1, max_size=4).map(tuple),
    agree=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    eos_ids=st.sampled_from([(), (2,), (2, 3)]),
    divergences=st.sampled_from([(), ("js",), ("kl", "reverse_kl", "js", "tv")]),
).map(lambda model: ToyModel(**{**model.__dict__, "top_k": min(8, model.vocab_size)}))


@settings(max_examples=40, deadline=None)
@given(
    model=MODELS,
    count=st.integers(1, 5),
    limit=st.integers(1, 20),
    cover=st.integers(0, 4),
    flushes=st.sets(st.integers(0, 9)),
    merge=st.booleans(),
)
def test_round_trip(model: ToyModel, count: int, limit: int, cover: int, flushes: set[int], merge: bool) -> None:
    requests = toy_requests(model, count, limit)
    content = [(request, model.decode(request)) for request in requests]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "t"
        writer = TraceWriter.create(folder, toy_manifest(model))
        for index, (request, steps) in enumerate(content):
            writer.add_request(request, steps)
            if index in flushes:
                writer.flush()
        for index, (request, steps) in enumerate(content):
            more = model.cover(request, steps, cover)
            writer.add_steps(request.request_id, more)
            steps += more
            if index + 5 in flushes:
                writer.flush()
        if merge:
            writer.close()
        else:
            writer.flush()
            writer.release()
        trace = read_trace(folder)
        assert trace.request_records() == requests
        logprobs = any(step.num_draft_tokens for _, steps in content for step in steps)
        for request, steps in content:
            found = trace.steps_of(request.request_id)
            if logprobs:
                assert_equal_records(found, steps)
            else:  # with no draft token at all, "none recorded" and "recorded, but none" are one
                assert [step.start_pos for step in found] == [step.start_pos for step in steps]
        regret = trace.column("positions", "top_logits")[:, 0] - trace.column("positions", "draft_logit")
        assert (regret[~np.isnan(regret)] >= 0).all()
        # Another pass over the same rows, through one shard per table.
        with TraceWriter.create(Path(name) / "again", trace.manifest) as writer:
            for record in trace.request_records():
                writer.add_request(record, trace.steps_of(record.request_id))
        assert difference(read_trace(Path(name) / "again"), trace) is None
