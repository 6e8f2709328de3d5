"""Smaller and faster variants of a model, each measured on the user's own inputs, so that the user chooses by
a table.

Needs the ``onnx`` package; what is written is plain ONNX, which runs without it.
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import EdgeError, InvalidInputError, MissingExtraError
from ..tensors import Array, dtype_of
from .model import OnnxModel

Feed = Mapping[str, Array]

log = logging.getLogger("mcp_client.edge")


@dataclass(frozen=True, slots=True)
class Variant:
    """``ms``: median of a call. ``error``: largest difference of an output from the original's, as a share of
    the largest absolute value of that output. ``fault``: why there is no such variant of this model, "" if
    there is.
    """

    name: str
    path: Path
    nbytes: int = 0
    ms: float = 0.0
    error: float = 0.0
    fault: str = ""


def optimise(
    path: Path, into: Path, inputs: Sequence[Feed], *, rounds: int = 15, only: Collection[str] = ()
) -> list[Variant]:
    """Write variants of the model at ``path`` into the folder ``into`` and measure them, the original first.

    ``fused``: ONNX Runtime's own graph fusion, done ahead. ``transformer``: attention and what surrounds it as
    single nodes (needs ``sympy``). ``fp16``: half-precision weights and arithmetic,
    inputs and outputs as they were. ``int8_dynamic``: weights of matrix products as INT8, scales taken as it
    runs. ``int8_static``: weights and activations, scales taken from ``inputs``. Calls are timed in turn, A B
    C A B C, so that a busy machine is busy for all. ``only``: these variants.
    """
    if not inputs:
        raise InvalidInputError("variants are measured on inputs; pass at least one")
    into.mkdir(parents=True, exist_ok=True)
    makers: dict[str, Callable[[Path, Path, Sequence[Feed]], None]] = {
        "fused": _fuse,
        "transformer": _fuse_transformer,
        "fp16": _halve,
        "int8_dynamic": _quantise_dynamic,
        "int8_static": _quantise_static,
    }
    if only:
        makers = {name: make for name, make in makers.items() if name in only}
    models = {"original": OnnxModel(path)}
    variants = {"original": Variant("original", path)}
    wanted = [models["original"].run(feed) for feed in inputs]
    with _modern(path) as source:
        for name, make in makers.items():
            target = into / f"{path.stem}.{name}.onnx"
            try:
                with _quiet():
                    make(source, target, inputs)
                model = OnnxModel(target)
                error = max(_error(model.run(feed), want) for feed, want in zip(inputs, wanted, strict=True))
            except MissingExtraError:
                raise
            except Exception as failure:  # the converters raise anything for a model they can't convert
                target.unlink(missing_ok=True)
                variants[name] = Variant(name, target, fault=f"{type(failure).__name__}: {failure}"[:200])
            else:
                models[name] = model
                variants[name] = Variant(name, target, error=error)
    times = _time(models, inputs, rounds)
    return [
        variant
        if variant.fault
        else Variant(name, variant.path, variant.path.stat().st_size, times[name] * 1000, variant.error)
        for name, variant in variants.items()
    ]


def random_inputs(path: Path, *, count: int = 4, seed: int = 0) -> list[dict[str, Array]]:
    """Inputs for a model of which nothing is known: normal floats, zeros otherwise, free sizes as 1."""
    rng = np.random.default_rng(seed)
    specs = OnnxModel(path).metadata.inputs
    feeds = []
    for _ in range(count):
        feed = {}
        for spec in specs:
            shape = tuple(1 if size < 0 else size for size in spec.shape or ())
            if spec.datatype == "BYTES":
                raise InvalidInputError(f"input {spec} needs an example: pass --inputs FILE.npz")
            dtype = dtype_of(spec.datatype)
            values = (
                rng.standard_normal(shape)
                if spec.datatype in ("FP16", "FP32", "FP64", "BF16")
                else np.zeros(shape)
            )
            feed[spec.name] = values.astype(dtype)
        feeds.append(feed)
    return feeds


def _fuse(path: Path, target: Path, _: Sequence[Feed]) -> None:
    import onnxruntime as ort

    options = ort.SessionOptions()
    # Not ALL: what that writes runs only on CPUs like this one, and it is done again at every load anyway.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(target)
    options.log_severity_level = 4
    ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _fuse_transformer(path: Path, target: Path, _: Sequence[Feed]) -> None:
    _onnx()
    from onnxruntime.transformers.optimizer import optimize_model

    fused = optimize_model(
        str(path), model_type="bert", opt_level=0
    )  # heads and width are read from the graph
    if not fused.get_fused_operator_statistics()["Attention"]:
        raise EdgeError("no attention was found that can be fused")
    fused.save_model_to_file(str(target))


def _halve(path: Path, target: Path, _: Sequence[Feed]) -> None:
    onnx = _onnx()
    from onnxruntime.transformers.float16 import convert_float_to_float16

    onnx.save(convert_float_to_float16(onnx.load(path), keep_io_types=True), target)


def _quantise_dynamic(path: Path, target: Path, _: Sequence[Feed]) -> None:
    _onnx()
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with _prepared(path) as prepared:
        # MatMul and Gemm only: the kernels for convolutions with dynamic scales are slower than those for
        # floats.
        quantize_dynamic(
            prepared,
            target,
            weight_type=QuantType.QInt8,
            op_types_to_quantize=["MatMul", "Gemm"],
            per_channel=True,
        )


def _quantise_static(path: Path, target: Path, inputs: Sequence[Feed]) -> None:
    _onnx()
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._left = iter(inputs)

        def get_next(self) -> dict[str, Array] | None:
            feed = next(self._left, None)
            return None if feed is None else dict(feed)

    with _prepared(path) as prepared:
        for per_channel in (True, False):  # the better one first; some graphs are invalid with it
            quantize_static(
                prepared,
                target,
                Reader(),
                quant_format=QuantFormat.QDQ,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                per_channel=per_channel,
            )
            with contextlib.suppress(EdgeError):
                OnnxModel(target)
                return


_PER_CHANNEL_OPSET = 13  # the first whose DequantizeLinear has an axis


@contextlib.contextmanager
def _modern(path: Path) -> Iterator[Path]:
    """The model as the converters want it: without its weights among its inputs (IR version 3 had them there, and callers
    would have to pass them), and of an operator set that can say a scale per channel (ResNet-50: error 0.030 against 0.052).
    """
    onnx = _onnx()
    model = onnx.load(path)
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [each for each in model.graph.input if each.name not in weights]
    old = any(each.domain == "" and each.version < _PER_CHANNEL_OPSET for each in model.opset_import)
    if len(inputs) == len(model.graph.input) and not old:
        yield path
        return
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    model.ir_version = max(model.ir_version, 4)
    if old:
        try:
            model = onnx.version_converter.convert_version(model, _PER_CHANNEL_OPSET)
        except Exception as error:  # it raises anything for an operator that it can't convert
            log.debug("%s stays at its operator set: %s", path, error)
    with tempfile.TemporaryDirectory() as folder:
        modern = Path(folder) / path.name
        onnx.save(model, modern)
        yield modern


@contextlib.contextmanager
def _prepared(path: Path) -> Iterator[Path]:
    """The model with its constants as weights, batch norms folded and shapes known, as the quantisers
    want it.
    """
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with tempfile.TemporaryDirectory() as folder:
        prepared = Path(folder) / "prepared.onnx"
        quant_pre_process(path, prepared, skip_symbolic_shape=True)
        yield prepared


def _onnx() -> Any:
    try:
        import onnx
        import onnx.version_converter
    except ImportError as error:
        raise MissingExtraError("dev", "onnx", "writing variants of a model") from error
    return onnx


def _error(got: Feed, wanted: Feed) -> float:
    worst = 0.0
    for name, want in wanted.items():
        if want.dtype.kind not in "fiu" or not want.size:
            continue
        reference = want.astype(np.float64)
        largest = float(np.abs(reference).max())
        worst = max(worst, float(np.abs(got[name].astype(np.float64) - reference).max()) / (largest or 1.0))
    return worst


def _time(models: Mapping[str, OnnxModel], inputs: Sequence[Feed], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in models}
    for number in range(rounds + 1):
        for name, model in models.items():
            started = time.perf_counter()
            model.run(inputs[number % len(inputs)])
            if number:  # the first warms
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(each) for name, each in times.items()}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The converters log through the root logger what they would rather have been given."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(level)
