"""A model that takes long in many small steps, so that it can be told to stop between two of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper

from tests import models

STEPS = 200


def slow(path: Path, *, width: int = 256, steps: int = STEPS) -> Path:
    """``x`` FP32 [-1, 3] → ``probs`` FP32 [-1, 2] as ``affine``, after ``steps`` products of ``width`` × ``width``."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("MatMul", ["x", "weights"], ["product"]),
        helper.make_node("Add", ["product", "bias"], ["affine"]),
        helper.make_node("ReduceMean", ["x", "both"], ["mean"], keepdims=0),
        helper.make_node("Mul", ["mean", "square"], ["s0"]),
    ]
    for step in range(steps):
        nodes.append(helper.make_node("MatMul", [f"s{step}", "square"], [f"s{step + 1}"]))
    nodes += [
        helper.make_node("ReduceMean", [f"s{steps}", "both"], ["end"], keepdims=0),
        helper.make_node("Mul", ["end", "zero"], ["nothing"]),
        helper.make_node("Add", ["affine", "nothing"], ["probs"]),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    return models.save(
        path,
        nodes,
        inputs=[("x", TensorProto.FLOAT, ["batch", 3])],
        outputs=[("probs", TensorProto.FLOAT, ["batch", 2])],
        constants={
            "weights": models.WEIGHTS,
            "bias": models.BIAS,
            "square": (rng.standard_normal((width, width)) / width).astype(np.float32),
            "both": np.array([0, 1], np.int64),
            "zero": np.float32(0.0),
        },
    )
