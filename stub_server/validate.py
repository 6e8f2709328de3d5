"""Whether a request fits its model; if not, an error that says what was expected and what came."""

from __future__ import annotations

from dataclasses import replace

from mcp_client.errors import ServerError, listed
from mcp_client.request import Request
from mcp_client.tensors import Array, ModelMetadata, TensorSpec, datatype_of


def fitted(request: Request, metadata: ModelMetadata, *, short: bool) -> Request:
    """The request with its model's name and version, and the short form's tensor under its input's name."""
    if short:
        request = _named(request, metadata)
    known = {spec.name: spec for spec in metadata.inputs}
    unknown = [name for name in request.inputs if name not in known]
    if unknown:
        raise _refused("unknown_input", f"no input {listed(unknown)}; {_takes(metadata)}")
    missing = [spec.name for spec in metadata.inputs if spec.name not in request.inputs and not spec.optional]
    if missing:
        raise _refused("missing_input", f"input {listed(missing)} is missing; {_takes(metadata)}")
    for name, array in request.inputs.items():
        _check(array, known[name])
    there = [spec.name for spec in metadata.outputs]
    unknown = [name for name in request.outputs if name not in there]
    if unknown:
        raise _refused("unknown_output", f"no output {listed(unknown)}; the model has {listed(there)}")
    return replace(request, model=metadata.name, version=metadata.version)


def _named(request: Request, metadata: ModelMetadata) -> Request:
    needed = [spec for spec in metadata.inputs if not spec.optional] or list(metadata.inputs)
    outputs = request.outputs or tuple(spec.name for spec in metadata.outputs)
    if len(needed) != 1 or len(outputs) != 1:
        raise _refused(
            "full_form_needed",
            f"the short form is for one input and one output; model {metadata.name!r} has {len(needed)} and "
            f'{len(outputs)}: name them with "inputs" and "outputs"',
        )
    (array,) = request.inputs.values()
    return replace(request, inputs={needed[0].name: array})


def _check(array: Array, spec: TensorSpec) -> None:
    came = datatype_of(array)
    if came != spec.datatype:
        raise _refused("datatype_mismatch", f"input {spec.name!r} must be {spec.datatype}; got {came}")
    if spec.shape is None:
        return
    fits = len(spec.shape) == array.ndim and all(
        wanted in (-1, size) for wanted, size in zip(spec.shape, array.shape, strict=True)
    )
    if not fits:
        any_size = " (-1: any size)" if -1 in spec.shape else ""
        raise _refused(
            "shape_mismatch",
            f"input {spec.name!r} must have shape {list(spec.shape)}{any_size}; got {list(array.shape)}",
        )


def _takes(metadata: ModelMetadata) -> str:
    return f"model {metadata.name!r} takes {'; '.join(map(str, metadata.inputs)) or 'no inputs'}"


def _refused(code: str, message: str) -> ServerError:
    return ServerError.of(400, message, code=code)
