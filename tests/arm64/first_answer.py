"""What a plain install of core + edge + disk must do, with nothing else there: a cold process, its first answer, once
from the model and once from the cache on disk. Prints what it took: the machine and the peak of memory.
"""

from __future__ import annotations

import platform
import re
import tempfile
from pathlib import Path

import numpy as np

from mcp_client import Cache, MCPClient

# y = x + x, FP32 [n]: an edge install has no ``onnx`` package to write it with.
DOUBLE = bytes.fromhex(
    "080a3a3c0a0e0a01780a017812017922034164641206646f75626c655a100a0178120b0a09080112050a0312016e"
    "62100a0179120b0a09080112050a0312016e42040a001012"
)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder, "models")
        models.mkdir()
        (models / "double.onnx").write_bytes(DOUBLE)
        sources = []
        for _ in range(2):
            cache = Cache(directory=Path(folder, "answers"))
            with MCPClient(f"edge:{models}", cache=cache, telemetry=None, prefetch=None) as client:
                result = client.infer(np.array([1.0, 2.5], np.float32))
                assert result.outputs["y"].tolist() == [2.0, 5.0]
                sources.append(result.source)
        assert sources == ["edge", "cache"], sources
    peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    print(f"{platform.machine()}: answered; {int(peak[1]) // 1024 if peak else '?'} MB at the most")


main()
