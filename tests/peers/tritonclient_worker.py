"""NVIDIA's ``tritonclient`` at work, in a process and an environment of its own: asked by lines, answers with JSON lines.

    tritonclient_worker.py HTTP_HOST:PORT GRPC_HOST:PORT MODEL       then lines "CASE COUNT" → [seconds, …]

CASE is PROTOCOL_SIZE (``http_tiny``, ``grpc_602k``, ``grpc-shm_602k``), where each call is timed, or PROTOCOL-aio_SIZE, where
COUNT calls are made 16 at a time and the one figure is the time for one of them.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tritonclient.grpc as over_grpc
import tritonclient.grpc.aio as over_grpc_aio
import tritonclient.http as over_http
import tritonclient.http.aio as over_http_aio
from tritonclient.utils import shared_memory

IN_FLIGHT = 16
SIZES = {"tiny": 3, "602k": 150_528}
HTTP, GRPC, MODEL = sys.argv[1:]


def question(module: Any, size: str) -> tuple[Any, Any, np.ndarray[Any, Any]]:
    x = np.random.default_rng(0).random((1, SIZES[size]), np.float32)
    return module.InferInput("x", x.shape, "FP32"), [module.InferRequestedOutput("y")], x


def plain(module: Any, client: Any, size: str) -> Callable[[], None]:
    asked, wanted, x = question(module, size)

    def call() -> None:
        asked.set_data_from_numpy(x)
        assert client.infer(MODEL, [asked], outputs=wanted).as_numpy("y").shape == x.shape

    return call


def with_shared_memory(client: Any, size: str) -> Callable[[], None]:
    """As NVIDIA's example has it: one region for the input, one for the output, made and registered once."""
    asked, wanted, x = question(over_grpc, size)
    for name in ("in", "out"):
        region = shared_memory.create_shared_memory_region(name, f"/mcp_bench_{name}", x.nbytes)
        client.register_system_shared_memory(name, f"/mcp_bench_{name}", x.nbytes)
        if name == "in":
            inside = region
        else:
            outside = region
    asked.set_shared_memory("in", x.nbytes)
    wanted[0].set_shared_memory("out", x.nbytes)

    def call() -> None:
        shared_memory.set_shared_memory_region(inside, [x])
        client.infer(MODEL, [asked], outputs=wanted)
        assert shared_memory.get_contents_as_numpy(outside, np.float32, x.shape).copy().shape == x.shape

    return call


async def together(module: Any, client: Any, size: str, count: int) -> list[float]:
    asked, wanted, x = question(module, size)

    async def work() -> None:
        for _ in range(count // IN_FLIGHT):
            asked.set_data_from_numpy(x)
            answer = await client.infer(MODEL, [asked], outputs=wanted)
            assert answer.as_numpy("y").shape == x.shape

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))
    return [(time.perf_counter() - started) / (count // IN_FLIGHT * IN_FLIGHT)]


def main() -> None:
    clients: dict[str, Any] = {}
    makers = {
        "http": lambda: over_http.InferenceServerClient(HTTP),
        "grpc": lambda: over_grpc.InferenceServerClient(GRPC),
        "grpc-shm": lambda: over_grpc.InferenceServerClient(GRPC),
        "http-aio": lambda: over_http_aio.InferenceServerClient(HTTP, conn_limit=IN_FLIGHT),
        "grpc-aio": lambda: over_grpc_aio.InferenceServerClient(GRPC),
    }
    calls: dict[str, Callable[[], None]] = {}
    loop = asyncio.new_event_loop()

    async def made(protocol: str) -> Any:
        return makers[protocol]()

    for line in sys.stdin:
        case, count = line.split()
        protocol, size = case.rsplit("_", 1)
        if protocol.endswith("aio"):
            if protocol not in clients:
                clients[protocol] = loop.run_until_complete(made(protocol))
            module = over_http_aio if protocol == "http-aio" else over_grpc_aio
            taken = loop.run_until_complete(together(module, clients[protocol], size, int(count)))
        else:
            if case not in calls:
                client = (
                    clients.setdefault(protocol, makers[protocol]())
                    if protocol not in clients
                    else clients[protocol]
                )
                module = over_http if protocol == "http" else over_grpc
                calls[case] = (
                    with_shared_memory(client, size)
                    if protocol == "grpc-shm"
                    else plain(module, client, size)
                )
            taken = []
            for _ in range(int(count)):
                started = time.perf_counter()
                calls[case]()
                taken.append(time.perf_counter() - started)
        print(json.dumps(taken), flush=True)


if __name__ == "__main__":
    main()
