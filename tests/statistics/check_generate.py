"""B = 0 on the real model is what `generate` decodes, token for token.

Run by `make statistics`; `make test` takes half of the prompts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from asdsim.engines.transformers.load import load_target
from tests.capture.test_smollm2 import hold


@pytest.mark.smollm2
def test_zero_budget_is_what_generate_decodes(tmp_path: Path) -> None:
    hold(load_target("smollm2-135m"), tmp_path, 2)
