"""Replicas that go wrong."""

from __future__ import annotations

import os
import time
from pathlib import Path

from asdsim.cluster.pool import Replica
from asdsim.errors import CaptureError


class Fragile(Replica):
    """Squares numbers; ``die`` kills its process each time, ``once`` only the first time, ``error`` is an error."""

    def work(self, numbers: list[object]) -> list[object]:
        """Return squares of the numbers before the first word, or of all."""
        done: list[object] = []
        for number in numbers:
            if number == "die" or (number == "once" and not self._seen()):
                os._exit(1)
            if number == "error":
                raise CaptureError("no such weights", where="model m", fix="copy them")
            if number == "bug":
                raise ZeroDivisionError("by zero")
            if number == "slow":
                Path(self.job[0]).touch()
                while not self.stopped.is_set():
                    time.sleep(0.01)
            done.append(number if isinstance(number, str) else int(str(number)) ** 2)
            if self.stopped.is_set():
                break
        return done

    def _seen(self) -> bool:
        file = Path(self.job[0])
        seen = file.exists()
        file.touch()
        return seen
