"""Which runtime loads a model for a device: ONNX Runtime, by the same code that runs models at the edge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .models import Runnable


def loader(device: str) -> Callable[[Path], Runnable]:
    from mcp_client.edge.runtime import OnnxModel

    return OnnxModel
