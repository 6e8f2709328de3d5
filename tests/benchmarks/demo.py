"""The demo as a benchmark: ``make bench NAME=demo ARGS="--quick --json"``; the figures are the last line of stdout."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    # In place of this folder, whose profile.py would hide the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from examples.demo.__main__ import main as demo

    return demo()


if __name__ == "__main__":
    sys.exit(main())
