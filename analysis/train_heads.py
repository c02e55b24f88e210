"""Trains draft heads for a target: Medusa, EAGLE3 and DSpark, from the target's own greedy answers.

python analysis/train_heads.py generate --work /tmp/heads --given mbpp.jsonl --given gsm8k.jsonl:700
"""

from __future__ import annotations

import argparse
from pathlib import Path

import heads_data


def main() -> None:
    """Run one command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    data = commands.add_parser("generate", help="answers and hidden states of the target")
    data.add_argument("--work", type=Path, required=True, help="directory for shards")
    data.add_argument("--target", default="smollm2-135m")
    data.add_argument("--dtype", default="bfloat16")
    data.add_argument("--device", default="auto")
    data.add_argument("--offline", action="store_true")
    data.add_argument(
        "--given", action="append", default=[], metavar="PATH[:FROM]", help="JSONL prompts, from a line on"
    )
    data.add_argument("--tokens", type=int, default=390_000, help="answer tokens to make")
    data.add_argument("--batch", type=int, default=96)
    data.add_argument("--limit", type=int, default=128, help="tokens of an answer")
    data.add_argument("--share", type=float, default=0.4, help="part of each shard that is given prompts")
    data.add_argument("--taps", default="2,15,27,30")
    data.add_argument("--seed", type=int, default=0)
    data.add_argument("--dev", default="40:24", help="OFFSET:COUNT of each held-out task, to watch progress on")
    options = parser.parse_args()
    making = heads_data.Making(
        options.target, options.dtype, [int(t) for t in options.taps.split(",")], options.given, options.seed,
        options.batch, options.limit, options.share,
    )  # fmt: skip
    offset, count = map(int, options.dev.split(":"))
    heads_data.generate(options.work, making, options.tokens, (offset, count), options.device, options.offline)


if __name__ == "__main__":
    main()
