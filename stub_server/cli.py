"""``mcp-server``: serve an ONNX model, or a folder of them, on one box."""

from __future__ import annotations

import logging
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mcp_client.errors import MCPError, MissingExtraError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def serve(
    model_path: Annotated[
        Path, typer.Option(help="A .onnx file, a folder of them, or a folder of ID/VERSION/model.onnx.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="TCP port; 0 takes a free one.", min=0, max=65535)] = 8080,
    uds: Annotated[Path | None, typer.Option(help="Listen on this Unix socket as well.")] = None,
    grpc_port: Annotated[
        int | None,
        typer.Option(help="Speak gRPC too, on this TCP port; 0 takes a free one.", min=0, max=65535),
    ] = None,
    grpc_uds: Annotated[Path | None, typer.Option(help="Speak gRPC on this Unix socket.")] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda:N.")] = "cpu",
    latency_ms: Annotated[
        float, typer.Option(help="Fault: milliseconds added to each inference.", min=0)
    ] = 0.0,
    error_rate: Annotated[
        float, typer.Option(help="Fault: the fraction of inferences answered 503.", min=0, max=1)
    ] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes the injected errors the same in every run.")] = None,
    cache_control: Annotated[str, typer.Option(help="Cache-Control of the answers.")] = "private",
    threads: Annotated[int | None, typer.Option(help="Inferences computed at once.", min=1)] = None,
) -> None:
    """Serve ONNX models over MCP 2026 (/v1) and the Open Inference Protocol (/v2) until SIGINT or SIGTERM."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    try:
        try:
            from .server import StubServer
        except ModuleNotFoundError as error:
            raise MissingExtraError("server", error.name or "", "mcp-server") from error
        with StubServer(
            model_path,
            host=host,
            port=port,
            uds=uds,
            grpc=grpc_port is not None,
            grpc_port=grpc_port or 0,
            grpc_uds=grpc_uds,
            device=device,
            latency_ms=latency_ms,
            error_rate=error_rate,
            seed=seed,
            cache_control=cache_control,
            threads=threads,
        ) as server:
            for entry in server.models.index():
                state = "" if entry.state == "READY" else f" [red]{entry.state}: {entry.reason}[/]"
                console.print(f"  {entry.name} version {entry.version}{state}")
            also = [server.grpc_url] if grpc_port is not None else []
            also += [str(path) for path in (uds, grpc_uds) if path is not None]
            console.print(
                f"mcp-server listens on [bold]{server.url}[/]{''.join(f' and {it}' for it in also)}"
            )
            stopped.wait()
    except MCPError as error:
        console.print(f"[bold red]mcp-server:[/] {error}")
        raise typer.Exit(1) from error


def main() -> None:
    """The console command."""
    app()
