"""A Spark standalone cluster of a test's own: one master and its workers on 127.0.0.1, from the installed pyspark."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

_START_S = 120.0
_QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


def missing() -> str:
    """What a cluster needs that is not here; "" if it has all."""
    if find_spec("pyspark") is None:
        return "pyspark is not installed (extra spark)"
    if shutil.which("java") is None:
        return "Java is not installed (apt-get install openjdk-17-jre-headless)"
    return ""


@contextlib.contextmanager
def spark_cluster(workers: int = 2) -> Iterator[tuple[str, dict[str, str]]]:
    """The master's URL, and the environment for an application's process: it keeps within small memory."""
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    home = Path(spec.origin).parent
    with (
        tempfile.TemporaryDirectory(prefix="mcp-spark-", ignore_cleanup_errors=True) as folder,
        contextlib.ExitStack() as stack,
    ):
        settings = {
            "spark.executor.memory": "512m",
            "spark.driver.memory": "512m",
            "spark.executor.cores": "1",
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.adaptive.enabled": "false",  # plans anew while it runs: for small data, half of the time
            # Compiling takes longer than the work that it would speed up.
            "spark.sql.codegen.wholeStage": "false",
            "spark.sql.codegen.factoryMode": "NO_CODEGEN",
            "spark.driver.extraJavaOptions": _QUICK,
            "spark.executor.extraJavaOptions": _QUICK,
        }
        Path(folder, "spark-defaults.conf").write_text(
            "".join(f"{name} {value}\n" for name, value in settings.items())
        )
        environment = os.environ | {
            "SPARK_HOME": str(home),
            "SPARK_CONF_DIR": folder,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": folder,
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": _QUICK,
            "PYSPARK_PYTHON": sys.executable,
        }

        def start(kind: str, *arguments: str) -> Path:
            log = Path(folder, f"{kind}-{time.monotonic_ns()}.log")
            out = stack.enter_context(log.open("wb"))
            command = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{kind}"]
            process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", *arguments], env=environment, stdout=out, stderr=out
            )
            stack.callback(process.wait, 20)
            stack.callback(process.terminate)
            return log

        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        url = f"spark://127.0.0.1:{port}"
        _wait_for(
            "I have been elected leader", start("master.Master", "--port", str(port), "--webui-port", "0")
        )
        place = ("--webui-port", "0", "--cores", "1", "--memory", "600m", "--work-dir", folder)
        logs = [start("worker.Worker", *place, url) for _ in range(workers)]
        for log in logs:
            _wait_for("Successfully registered with master", log)
        yield url, environment


def _wait_for(said: str, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while said not in log.read_text():
        if time.monotonic() > deadline:
            raise RuntimeError(f"Spark did not start within {_START_S:.0f} s:\n{log.read_text()[-2000:]}")
        time.sleep(0.1)
