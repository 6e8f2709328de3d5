"""``mcp-client cache``: what lies in the disk tier of a cache, and how to be rid of it."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from ..cache import look
from ..cache.disk import DiskTier
from ..cache.fingerprint import SIZE, to_text
from ..cache.memory import Entry, selector
from ..errors import ConfigurationError

app = typer.Typer(no_args_is_help=True, help="The answers kept on disk: Cache(directory=…).")

Directory = Annotated[Path, typer.Argument(help="the folder given as Cache(directory=…)")]


@app.command()
def stats(directory: Directory) -> None:
    """Entries and bytes by model."""
    count: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for _, entry in _answers(directory):
        count[entry.answer.model] += 1
        size[entry.answer.model] += entry.nbytes
    table = Table("model", "entries", "bytes")
    for model in sorted(count):
        table.add_row(model, str(count[model]), decimal(size[model]))
    table.add_row("all", str(count.total()), decimal(size.total()))
    Console().print(table)


@app.command()
def ls(directory: Directory) -> None:
    """Every entry: model, age, how much longer it is fresh, bytes, path, fingerprint."""
    now = time.monotonic()
    table = Table("model", "version", "age", "fresh for", "bytes", "path", "fingerprint")
    for key, entry in _answers(directory):
        left = entry.fresh_until - now
        fresh = f"{left:.0f} s" if left > 0 else "stale"
        table.add_row(
            entry.answer.model,
            entry.answer.version,
            f"{now - entry.stored_at:.0f} s",
            fresh,
            decimal(entry.nbytes),
            entry.path,
            to_text(key),
        )
    Console(width=200).print(table)


@app.command()
def rm(
    directory: Directory,
    model: Annotated[str | None, typer.Option()] = None,
    path: Annotated[str | None, typer.Option(help="what was fetched for this path")] = None,
    session: Annotated[str | None, typer.Option(help="what was fetched in this session")] = None,
    fingerprint: Annotated[str | None, typer.Option(help="one entry, as ls shows it")] = None,
) -> None:
    """Drop the entries that fit everything given."""
    if model is None and path is None and session is None and fingerprint is None:
        raise ConfigurationError(
            "rm takes --model, --path, --session or --fingerprint; clear drops everything"
        )
    matches = selector(model, path, session)
    fitting = [
        key for key, entry in _answers(directory) if matches(entry) and fingerprint in (None, to_text(key))
    ]
    with closing(_open(directory)) as tier:
        for key in fitting:
            tier.remove(key, time.monotonic())
        failed = tier.failures
    if failed:
        raise ConfigurationError(
            f"{directory} could not be written; some of {len(fitting)} entries are still there"
        )
    typer.echo(f"{len(fitting)} entries dropped")


@app.command()
def clear(directory: Directory) -> None:
    """Drop everything."""
    with closing(_open(directory)) as tier:
        tier.clear(time.monotonic())
        failed = tier.failures
    if failed:
        raise ConfigurationError(f"{directory} could not be written; what was in it is still there")
    typer.echo("cleared")


@app.command()
def verify(directory: Directory) -> None:
    """Check every entry's checksum; exit status 1 if any is damaged, or the whole database is."""
    found = list(look.entries(directory))
    damaged = [key for key, entry in found if entry is None]
    typer.echo(f"{len(found) - len(damaged)} entries are whole, {len(damaged)} damaged")
    for key in damaged:
        typer.echo(f"damaged: {to_text(key) if len(key) == SIZE else key!r}")
    if damaged:
        raise typer.Exit(1)


def _answers(directory: Path) -> list[tuple[bytes, Entry]]:
    # an entry without a model is a model's description
    return [
        (key, entry) for key, entry in look.entries(directory) if entry is not None and entry.answer.model
    ]


def _open(directory: Path) -> DiskTier:
    """For writing. A database that can't be read is refused before: the tier would start over, and take all with it."""
    return DiskTier(directory, max_bytes=look.size_limit(directory))
