"""The command ``mcp-profile``: serves the Profile API and looks after its database."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, NoReturn, cast

import typer

from mcp_client.errors import ConfigurationError

if TYPE_CHECKING:
    from .access import Access
    from .store import Store

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="The Profile API: takes telemetry, serves profiles."
)


def _default_db() -> str:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return f"sqlite:///{Path(state) / 'mcp_profile' / 'profile.sqlite'}"


Application = Annotated[str, typer.Option(help="Of which application.")]
Database = Annotated[
    str,
    typer.Option(
        envvar="MCP_PROFILE_DB", help="SQLAlchemy URL, or the path of an SQLite file.", show_default=False
    ),
]


@app.command()
def serve(
    host: Annotated[
        str, typer.Option(help="Address to serve; one that is not loopback needs a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free port.", min=0, max=65535)] = 8090,
    grpc_port: Annotated[
        int | None,
        typer.Option(
            help="Serve gRPC, too (extra grpc); 0 takes a free port.", min=0, max=65535, show_default=False
        ),
    ] = None,
    db: Database = "",
    api_key: Annotated[
        str,
        typer.Option(envvar="MCP_PROFILE_API_KEY", help="A key that may do everything.", show_default=False),
    ] = "",
    max_events_per_s: Annotated[float, typer.Option(help="Of each application; 0 is no limit.", min=0)] = 0,
    log_level: Annotated[str, typer.Option(help="critical, error, warning, info or debug.")] = "info",
) -> None:
    """Serve the Profile API until Ctrl-C."""
    from .server import Server, database_url, listen

    url = database_url(db or _default_db())
    try:
        with contextlib.ExitStack() as undo:
            listener = undo.enter_context(listen(host, port))
            server = Server(
                url,
                host,
                api_key or None,
                log_level=log_level,
                max_events_per_s=max_events_per_s,
                grpc_port=grpc_port,
            )
            undo.pop_all()  # both are there: the listener is the server's to close
    except (ValueError, OSError) as error:
        _refuse(str(error))
    typer.echo(
        f"Profile API on http://{host}:{listener.getsockname()[1]}  ({server.store.url.render_as_string()})"
        + (f", gRPC on {host}:{server.grpc_port}" if server.grpc_port else ""),
        err=True,
    )
    try:
        server.run([listener])
    except KeyboardInterrupt:  # uvicorn has stopped in order and raises the signal again
        pass
    finally:
        server.close()


@app.command()
def policy(
    file: Annotated[
        Path | None,
        typer.Argument(help="JSON of the policy to put in force; - is stdin; without it: show it."),
    ] = None,
    db: Database = "",
    application: Application = "default",
) -> None:
    """Show or change the TTL policy; clients that watch have it within seconds."""
    from .errors import APIError
    from .policies import current, put

    with _store(db) as store:
        app_id = _application(store, application)
        try:
            if file is None:
                shown = current(store, app_id)
            else:
                shown = put(store, app_id, sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes())
        except (APIError, OSError) as error:
            _refuse(str(error))
    typer.echo(json.dumps(shown))


@app.command()
def mine(
    db: Database = "",
    application: Application = "default",
    anew: Annotated[
        bool, typer.Option("--anew", help="Count all events again, with DuckDB; what aged out goes.")
    ] = False,
    engine: Annotated[
        str, typer.Option(help="duckdb or spark: count all events again on it.", show_default=False)
    ] = "",
    master: Annotated[
        str, typer.Option(help="Of the Spark cluster: spark://host:port.", show_default=False)
    ] = "",
    folder: Annotated[
        Path | None,
        typer.Option(
            help="For Spark, events and results as Parquet: shared by all of its machines.",
            show_default="a temporary one",
        ),
    ] = None,
    half_life_days: Annotated[
        float | None,
        typer.Option(
            help="With --anew or --engine, from now on: what was seen so long ago counts half; 0 forgets nothing.",
            show_default=False,
            min=0,
        ),
    ] = None,
) -> None:
    """Count the events that are new, now."""
    from .bulk import rebuild
    from .forgetting import SHORTEST_HALF_LIFE_DAYS
    from .service import Profiles

    if engine not in ("", "duckdb", "spark"):
        _refuse(f"--engine is duckdb or spark; got {engine!r}")
    if (engine == "spark") != bool(master):
        _refuse("--engine spark and --master spark://host:port go together")
    if half_life_days is not None and not (anew or engine):
        _refuse("--half-life-days changes what every event counts: give it with --anew")
    if half_life_days and half_life_days < SHORTEST_HALF_LIFE_DAYS:
        _refuse(f"--half-life-days is {SHORTEST_HALF_LIFE_DAYS:.0f} at least, or 0; got {half_life_days:g}")
    with _store(db) as store:
        app_id = _application(store, application)
        if anew or engine:
            counted = rebuild(
                store,
                app_id,
                half_life_days=half_life_days,
                master=master,
                folder=str(folder) if folder else None,
            )
        else:
            counted = Profiles(store).mine(app_id)
    typer.echo(f"{counted} events mined")


@app.command()
def train(db: Database = "", application: Application = "default") -> None:
    """Train the ranker on the events that are kept; it goes into service if it beats the one there on held-out sessions."""
    from mcp_client.errors import MissingExtraError

    from .rankers import train_and_keep

    with _store(db) as store:
        app_id = _application(store, application)
        try:
            made = train_and_keep(store, app_id)
        except (ValueError, MissingExtraError) as error:
            _refuse(str(error))
    held_out = made.metrics["ranker"]
    typer.echo(
        f"ranker {made.version} {'promoted' if made.promoted else 'not promoted'}: held-out log loss {held_out['log_loss']:.4f} "
        f"against {made.rival:.4f} in service, average precision {held_out['average_precision']:.4f}"
    )


@app.command()
def retention(
    days: Annotated[
        float, typer.Option(help="Events older than this go; what was learned from them stays.", min=0)
    ],
    db: Database = "",
) -> None:
    """Mine what is new, then delete old events."""
    from .service import Profiles
    from .upkeep import retire

    with _store(db) as store:
        for app_id in store.applications():
            Profiles(store).mine(app_id)
        deleted = retire(store, days)
    typer.echo(f"{deleted} events deleted")


@app.command()
def export(
    file: Annotated[
        Path,
        typer.Argument(
            help="Where to: one JSON object a line, gzipped if the name ends in .gz; - is stdout."
        ),
    ],
    db: Database = "",
    application: Application = "default",
) -> None:
    """Copy the events of an application out."""
    from .upkeep import export as write

    with _store(db) as store, contextlib.ExitStack() as stack:
        app_id = _application(store, application)
        out = sys.stdout.buffer if str(file) == "-" else stack.enter_context(_created(file))
        written = write(store, app_id, out)
    typer.echo(f"{written} events written to {file}", err=True)


keys = typer.Typer(
    no_args_is_help=True, help="API keys: who may send events to and read from an application."
)
app.add_typer(keys, name="keys")


@keys.command("create")
def create_key(
    db: Database = "",
    application: Annotated[str, typer.Option(help="For which application; made if it is new.")] = "default",
    name: Annotated[str, typer.Option(help="What the key is for.")] = "",
    scope: Annotated[
        list[str] | None, typer.Option(help="ingest, read or admin; give it again for more.")
    ] = None,
) -> None:
    """Make a key and print it: it is shown this once."""
    with _access(db) as access:
        try:
            typer.echo(access.create(application=application, name=name, scopes=scope or ("ingest", "read")))
        except ValueError as error:
            typer.echo(f"mcp-profile: {error}", err=True)
            raise typer.Exit(2) from None


@keys.command("ls")
def list_keys(db: Database = "") -> None:
    """List the keys, without their secrets."""
    with _access(db) as access:
        for key in access.ls():
            made = datetime.fromtimestamp(key.created_at, UTC).isoformat(timespec="seconds")
            state = "revoked" if key.revoked_at else "in force"
            typer.echo(
                f"{key.id}\t{key.application}\t{key.name or '-'}\t{' '.join(key.scopes)}\t{made}\t{state}"
            )


@keys.command("revoke")
def revoke_key(
    key_id: Annotated[int, typer.Argument(help="Its number in `keys ls`.")], db: Database = ""
) -> None:
    """Take a key out of force, at once."""
    with _access(db) as access:
        if not access.revoke(key_id):
            typer.echo(f"mcp-profile: no key {key_id} is in force; see `mcp-profile keys ls`", err=True)
            raise typer.Exit(1)


@contextlib.contextmanager
def _store(db: str) -> Iterator[Store]:
    from .server import database_url
    from .store import Store

    try:
        store = Store(database_url(db or _default_db()))
    except ConfigurationError as error:
        _refuse(str(error))
    try:
        yield store
    finally:
        store.close()


@contextlib.contextmanager
def _access(db: str) -> Iterator[Access]:
    from .access import Access

    with _store(db) as store:
        yield Access(store)


def _application(store: Store, name: str) -> int:
    try:
        return store.application(name)
    except LookupError as error:
        typer.echo(f"mcp-profile: {error}", err=True)
        raise typer.Exit(2) from None


def _refuse(message: str) -> NoReturn:
    typer.echo(f"mcp-profile: {message}", err=True)
    raise typer.Exit(2)


def _created(file: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(file, "wb", 5) if file.suffix == ".gz" else file.open("wb"))


def main() -> None:
    app()
