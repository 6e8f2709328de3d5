"""Make the model of this example: how many standard deviations the last reading is away from the window's
mean.

python make_model.py server-models/anomaly.onnx && mcp-server --model-path server-models --port 8080
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def anomaly(path: Path) -> None:
    """``x`` FP32 [1, n] → ``score`` FP32 [1] = |x[-1] − mean(x)| / (deviation(x) + 0.1)."""
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[1], keepdims=1),
        helper.make_node("Sub", ["x", "mean"], ["centred"]),
        helper.make_node("Mul", ["centred", "centred"], ["squares"]),
        helper.make_node("ReduceMean", ["squares"], ["variance"], axes=[1], keepdims=0),
        helper.make_node("Sqrt", ["variance"], ["deviation"]),
        helper.make_node("Add", ["deviation", "floor"], ["scale"]),
        helper.make_node("Gather", ["centred", "last"], ["latest"], axis=1),
        helper.make_node("Abs", ["latest"], ["distance"]),
        helper.make_node("Div", ["distance", "scale"], ["score"]),
    ]
    graph = helper.make_graph(
        nodes,
        "anomaly",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, "n"])],
        [helper.make_tensor_value_info("score", TensorProto.FLOAT, [1])],
        [
            # keeps a sensor that stands still from dividing by nothing
            numpy_helper.from_array(np.float32([0.1]), "floor"),
            numpy_helper.from_array(np.array(-1), "last"),
        ],
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


if __name__ == "__main__":
    anomaly(Path(sys.argv[1]))
