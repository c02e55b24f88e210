"""``python -m asdsim``."""

from .cli import main

main()
