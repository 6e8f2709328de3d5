"""The management calls of the Open Inference Protocol, as far as HTTP's JSON and gRPC's messages say the same thing.

A gRPC message is read as the document that Triton's HTTP would have sent (``management_grpc.py``), so that there is one reader.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ..errors import InvalidInputError, NotFoundError, ProtocolError, ServerError
from ..management import STAGES, Duration, IndexEntry, ModelConfig, ModelStatistics, ServerInfo
from ..tensors import TensorSpec
from .documents import text_of


def read_server(document: dict[str, Any]) -> ServerInfo:
    extensions = document.get("extensions")
    if extensions is None:
        extensions = []
    if not isinstance(extensions, list) or not all(isinstance(name, str) for name in extensions):
        raise ProtocolError("the server's extensions must be a list of names")
    return ServerInfo(text_of(document, "name"), text_of(document, "version"), tuple(extensions))


def read_index(document: Any) -> list[IndexEntry]:
    if not isinstance(document, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in document
    ):
        raise ProtocolError('the repository index must be a list of {"name": "…", "state": "…"}')
    return [
        IndexEntry(
            entry["name"],
            text_of(entry, "version"),
            text_of(entry, "state").removeprefix("State."),  # MLServer's gRPC sends its enum's Python name
            text_of(entry, "reason"),
        )
        for entry in document
    ]


def ready_names(index: list[IndexEntry]) -> list[str]:
    """The models that have a version ready to run, each once."""
    return list(dict.fromkeys(entry.name for entry in index if entry.state in ("READY", "")))


# What a Triton (2.51) says of a model that it does not have, when asked for statistics: with status 400.
_NO_SUCH_MODEL = re.compile(r"requested model .* is not available")


def statistics_error(error: ServerError) -> ServerError:
    """The error of a refused question for statistics."""
    if error.status == 400 and _NO_SUCH_MODEL.search(error.message):
        return NotFoundError(error.message, status=404, code=error.code)
    return error


def read_statistics(document: dict[str, Any]) -> list[ModelStatistics]:
    return [_statistics(each) for each in _objects(document.get("model_stats"), "the model statistics")]


def _statistics(told: dict[str, Any]) -> ModelStatistics:
    what = f"the statistics of model {text_of(told, 'name')!r}"
    last_ms = _count(told.get("last_inference"), what)
    stages = told.get("inference_stats")
    if stages is not None and not isinstance(stages, dict):
        raise ProtocolError(f"{what}: inference_stats must be an object")
    durations: dict[str, Any] = {stage: _duration((stages or {}).get(stage), what) for stage in STAGES}
    return ModelStatistics(
        name=text_of(told, "name"),
        version=text_of(told, "version"),
        inferences=_count(told.get("inference_count"), what),
        executions=_count(told.get("execution_count"), what),
        last_inference=last_ms / 1e3 if last_ms else None,
        **durations,
    )


def _duration(told: Any, what: str) -> Duration:
    if told is None:
        return Duration()
    if not isinstance(told, dict):
        raise ProtocolError(f'{what}: a duration must be {{"count": n, "ns": n}}')
    return Duration(_count(told.get("count"), what), _count(told.get("ns"), what) / 1e9)


def read_config(document: dict[str, Any]) -> ModelConfig:
    what = "the model's configuration"
    policy = document.get("model_transaction_policy")
    known = {"name", "platform", "backend", "max_batch_size", "input", "output", "model_transaction_policy"}
    return ModelConfig(
        name=text_of(document, "name"),
        platform=text_of(document, "platform"),
        backend=text_of(document, "backend"),
        max_batch_size=_count(document.get("max_batch_size"), what),
        inputs=tuple(_spec(each, "input") for each in _objects(document.get("input"), what)),
        outputs=tuple(_spec(each, "output") for each in _objects(document.get("output"), what)),
        decoupled=isinstance(policy, dict) and policy.get("decoupled") is True,
        extra={key: value for key, value in document.items() if key not in known},
    )


def _spec(told: dict[str, Any], kind: str) -> TensorSpec:
    name, datatype, dims = text_of(told, "name"), text_of(told, "data_type"), told.get("dims")
    if not isinstance(dims, list) or not all(type(size) is int for size in dims):
        raise ProtocolError(
            f"{kind} {name!r}: the configuration's dims must be a list of sizes; got {dims!r}"
        )
    datatype = datatype.removeprefix("TYPE_")
    return TensorSpec(
        name,
        "BYTES" if datatype == "STRING" else datatype,
        tuple(max(size, -1) for size in dims),
        optional=told.get("optional") is True,
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """The server's side of ``read_config``."""

    def tensor(spec: TensorSpec) -> dict[str, Any]:
        datatype = "STRING" if spec.datatype == "BYTES" else spec.datatype
        dims = list(spec.shape) if spec.shape is not None else [-1]
        return {"name": spec.name, "data_type": f"TYPE_{datatype}", "dims": dims}

    return {
        "name": config.name,
        "platform": config.platform,
        "backend": config.backend,
        "max_batch_size": config.max_batch_size,
        "input": [{**tensor(spec), "optional": spec.optional} for spec in config.inputs],
        "output": [tensor(spec) for spec in config.outputs],
        "model_transaction_policy": {"decoupled": config.decoupled},
        **config.extra,
    }


def config_text(config: str | Mapping[str, Any]) -> str:
    """The ``config`` parameter of a load: JSON as text."""
    if isinstance(config, str):
        return config
    try:
        return json.dumps(config)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"config can't be written as JSON: {error}") from error


def file_parameter(path: str) -> str:
    """The parameter's name for one of the files of a load: ``1/model.onnx`` → ``file:1/model.onnx``."""
    return path if path.startswith("file:") else f"file:{path}"


def _objects(value: Any, what: str) -> list[dict[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ProtocolError(f"{what} must be a list of objects")
    return value


def _count(value: Any, what: str) -> int:
    """Whole numbers; as text too, which is how protobuf's JSON has those of 64 bits."""
    if value is None:
        return 0
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 20:
        value = int(value)
    if type(value) is not int or value < 0:
        raise ProtocolError(f"{what}: expected a whole number ≥ 0; got {str(value)[:40]!r}")
    return value
