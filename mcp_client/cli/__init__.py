"""``mcp-client``: ask a server from the shell, and look after the models and the answers on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import orjson
import typer
from rich.console import Console
from rich.table import Table

from ..client import MCPClient
from ..errors import InvalidInputError, MCPError
from ..protocols.json_tensors import dumps, tensor_to_json
from ..result import InferResult
from .cache import app as cache_app
from .models import app as models_app

app = typer.Typer(
    name="mcp-client", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
app.add_typer(models_app, name="models")
app.add_typer(cache_app, name="cache")

Url = Annotated[str, typer.Argument(envvar="MCP_URL", help="http://host:port, or edge:FOLDER")]


@app.command()
def infer(
    url: Url,
    inputs: Annotated[
        str,
        typer.Argument(
            help="JSON: a number, a nested list or an object of them; @FILE.json, @FILE.npy, or - for stdin"
        ),
    ],
    model: Annotated[str | None, typer.Option(help="default: the server's only one")] = None,
    version: Annotated[str | None, typer.Option()] = None,
    timeout: Annotated[float, typer.Option(help="seconds, retries included")] = 30.0,
    edge: Annotated[Path | None, typer.Option(help="folder of models to fall back to")] = None,
) -> None:
    """Run a model once and print its outputs as JSON."""
    value = _read(inputs)
    with MCPClient(url, edge=edge, prefetch=None) as client:
        result = client.infer(value, model=model, version=version, timeout=timeout)
    typer.echo(dumps(_document(result)))


@app.command()
def check(url: Url) -> None:
    """Say whether a server is ready, and which models it has with which inputs and outputs."""
    with MCPClient(url, prefetch=None) as client:
        ready = client.ready()
        if not ready and not url.startswith("edge:"):
            typer.echo(f"{url} is not ready", err=True)
            raise typer.Exit(1)
        table = Table("model", "version", "inputs", "outputs", title=url)
        for name in client.models():
            found = client.metadata(name)
            table.add_row(
                name, found.version, "\n".join(map(str, found.inputs)), "\n".join(map(str, found.outputs))
            )
    Console().print(table)


def _read(text: str) -> Any:
    if text.endswith(".npy") and text.startswith("@"):
        return np.load(text[1:], allow_pickle=False)
    raw = (
        sys.stdin.buffer.read()
        if text == "-"
        else Path(text[1:]).read_bytes()
        if text.startswith("@")
        else text
    )
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidInputError(f"the inputs are not JSON: {error}") from error


def _document(result: InferResult) -> dict[str, Any]:
    outputs = {name: tensor_to_json(array, what=name, b64=True) for name, array in result.outputs.items()}
    return {
        "outputs": outputs,
        "model": result.model,
        "version": result.version,
        "source": result.source,
        "latency_ms": round(result.latency_ms, 3),
        "request_id": result.request_id,
    }


def main() -> None:
    """The console command. Errors of ours are one line, not a traceback."""
    try:
        app()
    except (MCPError, OSError) as error:
        typer.echo(f"mcp-client: {error}", err=True)
        raise SystemExit(1) from None
