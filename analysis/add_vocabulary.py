"""Give committed traces the text of their tokens, as a capture of today stores it; needs the targets' tokenizers.

python analysis/add_vocabulary.py traces/*
"""

from __future__ import annotations

import sys
from pathlib import Path

from asdsim.capture.vocabulary import keep_vocabulary
from asdsim.engines.transformers.text import load_tokenizer
from asdsim.trace.writer import TraceWriter


def main(folders: list[str]) -> None:
    """Add to each trace what it lacks."""
    for folder in folders:
        with TraceWriter.append(Path(folder)) as writer:
            keep_vocabulary(writer, load_tokenizer(writer.manifest.target, offline=True))
            print(folder, writer.manifest.notes["vocabulary"])


if __name__ == "__main__":
    main(sys.argv[1:])
