"""The graphs that the edge's benchmark runs: BERT-base and ResNet-50 in size and shape, with random weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

RESNET = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light" / "light_resnet50.onnx"


def bert_base(
    path: Path, *, layers: int = 12, width: int = 768, heads: int = 12, words: int = 30522, seed: int = 0
) -> Path:
    """An encoder of BERT-base's sizes (Devlin et al., 2018): ``input_ids``, ``attention_mask`` INT64 [batch, seq] →
    ``hidden`` FP32 [batch, seq, width]. Weights as BERT starts with: normal, 0.02; the graph as PyTorch exports it.
    """
    rng = np.random.default_rng(seed)
    pool = rng.standard_normal(4 * width * width + 4099, np.float32) * np.float32(0.02)
    nodes: list[onnx.NodeProto] = []
    weights: list[onnx.TensorProto] = []

    def constant(name: str, array: object, dtype: object = np.float32) -> str:
        weights.append(numpy_helper.from_array(np.asarray(array, dtype), name))  # type: ignore[arg-type]
        return name

    def normal(name: str, *shape: int) -> str:
        # Drawn from one pool, turned by a random amount: 110 million normal numbers take longer than all measurements.
        return constant(name, np.resize(np.roll(pool, int(rng.integers(len(pool)))), shape))

    def add(op: str, inputs: list[str], output: str, **attributes: object) -> str:
        nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))
        return output

    def dense(x: str, name: str, into: int, out: int) -> str:
        product = add("MatMul", [x, normal(f"{name}_w", into, out)], f"{name}_p")
        return add("Add", [product, normal(f"{name}_b", out)], name)

    def norm(x: str, residual: str, name: str) -> str:
        scale, bias = constant(f"{name}_g", np.ones(width)), constant(f"{name}_o", np.zeros(width))
        total = add("Add", [x, residual], f"{name}_s")
        return add("LayerNormalization", [total, scale, bias], name, axis=-1, epsilon=1e-12)

    constant("one", 1.0)
    constant("low", np.finfo(np.float32).min)
    constant("split", [0, 0, heads, width // heads], np.int64)
    constant("join", [0, 0, width], np.int64)
    constant("root", np.sqrt(width / heads))
    constant("axis1", [1], np.int64)
    constant("axis2", [2], np.int64)
    for name, value in (("sqrt2", np.sqrt(2.0)), ("half", 0.5), ("second", 1)):
        constant(name, value, np.int64 if name == "second" else np.float32)
    word = add("Gather", [normal("words", words, width), "input_ids"], "word")
    shape = add("Shape", ["input_ids"], "ids_shape")
    length = add("Gather", [shape, "second"], "length", axis=0)
    constant("zero", 0, np.int64)
    constant("step", 1, np.int64)
    positions = add("Range", ["zero", length, "step"], "positions")
    placed = add("Gather", [normal("places", 512, width), positions], "place")
    x = norm(word, placed, "embedded")
    wide = add("Unsqueeze", [add("Unsqueeze", ["attention_mask", "axis1"], "mask3"), "axis2"], "mask4")
    mask = add("Cast", [wide], "maskf", to=TensorProto.FLOAT)
    away = add("Mul", [add("Sub", ["one", mask], "masked"), "low"], "bias")
    for layer in range(layers):
        at = f"l{layer}"
        parts = {}
        for part in "qkv":
            flat = add("Reshape", [dense(x, f"{at}_{part}", width, width), "split"], f"{at}_{part}4")
            parts[part] = add(
                "Transpose", [flat], f"{at}_{part}t", perm=[0, 2, 3, 1] if part == "k" else [0, 2, 1, 3]
            )
        scores = add("MatMul", [parts["q"], parts["k"]], f"{at}_qk")
        scores = add("Add", [add("Div", [scores, "root"], f"{at}_scaled"), away], f"{at}_scores")
        shares = add("Softmax", [scores], f"{at}_shares", axis=-1)
        seen = add(
            "Transpose", [add("MatMul", [shares, parts["v"]], f"{at}_av")], f"{at}_at", perm=[0, 2, 1, 3]
        )
        seen = dense(add("Reshape", [seen, "join"], f"{at}_a"), f"{at}_ao", width, width)
        x = norm(seen, x, f"{at}_n1")
        up = dense(x, f"{at}_up", width, 4 * width)
        erf = add("Erf", [add("Div", [up, "sqrt2"], f"{at}_g1")], f"{at}_g2")
        gelu = add(
            "Mul", [add("Mul", [up, add("Add", [erf, "one"], f"{at}_g3")], f"{at}_g4"), "half"], f"{at}_g5"
        )
        x = norm(dense(gelu, f"{at}_down", 4 * width, width), x, f"{at}_n2")
    nodes[-1].output[0] = "hidden"
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "seq"])
        for name in ("input_ids", "attention_mask")
    ]
    output = helper.make_tensor_value_info("hidden", TensorProto.FLOAT, ["batch", "seq", width])
    graph = helper.make_graph(nodes, "bert", inputs, [output], weights)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def bert_inputs(
    count: int, *, length: int = 128, words: int = 30522, seed: int = 1
) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [
        {
            "input_ids": rng.integers(0, words, (1, length)),
            "attention_mask": np.ones((1, length), np.int64),
        }
        for _ in range(count)
    ]


def resnet50(path: Path) -> Path:
    """The ``onnx`` package's ResNet-50, whose weights are all alike, with random ones of the usual sizes
    instead (He et al.).
    """
    rng = np.random.default_rng(0)
    model = onnx.load(RESNET)
    shapes = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    kept = []
    for node in model.graph.node:
        if node.op_type != "ConstantOfShape" or node.input[0] not in shapes:
            kept.append(node)
            continue
        shape, name = tuple(int(size) for size in shapes[node.input[0]]), node.output[0]
        values = rng.standard_normal(shape).astype(np.float32)
        if len(shape) > 1:
            values *= np.sqrt(2 / np.prod(shape[1:]))
        elif name.endswith(("_s_0", "_riv_0")):  # scales and variances
            values = 1 + 0.1 * np.abs(values)
        else:
            values *= 0.1
        model.graph.initializer.append(numpy_helper.from_array(values.astype(np.float32), name))
    softmax = kept.pop()  # it would hide every error: the logits of random weights are far apart
    model.graph.output[0].name = softmax.input[0]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    used = {name for node in kept for name in node.input}
    weights = [tensor for tensor in model.graph.initializer if tensor.name in used]
    inputs = [each for each in model.graph.input if each.name not in shapes]
    del model.graph.initializer[:], model.graph.input[:]
    model.graph.initializer.extend(weights)
    model.graph.input.extend(inputs)
    model.ir_version = 8
    onnx.save(model, path)
    return path
