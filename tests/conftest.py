"""Settings of all tests, and a local S3 server."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import settings

# The same cases in every run; `pytest --hypothesis-profile explore` draws new ones.
settings.register_profile("seeded", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile("seeded")

KEY, SECRET = "AKIAEXAMPLEEXAMPLE77", "example/secret+of+the+tests"
"""What the environment holds for the server; neither may be written or printed."""


class S3:
    """A server on the loopback with one empty bucket for each test."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint, self.url = endpoint, ""
        self.requests: Counter[tuple[str, str]] = Counter()  # (method, key), since the test began

    def read(self) -> dict[str, bytes]:
        """Return every object of the bucket."""
        import s3fs

        store = s3fs.S3FileSystem()
        return {name: store.cat_file(name) for name in store.find(self.url)}


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3]:
    pytest.importorskip("s3fs")
    pytest.importorskip("upath")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    s3 = S3("http://{}:{}".format(*server.get_host_and_port()))

    class Noted(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if found := re.search(r"(GET|PUT|POST|HEAD|DELETE) /[^/ ]+/?([^ ]*) HTTP", record.getMessage()):
                s3.requests[found[1], found[2]] += 1

    log = logging.getLogger("werkzeug")
    level, log.propagate = log.level, False
    log.setLevel(logging.INFO)
    log.addHandler(handler := Noted())
    environment = {
        "AWS_ENDPOINT_URL": s3.endpoint, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield s3
    log.removeHandler(handler)
    log.setLevel(level)
    server.stop()


@pytest.fixture
def s3(s3_server: S3) -> S3:
    """A bucket of its own for each test; its address is in ``url``."""
    import secrets

    import s3fs

    bucket = f"bucket-{secrets.token_hex(6)}"
    s3fs.S3FileSystem().mkdir(bucket)
    s3_server.url = f"s3://{bucket}"
    s3_server.requests.clear()
    return s3_server
