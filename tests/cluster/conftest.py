"""The tiny model of tests/capture, and one cluster of two cores for all tests of a process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.capture.conftest import one_thread, saved  # noqa: F401  (fixtures)
from tests.conftest import S3

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster(s3_server: S3) -> Iterator[Any]:
    """Two cores, and two GPUs that nothing asks for anything: what is tested of them is where replicas go.

    Replicas find a store in their environment, which is that of the cluster when it starts.
    """
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))  # replicas import the tests' own ones
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        patch.setenv("RAY_worker_register_timeout_seconds", "600")
        for last in (False, False, True):  # a busy machine starts Ray's processes too slowly at times
            try:
                ray.init(
                    address="local", num_cpus=2, num_gpus=2, include_dashboard=False, object_store_memory=100 << 20,
                    log_to_driver=False, logging_level="ERROR",
                )  # fmt: skip
                break
            except Exception:
                ray.shutdown()
                if last:
                    raise
        yield ray
        ray.shutdown()
