"""Time and memory of `asdsim calibrate` with 10,000 settings and 2,000 resamples; no model needed.

    python analysis/calibrate_speed.py

Once on the committed covered traces, and once on a synthetic trace of 1,000 requests of 60 steps.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GRID = ("--B", "0:24.75:.25", "--g", ".02:1:.02", "--M", "1,2")  # 100 x 50 x 2
TRACE = "traces/smollm2-layerskip"


def measure(name: str, *args: str) -> None:
    """Run one calibration and print its seconds and peak memory."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "asdsim", "calibrate", *args, *GRID], capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(done.stderr)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{name}: {seconds:.1f} s, {used.ru_maxrss / 1e6:.2f} GB at most so far; {done.stdout.splitlines()[0]}")


def main() -> None:
    """Measure both."""
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    from asdsim.trace.writer import TraceWriter
    from tests.support.toytrace import big_request, toy_manifest

    with tempfile.TemporaryDirectory() as folder:
        policy = str(Path(folder) / "policy.json")
        measure(
            "committed traces", TRACE, "--holdout", f"{TRACE}-holdout", "--max-regret-per-token", ".1", "-o", policy
        )
        big = Path(folder) / "trace"
        manifest = toy_manifest(vocab_size=49152, num_draft_tokens=7, max_new_tokens=400, stop="fixed")
        with TraceWriter.create(big, manifest) as writer:
            for index in range(1000):
                writer.add_request(*big_request(index))
        measure("1,000 requests", str(big), "--estimate", "aligned", "--max-regret-per-token", ".05", "-o", policy)


if __name__ == "__main__":
    main()
