"""A hundred thousand random blocks under every rule and reading: every form of the walk decides alike, to the bit.

Run by `make statistics`; `make test` draws a tenth.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.twins.test_blocks import hold


@pytest.mark.timeout(900)
def test_every_block_is_decided_alike(tmp_path: Path) -> None:
    pytest.importorskip("numba_cuda")
    hold(100_000, tmp_path)
