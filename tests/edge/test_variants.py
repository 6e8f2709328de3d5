"""Variants of a model: each runs, says how far it is off, and an impossible one says why."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from typer.testing import CliRunner

from mcp_client.cli.models import app
from mcp_client.edge.model import OnnxModel
from mcp_client.edge.variants import optimise, random_inputs
from mcp_client.errors import InvalidInputError, MissingExtraError
from tests import models
from tests.benchmarks.graphs import bert_base, bert_inputs

RNG = np.random.default_rng(5)


def network(path: Path) -> Path:
    """A convolution with batch norm, a ReLU, a pooling and a matrix product: ``x`` [1, 3, 16, 16] → ``y``
    [1, 10].
    """
    constants = {
        "k": RNG.standard_normal((32, 3, 3, 3)).astype(np.float32) / 5,
        **{name: np.abs(RNG.standard_normal(32)).astype(np.float32) + 0.5 for name in ("g", "b", "m", "v")},
        "w": RNG.standard_normal((32, 10)).astype(np.float32) / 5,
    }
    nodes = [
        helper.make_node("Conv", ["x", "k"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c", "g", "b", "m", "v"], ["n"]),
        helper.make_node("Relu", ["n"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "w"], ["y"]),
    ]
    return models.save(
        path,
        nodes,
        inputs=[("x", TensorProto.FLOAT, [1, 3, 16, 16])],
        outputs=[("y", TensorProto.FLOAT, [1, 10])],
        constants=constants,
    )


def test_each_variant_is_there_and_near_the_original(tmp_path: Path) -> None:
    path = network(tmp_path / "net.onnx")
    inputs = random_inputs(path, count=8)
    variants = {each.name: each for each in optimise(path, tmp_path / "out", inputs, rounds=3)}
    assert list(variants) == ["original", "fused", "transformer", "fp16", "int8_dynamic", "int8_static"]
    assert "no attention" in variants.pop("transformer").fault
    assert [each.fault for each in variants.values()] == [""] * 5
    bounds = {"original": 0.0, "fused": 1e-5, "fp16": 0.01, "int8_dynamic": 0.05, "int8_static": 0.1}
    for name, bound in bounds.items():
        each = variants[name]
        assert each.error <= bound, name
        assert each.ms > 0
        assert each.nbytes == each.path.stat().st_size
        model = OnnxModel(each.path)
        assert model.metadata.inputs == OnnxModel(path).metadata.inputs
    assert variants["fp16"].nbytes < 0.75 * variants["original"].nbytes


def test_weights_that_are_listed_as_inputs_stay_weights(tmp_path: Path) -> None:
    path = network(tmp_path / "net.onnx")
    old = onnx.load(path)
    old.ir_version = 3
    for tensor in old.graph.initializer:
        old.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    onnx.save(old, path)
    variants = optimise(path, tmp_path / "out", random_inputs(path, count=2), rounds=1)
    variants = [each for each in variants if each.name != "transformer"]
    assert [each.fault for each in variants] == [""] * 5
    assert {len(OnnxModel(each.path).metadata.inputs) for each in variants} == {1}


def test_an_encoder_gets_its_attention_fused_and_only_the_variants_asked_for_are_made(tmp_path: Path) -> None:
    path = bert_base(tmp_path / "bert.onnx", layers=1, width=128, heads=4, words=100)
    feeds = bert_inputs(2, length=16, words=100)
    only = ("transformer", "int8_dynamic")
    variants = optimise(path, tmp_path / "out", feeds, rounds=1, only=only)
    assert [each.name for each in variants] == ["original", *only]
    assert [each.fault for each in variants] == [""] * 3
    fused = onnx.load(variants[1].path)
    assert "Attention" in {node.op_type for node in fused.graph.node}
    assert variants[1].error < 1e-4
    assert variants[2].error < 0.05


def test_a_model_of_an_old_operator_set_is_quantised_per_channel(tmp_path: Path) -> None:
    path = network(tmp_path / "net.onnx")
    model = onnx.load(path)
    model.opset_import[0].version = 9
    onnx.save(model, path)
    variants = optimise(path, tmp_path / "out", random_inputs(path, count=8), rounds=1, only=("int8_static",))
    assert variants[1].fault == ""
    weights = onnx.load(variants[1].path).graph.initializer
    assert any(tensor.name.endswith("_scale") and list(tensor.dims) == [32] for tensor in weights)


def test_a_variant_that_a_model_can_not_have_says_why(tmp_path: Path) -> None:
    path = models.identity(tmp_path / "m.onnx", "INT64", ("n",))
    variants = optimise(path, tmp_path / "out", [{"x": np.arange(3)}], rounds=1)
    for each in variants:
        assert (each.fault == "") == each.path.exists()
        assert each.fault or each.error == 0.0


def test_inputs_are_needed_and_can_be_made_up_where_they_are_numbers(tmp_path: Path) -> None:
    path = models.affine(tmp_path / "m.onnx")
    with pytest.raises(InvalidInputError, match="at least one"):
        optimise(path, tmp_path / "out", [])
    feeds = random_inputs(path, count=2)
    assert [feed["x"].shape for feed in feeds] == [(1, 3)] * 2
    assert not np.array_equal(feeds[0]["x"], feeds[1]["x"])
    with pytest.raises(InvalidInputError, match=r"pass --inputs"):
        random_inputs(models.identity(tmp_path / "s.onnx", "BYTES"))


def test_without_the_onnx_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = models.affine(tmp_path / "m.onnx")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtraError, match="onnx"):
        optimise(path, tmp_path / "out", random_inputs(path), rounds=1)


def test_the_command_shows_a_table(tmp_path: Path) -> None:
    path = network(tmp_path / "net.onnx")
    np.savez(tmp_path / "page.npz", x=RNG.standard_normal((1, 3, 16, 16)).astype(np.float32))
    arguments = [
        "optimize",
        str(path),
        "--into",
        str(tmp_path / "out"),
        "--inputs",
        str(tmp_path / "page.npz"),
    ]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.exception
    for name in ("original", "fused", "fp16", "int8_dynamic", "int8_static"):
        assert name in result.stdout
