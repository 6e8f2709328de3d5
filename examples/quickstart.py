"""A server, a client, a cache hit and a prefetch in twenty lines: ``python -m examples.quickstart``."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np

from examples.demo.ocr import DET, copy_models
from mcp_client import MCPClient
from mcp_client.tensors import Array
from stub_server import StubServer


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        copy_models(Path(folder))  # a text detector; any ONNX file will do
        with StubServer(Path(folder) / f"{DET}.onnx") as server, MCPClient(server.url) as client:
            picture = np.ones((1, 3, 64, 64), np.float32)
            print(client.infer(picture))  # source=server
            print(client.infer(picture))  # source=cache

            @client.route("/page/{n:int}")  # how the input of any page is made
            def page(n: int) -> Array:
                return np.full((1, 3, 64, 64), n / 100, np.float32)

            reader = client.session("user-42")
            for n in range(1, 9):
                print(
                    f"/page/{n}", reader.infer(path=f"/page/{n}")
                )  # source=prefetch once the step is learned
                time.sleep(0.1)  # the reader reads


if __name__ == "__main__":
    main()
