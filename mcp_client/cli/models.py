"""``mcp-client models``: the models on this machine: fetch, list, verify, remove, pin and roll back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn
from rich.table import Table

from .._httpx import httpx
from ..edge.repository import ModelRepository
from ..edge.signing import PublicKey
from ..edge.signing import seal as seal_version
from ..edge.sources import write_manifest
from ..edge.sync import sync as sync_models
from ..edge.upkeep import Held, remove, survey
from ..edge.variants import optimise, random_inputs
from ..errors import IntegrityError

app = typer.Typer(no_args_is_help=True, help="The models on this machine.")

Folder = Annotated[Path, typer.Option("--folder", "-f", envvar="MCP_EDGE", help="the folder of models")]
Model = Annotated[str, typer.Argument(help="model id")]
Version = Annotated[str, typer.Argument()]
HERE = Path("models")


@app.command()
def sync(
    source: Annotated[
        str,
        typer.Argument(
            envvar="MCP_URL",
            help="an mcp-server (http://host:port), a model (https://…/m.onnx), a manifest (https://…/models.json), or a folder",
        ),
    ],
    models: Annotated[list[str] | None, typer.Argument(help="model ids; default: all that are there")] = None,
    folder: Folder = HERE,
    api_key: Annotated[
        str | None, typer.Option(envvar="MCP_API_KEY", help="sent as Authorization: Bearer")
    ] = None,
    public_key: Annotated[
        Path | None,
        typer.Option(envvar="MCP_PUBLIC_KEY", help="FILE.pem, Ed25519: take only what this key signed"),
    ] = None,
    max_bytes: Annotated[
        int | None, typer.Option(help="disk budget: versions not in use are removed")
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="seconds without a byte before the line counts as broken")
    ] = 30.0,
) -> None:
    """Fetch what is new or changed elsewhere: verified, resumed after a break, put in place whole."""
    repository = ModelRepository(folder)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with httpx.Client(headers=headers, timeout=timeout) as http, Progress(*columns, console=_errors) as bars:
        tasks: dict[str, TaskID] = {}

        def told(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total or None)
            bars.update(tasks[what], completed=done)

        report = sync_models(
            repository,
            source,
            http=http,
            models=models or None,
            progress=told,
            public_key=public_key,
            max_bytes=max_bytes,
        )
    for what, found in (("downloaded", report.downloaded), ("unchanged", report.unchanged)):
        for model, version in found.items():
            typer.echo(f"{what} {model} {version}")
    for model, version in report.removed:
        typer.echo(f"removed {model} {version}")
    for model, error in report.failed.items():
        typer.echo(f"failed {model}: {error}", err=True)
    if report.failed:
        raise typer.Exit(1)


@app.command()
def seal(
    models: Annotated[list[str] | None, typer.Argument(help="model ids; default: all")] = None,
    folder: Folder = HERE,
    key: Annotated[
        Path | None, typer.Option(help="FILE.pem of an Ed25519 private key: sign each version with it")
    ] = None,
) -> None:
    """Make a folder ready for others to sync from: the .sha256 of each version, its signature, and models.json, so that any
    web server can offer it.
    """
    repository = ModelRepository.open(folder)
    for model in models or repository.models():
        for version in repository.versions(model):
            seal_version(repository, model, version, key)
            typer.echo(f"{'signed' if key else 'sealed'} {model} {version}")
    if repository.root.is_dir():
        typer.echo(f"wrote {write_manifest(repository)}")


@app.command(name="ls")
def ls(folder: Folder = HERE) -> None:
    """List the models, with the version in use (*) and what is pinned."""
    table = Table("model", "version", "", "size", "digest")
    for held in survey(ModelRepository.open(folder)):
        digest = held.digest.removeprefix("sha256:")[:12] or "[red]damaged[/red]"
        table.add_row(held.model, held.version, _marks(held), decimal(held.nbytes), digest)
    Console().print(table)


@app.command()
def verify(
    folder: Folder = HERE,
    public_key: Annotated[
        Path | None,
        typer.Option(envvar="MCP_PUBLIC_KEY", help="FILE.pem, Ed25519: check the signatures as well"),
    ] = None,
) -> None:
    """Hash every file and compare it with its .sha256; exit status 1 if one is damaged."""
    repository = ModelRepository.open(folder)
    public = PublicKey(public_key) if public_key else None
    faults = 0
    for held in survey(repository):
        fault = held.fault
        if public is not None and not fault:
            try:
                public.check_here(repository, held.model, held.version)
            except IntegrityError as error:
                fault = error.message
        typer.echo(f"{'damaged' if fault else 'intact'} {held.model} {held.version} {fault or held.digest}")
        faults += bool(fault)
    if faults:
        raise typer.Exit(1)


@app.command()
def rm(model: Model, version: Version, folder: Folder = HERE) -> None:
    """Delete a version of a model."""
    typer.echo(f"freed {decimal(remove(ModelRepository.open(folder), model, version))}")


@app.command()
def pin(model: Model, version: Version, folder: Folder = HERE) -> None:
    """Use this version, whatever a sync brings, until it is unpinned."""
    ModelRepository.open(folder).pin(model, version)
    typer.echo(f"pinned {model} {version}")


@app.command()
def unpin(model: Model, folder: Folder = HERE) -> None:
    """Use the version that the server runs, or the newest, again."""
    repository = ModelRepository.open(folder)
    repository.unpin(model)
    typer.echo(f"in use {model} {repository.resolve(model).version}")


@app.command()
def rollback(model: Model, folder: Folder = HERE) -> None:
    """Go back to the version before the one in use, and pin it."""
    typer.echo(f"pinned {model} {ModelRepository.open(folder).rollback(model)}")


@app.command()
def optimize(
    file: Annotated[Path, typer.Argument(help="an .onnx file")],
    into: Annotated[Path, typer.Option(help="folder for the variants")] = Path("variants"),
    inputs: Annotated[
        list[Path] | None, typer.Option(help="FILE.npz: inputs by name; repeat it for calibration")
    ] = None,
) -> None:
    """Write FP16, INT8 and fused variants; show size, speed and output error of each on your inputs."""
    feeds = [dict(np.load(each, allow_pickle=False)) for each in inputs or []]
    if not feeds:
        typer.echo(
            "no --inputs: speed and error are measured on random ones, which says little of yours", err=True
        )
    variants = optimise(file, into, feeds or random_inputs(file))
    table = Table("variant", "size", "ms", "speed-up", "error", "file")
    for each in variants:
        if each.fault:
            table.add_row(each.name, "", "", "", "", f"[yellow]none: {escape(each.fault)}[/yellow]")
            continue
        speed_up = f"{variants[0].ms / each.ms:.2f} ×"
        table.add_row(
            each.name, decimal(each.nbytes), f"{each.ms:.3f}", speed_up, f"{each.error:.2g}", str(each.path)
        )
    Console().print(table)


_errors = Console(stderr=True)


def _marks(held: Held) -> str:
    return ("*" if held.current else "") + (" pinned" if held.pinned else "")
