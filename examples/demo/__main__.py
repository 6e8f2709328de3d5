"""``python -m examples.demo``: plays the scenario, shows how far it is, prints the table, writes the report."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from .report import page
from .scenario import FULL, QUICK, Outcome, Scenario, Size
from .table import summary


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a quarter of the work")
    parser.add_argument("--json", action="store_true", help="the figures as JSON, as the last line of stdout")
    parser.add_argument(
        "--out", type=Path, help="folder for the report (default: a new one for temporary files)"
    )
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are stopped then, too
    console = Console(stderr=options.json)
    with tempfile.TemporaryDirectory(prefix="mcp-demo-") as folder:
        os.environ["MCP_STATE_DIR"] = folder  # nothing of the demo goes among the user's own files
        outcome = _played(QUICK if options.quick else FULL, Path(folder), console)
    out = options.out or Path(tempfile.mkdtemp(prefix="mcp-demo-report-"))
    out.mkdir(parents=True, exist_ok=True)
    report = out / "demo-report.html"
    report.write_text(page(outcome), encoding="utf-8")
    console.print(summary(outcome))
    console.print(f"{outcome.seconds:.0f} s. Report: {report.resolve().as_uri()}", soft_wrap=True)
    if options.json:
        print(json.dumps(outcome.figures()))
    return 0


def _played(size: Size, folder: Path, console: Console) -> Outcome:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("pages"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=size.total)
        scenario = Scenario(
            size,
            folder,
            say=lambda phase: progress.update(bar, description=phase),
            turned=lambda: progress.advance(bar),
        )
        return scenario.play()


if __name__ == "__main__":
    sys.exit(main())
