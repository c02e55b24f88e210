"""References that are JSON: read once, in one way, with an error that names the key."""

from __future__ import annotations

import json

from ...errors import UsageError
from ...files import Fields


def read_reference(reference: str) -> Fields:
    """Return the values of a reference that is a JSON object.

    Raises
    ------
    UsageError
        If it is none.
    """
    try:
        return Fields(json.loads(reference), "reference")
    except (ValueError, RecursionError):  # also a number of more digits than Python reads
        raise UsageError("not JSON", where="reference") from None
