"""One inference over the wire: ours beside NVIDIA's ``tritonclient`` and plain httpx, on one real Triton, in one run.

    python tests/benchmarks/transport.py [--quick] [--json]

Triton serves an identity model of its Python backend; the cache is off. ``tiny`` is 1 × 3 FP32, ``602k`` 1 × 150,528 FP32, each
way. The clients take turns, a few calls each (A B A B): each figure is the median of all calls. ``tritonclient`` runs in
a process of its own (it wants an older protobuf), with its input and output objects made once.

- ``http_…``, ``grpc_…``: our time over that of tritonclient's client of the same protocol. Shared memory is off.
- ``ipc_602k``: ours as it is by default, tensors in shared memory, over tritonclient.http.
- ``aio_c16_…``: ``AsyncMCPClient`` over HTTP with 16 calls in flight, time for one of them, over the faster of
  ``tritonclient.http.aio`` and ``tritonclient.grpc.aio``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mcp_client import AsyncMCPClient, MCPClient
from mcp_client._httpx import httpx
from tests.peers.servers import Server, triton
from tests.peers.venvs import python_of

WORKER = Path(__file__).parents[1] / "peers" / "tritonclient_worker.py"
MODEL = "identity_fp32_2"
IN_FLIGHT = 16
SIZES = {"tiny": 3, "602k": 150_528}
Measure = Callable[[int], list[float]]  # so many calls → seconds of each


def tensor(size: str) -> Any:
    return np.random.default_rng(0).random((1, SIZES[size]), np.float32)


def timed(call: Callable[[], Any]) -> Measure:
    def measure(count: int) -> list[float]:
        taken = []
        for _ in range(count):
            started = time.perf_counter()
            call()
            taken.append(time.perf_counter() - started)
        return taken

    return measure


def ours(client: MCPClient, size: str, *, shared: bool = False) -> Measure:
    if not shared:
        without_shared_memory(client)
    inputs = {"x": tensor(size)}
    return timed(lambda: client.infer(inputs))


def without_shared_memory(client: Any) -> None:
    for endpoint in client._engine.endpoints:
        endpoint.transport.arena = None


def plain_httpx(url: str, size: str) -> Measure:
    """What an application writes that uses no client library."""
    client = httpx.Client(headers={"Accept-Encoding": "identity"})
    x = tensor(size)
    head = {
        "inputs": [
            {
                "name": "x",
                "shape": x.shape,
                "datatype": "FP32",
                "parameters": {"binary_data_size": x.nbytes},
            }
        ],
        "parameters": {"binary_data_output": True},
    }

    def call() -> Any:
        header = json.dumps(head).encode()
        response = client.post(
            f"{url}/v2/models/{MODEL}/infer",
            content=header + x.tobytes(),
            headers={"Inference-Header-Content-Length": str(len(header))},
        )
        at = int(response.headers["inference-header-content-length"])
        return np.frombuffer(response.content[at:], np.float32).reshape(x.shape)

    return timed(call)


def ours_together(client: AsyncMCPClient, loop: asyncio.AbstractEventLoop, size: str) -> Measure:
    inputs = {"x": tensor(size)}

    async def all_of_them(count: int) -> float:
        async def work() -> None:
            for _ in range(count // IN_FLIGHT):
                await client.infer(inputs)

        started = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))
        return (time.perf_counter() - started) / (count // IN_FLIGHT * IN_FLIGHT)

    return lambda count: [loop.run_until_complete(all_of_them(count))]


@contextmanager
def tritonclient(server: Server) -> Iterator[Callable[[str], Measure]]:
    """Gives the measure of any of the worker's cases."""
    hosts = [url.split("//")[1] for url in (server.http, server.grpc)]
    with subprocess.Popen(
        [str(python_of("tritonclient")), str(WORKER), *hosts, MODEL],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        asked, told = worker.stdin, worker.stdout

        def of(case: str) -> Measure:
            def measure(count: int) -> list[float]:
                print(case, count, file=asked, flush=True)
                line = told.readline()
                if not line:
                    raise RuntimeError(f"tritonclient failed at {case}; its error is above")
                return list(json.loads(line))

            return measure

        try:
            yield of
        finally:
            asked.close()


def compare(name: str, rounds: int, count: int, measures: dict[str, Measure]) -> dict[str, float]:
    """Median seconds of each, in turn; the first round warms up."""
    taken: dict[str, list[float]] = {who: [] for who in measures}
    for number in range(rounds + 1):
        for who, measure in measures.items():
            seconds = measure(count)
            if number:
                taken[who] += seconds
    medians = {who: median(seconds) for who, seconds in taken.items()}
    line = " · ".join(f"{who} {seconds * 1e6:,.0f} µs" for who, seconds in medians.items())
    print(f"{name:14} {line}", file=sys.stderr)
    return medians


def measured(server: Server, quick: bool) -> dict[str, float]:
    rounds = 12 if quick else 60
    options: Any = {"model": MODEL, "cache": None, "prefetch": None}
    ratios: dict[str, float] = {}
    loop = asyncio.new_event_loop()
    with (
        tritonclient(server) as theirs,
        MCPClient(server.http, **options) as http,
        MCPClient(server.grpc, **options) as grpc,
        MCPClient(server.http, **options) as shared,
    ):
        for size, count in (("tiny", 60), ("602k", 12)):
            got = compare(
                f"http_{size}",
                rounds,
                count,
                {
                    "ours": ours(http, size),
                    "tritonclient.http": theirs(f"http_{size}"),
                    "httpx": plain_httpx(server.http, size),
                },
            )
            ratios[f"http_{size}"] = got["ours"] / got["tritonclient.http"]
            got = compare(
                f"grpc_{size}",
                rounds,
                count,
                {"ours": ours(grpc, size), "tritonclient.grpc": theirs(f"grpc_{size}")},
            )
            ratios[f"grpc_{size}"] = got["ours"] / got["tritonclient.grpc"]
        got = compare(
            "ipc_602k",
            rounds,
            12,
            {
                "ours": ours(shared, "602k", shared=True),
                "tritonclient.http": theirs("http_602k"),
                "tritonclient.grpc with shared memory": theirs("grpc-shm_602k"),
            },
        )
        ratios["ipc_602k"] = got["ours"] / got["tritonclient.http"]

        async def made() -> AsyncMCPClient:
            return AsyncMCPClient(server.http, **options)

        client = loop.run_until_complete(made())
        without_shared_memory(client)
        for size, count in (("tiny", 320), ("602k", 48)):
            got = compare(
                f"aio_c16_{size}",
                rounds,
                count,
                {
                    "ours": ours_together(client, loop, size),
                    "tritonclient.http.aio": theirs(f"http-aio_{size}"),
                    "tritonclient.grpc.aio": theirs(f"grpc-aio_{size}"),
                },
            )
            ratios[f"aio_c16_{size}"] = got["ours"] / min(
                seconds for who, seconds in got.items() if who != "ours"
            )
        loop.run_until_complete(client.close())
    loop.close()
    return {name: round(ratio, 3) for name, ratio in ratios.items()}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--quick", action="store_true", help="fewer rounds")
    options.add_argument("--json", action="store_true", help="the last line is JSON")
    chosen = options.parse_args()
    with triton() as server:
        ratios = measured(server, chosen.quick)
    for name, ratio in ratios.items():
        print(f"{name:14} {ratio:8.3f}", file=sys.stderr)
    if chosen.json:
        print(json.dumps(ratios))


if __name__ == "__main__":
    main()
