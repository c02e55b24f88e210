"""Three hundred damaged trace directories: each is refused with a clear error, or reads equal.

Damage is drawn from a seed per case: bytes flipped, overwritten, cut off, appended or moved; shards dropped, emptied,
doubled, swapped or renamed; the manifest edited as text, as JSON, and as JSON with its checksum computed anew.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asdsim.errors import AsdsimError
from asdsim.trace import Trace, read_trace
from tests.support.toytrace import ToyModel, write_toy_trace
from tests.support.tracefiles import difference, edit_manifest

CASES = 300


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "t"
    write_toy_trace(path, ToyModel(seed=3, widths=(0, 1, 3, 7)), cover=2, shards=3)
    return path


@pytest.fixture(scope="module")
def intact(base: Path) -> Trace:
    return read_trace(base)


def any_file(rng: random.Random, folder: Path) -> Path:
    return rng.choice(sorted(folder.iterdir()))


def any_shard(rng: random.Random, folder: Path) -> Path:
    return rng.choice(sorted(folder.glob("*.parquet")))


def flip_bits(rng: random.Random, folder: Path) -> None:
    file = any_file(rng, folder)
    data = bytearray(file.read_bytes())
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def overwrite(rng: random.Random, folder: Path) -> None:
    file = any_file(rng, folder)
    data = bytearray(file.read_bytes())
    at = rng.randrange(len(data))
    count = rng.randint(1, 64)
    data[at : at + count] = rng.choice([bytes(count), rng.randbytes(count), b"\xff" * count])
    file.write_bytes(data)


def cut(rng: random.Random, folder: Path) -> None:
    file = any_file(rng, folder)
    data = file.read_bytes()
    file.write_bytes(data[: rng.choice([0, 1, 4, len(data) // 2, len(data) - 1, rng.randrange(len(data))])])


def append(rng: random.Random, folder: Path) -> None:
    with any_file(rng, folder).open("ab") as handle:
        handle.write(rng.choice([b"\n", b" ", b"\0", b"PAR1", rng.randbytes(20)]))


def move_bytes(rng: random.Random, folder: Path) -> None:
    file = any_file(rng, folder)
    data = file.read_bytes()
    a, b = sorted(rng.randrange(len(data)) for _ in range(2))
    file.write_bytes(data[:a] + data[b:] + data[a:b])


def drop(rng: random.Random, folder: Path) -> None:
    any_file(rng, folder).unlink()


def make_directory(rng: random.Random, folder: Path) -> None:
    file = any_file(rng, folder)
    file.unlink()
    file.mkdir()


def swap(rng: random.Random, folder: Path) -> None:
    one, other = rng.sample(sorted(folder.glob("*.parquet")), 2)
    a, b = one.read_bytes(), other.read_bytes()
    one.write_bytes(b)
    other.write_bytes(a)


def double(rng: random.Random, folder: Path) -> None:
    one, other = rng.sample(sorted(folder.glob("*.parquet")), 2)
    shutil.copy(one, other)


def rename(rng: random.Random, folder: Path) -> None:
    file = any_file(rng, folder)
    file.rename(file.with_name(rng.choice([f"x{file.name}", "steps-00099.parquet", file.name.upper()])))


def add_stranger(rng: random.Random, folder: Path) -> None:
    shutil.copy(any_shard(rng, folder), folder / rng.choice(["steps-00077.parquet", ".tmp-x", "README.md"]))


VALUES = [None, True, -1, 0, 1, 7, 2**31, 2**70, 1.5, 1e400, "", "x", "\ud800", [], [1], {}, {"a": 1}]


def edit_text(rng: random.Random, folder: Path) -> None:
    file = folder / "manifest.json"
    text = file.read_text()
    at = rng.randrange(len(text))
    file.write_text(text[:at] + rng.choice(["", " ", '"', "0", "}", "\\u", "é"]) + text[at + rng.randint(0, 1) :])


def edit_json(rng: random.Random, folder: Path, *, sign: bool = False) -> None:
    """Change one field: any where the checksum is left alone; with it, one that the shards must agree with."""

    def edit(content: dict[str, Any]) -> None:
        shard = rng.choice(content["shards"])
        bound = ["schema_version", "vocab_size", "top_k", "shards", "target", "drafter", "tasks"]
        key = rng.choice(bound if sign else sorted(content))
        how = rng.randrange(4)
        if how == 0:
            content.pop(key)
        elif how == 1:
            content[key] = rng.choice([value for value in VALUES if type(value) is not type(content[key])])
        elif how == 2:
            shard[rng.choice(sorted(shard))] = rng.choice(VALUES)
        else:
            content["shards"] = rng.choice([content["shards"][:-1], content["shards"][1:], content["shards"] * 2])

    if sign:
        try:
            edit_manifest(folder, edit)
        except (ValueError, OverflowError):  # a value that JSON cannot hold
            edit_manifest(folder, lambda content: content.pop("seed"))
    else:
        content = json.loads((folder / "manifest.json").read_text())
        edit(content)
        (folder / "manifest.json").write_text(json.dumps(content))


def edit_and_sign(rng: random.Random, folder: Path) -> None:
    edit_json(rng, folder, sign=True)


MUTATIONS: list[Callable[[random.Random, Path], None]] = [
    flip_bits,
    overwrite,
    cut,
    append,
    move_bytes,
    drop,
    make_directory,
    swap,
    double,
    rename,
    add_stranger,
    edit_text,
    edit_json,
    edit_and_sign,
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_damage_is_refused_or_harmless(
    mutate: Callable[[random.Random, Path], None], base: Path, intact: Trace, tmp_path: Path
) -> None:
    refused = 0
    rounds = -(-CASES // len(MUTATIONS))
    for number in range(rounds):
        rng = random.Random(f"{mutate.__name__}/{number}")
        folder = Path(shutil.copytree(base, tmp_path / str(number)))
        mutate(rng, folder)
        try:
            found = read_trace(folder)
        except AsdsimError as error:
            refused += 1
            assert str(folder) in str(error), error
            assert len(str(error)) < 1000
        else:
            different = difference(found, intact)
            assert different is None, f"case {number}: {different}"
        shutil.rmtree(folder)
    harmless = mutate in (add_stranger,)
    assert refused == 0 if harmless else refused > rounds // 2
