"""A stand-in for the Hugging Face hub: the parquet branch of data sets, over HTTP on this machine.

It answers what ``huggingface_hub`` asks of a revision and of a file, as the hub's API documents them.
"""

from __future__ import annotations

import hashlib
import io
import json
import threading
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pyarrow as pa
from pyarrow import parquet

BRANCH = "refs/convert/parquet"
COMMIT = hashlib.sha1(b"asdsim").hexdigest()


def parquet_bytes(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Return rows as a parquet file."""
    out = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist([dict(row) for row in rows]), out)
    return out.getvalue()


@contextmanager
def hub(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[tuple[str, list[str]]]:
    """Serve the files of data sets; yield the address, and the list of what is asked.

    Parameters
    ----------
    repositories : mapping
        By name of a data set, its files: content by path.
    """
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None: ...

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            path = urllib.parse.unquote(self.path.partition("?")[0])
            asked.append(f"{self.command} {path}")
            for name, files in repositories.items():
                if path in (f"/api/datasets/{name}/revision/{revision}" for revision in (BRANCH, COMMIT)):
                    siblings = [{"rfilename": file} for file in files]
                    return self.send(json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode())
                if path in (f"/api/datasets/{name}/tree/{revision}" for revision in (BRANCH, COMMIT)):
                    tree = [
                        {"type": "file", "path": file, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                        for file, body in files.items()
                    ]
                    return self.send(json.dumps(tree).encode())
                file = path.removeprefix(f"/datasets/{name}/resolve/{COMMIT}/")
                if file != path and file in files:
                    return self.send(files[file], etag=hashlib.sha1(files[file]).hexdigest())
            return self.send(b"{}", status=404)

        def send(self, body: bytes, *, status: int = 200, etag: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Repo-Commit", COMMIT)
            if etag:
                self.send_header("ETag", f'"{etag}"')
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
