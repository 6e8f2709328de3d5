"""What bulk mining runs on: DuckDB in this process, or Apache Spark where one machine is not enough. Both get the same SQL."""

from __future__ import annotations

import ipaddress
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self
from urllib.parse import urlsplit

import orjson

from mcp_client.errors import MissingExtraError

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


class Engine(Protocol):
    """Tables by name, made from queries. ``numbers``: sorting goes faster over numbers than over texts.

    ``octets``: the function that gives the bytes of a text.
    """

    numbers: bool
    octets: str

    def table(self, name: str, query: str) -> None:
        """Make the table, in place of one that had the name, from the query's rows."""

    def texts(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Make a table of texts from rows."""

    def rows(self, query: str) -> list[tuple[Any, ...]]: ...

    def read_parquet(self, name: str, file: str) -> None:
        """Give the Parquet file, or a folder's files, a name."""

    def write_parquet(self, query: str, folder: str) -> None:
        """Write the query's rows as Parquet files into a new folder."""


class Duck:
    """DuckDB in memory; ``MissingExtraError`` if it is not installed. A context manager."""

    numbers = True
    octets = "strlen"

    def __init__(self) -> None:
        try:
            import duckdb
        except ImportError as error:
            raise MissingExtraError("profile", "duckdb", "mining in bulk") from error
        self.connection: DuckDBPyConnection = duckdb.connect()
        self.connection.execute("SET enable_progress_bar = false")  # it would go to stdout

    def table(self, name: str, query: str) -> None:
        self.connection.execute(f"CREATE OR REPLACE TABLE {name} AS {query}")

    def texts(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        # DuckDB's own executemany takes a millisecond for each row.
        with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
            file.writelines(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows)
            file.flush()
            values = ", ".join(f"json->>{number} AS {column}" for number, column in enumerate(columns))
            self.connection.execute(
                f"CREATE OR REPLACE TABLE {name} AS SELECT {values} FROM read_json(?, format = 'newline_delimited', "
                "records = false, columns = {json: 'JSON'})",
                [file.name],
            )

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        return self.connection.execute(query).fetchall()

    def read_parquet(self, name: str, file: str) -> None:
        files = f"{file}/*.parquet" if Path(file).is_dir() else file
        self.connection.execute(f"CREATE OR REPLACE VIEW {name} AS FROM read_parquet('{_quoted(files)}')")

    def write_parquet(self, query: str, folder: str) -> None:
        Path(folder).mkdir()
        self.connection.execute(f"COPY ({query}) TO '{_quoted(folder)}/part.parquet' (FORMAT parquet)")

    def close(self) -> None:
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Spark:
    """A Spark application on the cluster of ``master`` (``spark://host:port``); ``MissingExtraError`` without pyspark.

    What is set in ``$SPARK_CONF_DIR/spark-defaults.conf`` holds (memory, cores, storage). A context manager.
    """

    numbers = False
    octets = "octet_length"

    def __init__(self, master: str) -> None:
        try:
            from pyspark.sql import SparkSession
        except ImportError as error:
            raise MissingExtraError("spark", error.name or "pyspark", f"mining on {master}") from error
        builder = SparkSession.builder.appName("mcp-profile mine").master(master)
        builder = builder.config("spark.ui.enabled", "false").config("spark.ui.showConsoleProgress", "false")
        if _is_loopback(master):  # then the driver has no business on another interface either
            builder = builder.config("spark.driver.host", "127.0.0.1").config(
                "spark.driver.bindAddress", "127.0.0.1"
            )
        self.session = builder.getOrCreate()
        self.session.sparkContext.setLogLevel("ERROR")

    def table(self, name: str, query: str) -> None:
        self.session.catalog.dropTempView(name)
        self.session.sql(f"CACHE LAZY TABLE {name} AS {query}")

    def texts(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        schema = ", ".join(f"{column} STRING" for column in columns)
        self.session.createDataFrame([tuple(row) for row in rows], schema).createOrReplaceTempView(name)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self.session.sql(query).collect()]

    def read_parquet(self, name: str, file: str) -> None:
        self.session.read.parquet(file).createOrReplaceTempView(name)

    def write_parquet(self, query: str, folder: str) -> None:
        self.session.sql(query).write.parquet(folder)

    def close(self) -> None:
        self.session.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _is_loopback(master: str) -> bool:
    host = urlsplit(master).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or master.startswith("local")


def _quoted(text: str) -> str:
    return text.replace("'", "''")
