"""Open Inference Protocol v2 over gRPC (PROTOCOL.md section 3): the client's codec, and the server's side as functions.

A ``WireRequest``'s path is the method, its body the serialised message. Tensors travel in ``raw_*_contents``, the last field
of both inference messages: they are put behind the rest as they lie, and read where they lie, so that protobuf never
copies them. Typed ``contents`` are read too (MLServer and KServe answer with them).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..errors import InvalidInputError, MissingExtraError, ProtocolError, ServerError
from ..request import Parameter, Request
from ..result import Answer
from ..tensors import (
    Array,
    ModelMetadata,
    ShapeError,
    TensorSpec,
    element_count,
    from_raw,
    to_raw,
    wire_dtype,
)
from . import Buffer, Shared, WireRequest, WireResponse
from .documents import check_answer, in_order, known_to_oip, least, oip_datatype, read_count
from .grpc_status import require_success, status_told
from .http_common import freshness, read_context, request_headers
from .json_tensors import datatype_named
from .regions import ReadRegion, put_in_region, tensor_in_region

try:
    from google.protobuf.unknown_fields import UnknownFieldSet

    from . import oip_pb2 as pb
    from .management_grpc import OipGrpcManagement, ask, method, named, require_offered
    from .protobuf_bytes import parse, split, write_varint
except ImportError as missing:
    raise MissingExtraError("grpc", "protobuf", "the gRPC protocol") from missing

# protobuf's own limit for one message.
MAX_MESSAGE_BYTES = 2**31 - 1
_RAW_INPUTS, _RAW_OUTPUTS = 7, 6  # field numbers of raw_input_contents and raw_output_contents
# Which field of InferTensorContents holds a datatype. FP16, BF16 and FP8 have none.
_CONTENTS: Mapping[str, str] = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
_WIDE = {"int_contents": np.dtype(np.int32), "uint_contents": np.dtype(np.uint32)}


class OipGrpcCodec(OipGrpcManagement):
    """The client's side."""

    name = "oip-grpc"

    def infer(self, request: Request, metadata: ModelMetadata | None) -> WireRequest:
        return WireRequest("POST", _INFER, _lower(request_headers(request)), _write_request(request))

    def stream(self, request: Request) -> WireRequest:
        """As ``infer``, for a model that may answer with any number of responses."""
        return WireRequest("POST", _STREAM, _lower(request_headers(request)), _write_request(request))

    def decode_infer(self, response: WireResponse, request: Request) -> Answer:
        require_success(response)
        return _read_answer(bytes(response.body), response.headers, request)

    def decode_stream(self, response: WireResponse, request: Request) -> Answer | None:
        """One message of a stream. ``None`` for one that only says that there will be no more."""
        require_offered(response, "streamed inference")
        # Field by field, as protobuf would copy the tensors: error_message = 1, infer_response = 2.
        rest, inner = split(bytes(response.body), 2, "the stream's message")
        message = parse(pb.ModelStreamInferResponse, rest, "the stream's message")
        if len(
            UnknownFieldSet(message)
        ):  # MLServer streams bare answers: their outputs are a field beyond these two
            return _read_answer(bytes(response.body), response.headers, request)
        if message.error_message:
            raise ServerError.of(
                status_told(message.error_message), message.error_message, code="stream_error"
            )
        body = b"".join(inner)  # one, unless a sender split it, which means to merge them
        answer = _read_answer(body, response.headers, request)
        return answer if answer.outputs or not _is_final(body) else None

    # Triton's extension for system shared memory; sharing.py decides when.

    def register(self, region: str, size: int) -> WireRequest:
        return ask(
            "SystemSharedMemoryRegister",
            pb.SystemSharedMemoryRegisterRequest(name=region, key=f"/{region}", byte_size=size),
        )

    def unregister(self, region: str) -> WireRequest:
        return ask("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(name=region))

    def infer_shared(self, request: Request, shared: Shared) -> WireRequest:
        """As ``infer``, with tensors in shared memory."""
        return WireRequest("POST", _INFER, _lower(request_headers(request)), _write_request(request, shared))

    def decode_shared(self, response: WireResponse, request: Request, shared: Shared) -> Answer:
        require_success(response)
        return _read_answer(bytes(response.body), response.headers, request, shared)

    def metadata(self, model: str, version: str) -> WireRequest:
        return ask("ModelMetadata", pb.ModelMetadataRequest(name=named(model), version=version))

    def decode_metadata(self, response: WireResponse) -> ModelMetadata:
        """The protocol can't say that an input is optional, nor that a rank is free; ``mcp-server`` says it beside it."""
        require_success(response)
        told = parse(pb.ModelMetadataResponse, bytes(response.body), "the model's metadata")
        if not told.name:
            raise ProtocolError("the model's metadata has no name")
        versions = tuple(told.versions)
        return ModelMetadata(
            name=told.name,
            inputs=_read_specs(told.inputs, "input"),
            outputs=_read_specs(told.outputs, "output"),
            version=versions[-1] if len(versions) == 1 else "",
            versions=versions,
            platform=told.platform,
            digest=response.headers.get("x-model-digest", ""),
        )


_INFER, _STREAM = method("ModelInfer"), method("ModelStreamInfer")


def _lower(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


# --- both sides: messages and tensors -----------------------------------------------------------------------


def _write_raw(field: int, arrays: Iterable[Array]) -> list[Buffer]:
    tag = bytes((field << 3 | 2,))
    parts: list[Buffer] = []
    for array in arrays:
        raw = to_raw(array)
        parts += (tag + write_varint(len(raw)), raw)
    return parts


def _write_request(request: Request, shared: Shared | None = None) -> tuple[Buffer, ...]:
    """The message in parts: what is the same from call to call, what is not, the tensors.

    Fields may come in any order (protobuf's encoding guide): id = 3, parameters = 4.
    """
    lying: Mapping[str, tuple[int, int]] = {}
    wanted: Mapping[str, tuple[int, int] | None] = dict.fromkeys(request.outputs)
    region = ""
    if shared is not None:
        lying, wanted, region = shared.inputs, shared.outputs or wanted, shared.region
    tensors = tuple(
        (name, oip_datatype(name, array), array.shape, lying.get(name))
        for name, array in request.inputs.items()
    )
    outputs = tuple((name, request.classes.get(name), place) for name, place in wanted.items())
    own = b""
    if request.id:
        own = _field(3, request.id.encode())
    if request.parameters or request.priority is not None:
        message = pb.ModelInferRequest()
        write_parameters(message.parameters, request.parameters)
        if request.priority is not None:
            write_parameters(message.parameters, {"priority": request.priority})
        own += message.SerializeToString()
    if request.timeout_ms is not None:
        # Triton reads it as microseconds. An entry of the map: key = 1, value = 2, in which int64_param = 2.
        value = b"\x10" + write_varint(max(1, int(request.timeout_ms * 1000)))
        own += _field(4, b"\x0a\x07timeout" + _field(2, value))
    sent = [array for name, array in request.inputs.items() if name not in lying]
    head = _head(request.model, request.version, tensors, outputs, region)
    return (head + own, *_write_raw(_RAW_INPUTS, sent))


def _field(number: int, value: bytes) -> bytes:
    return bytes((number << 3 | 2,)) + write_varint(len(value)) + value


@lru_cache(256)
def _head(
    model: str,
    version: str,
    tensors: tuple[tuple[str, str, tuple[int, ...], tuple[int, int] | None], ...],
    outputs: tuple[tuple[str, int | None, tuple[int, int] | None], ...],
    region: str,
) -> bytes:
    """What is the same in every request of a model with inputs of these shapes."""
    message = pb.ModelInferRequest(model_name=named(model), model_version=version)
    for name, datatype, shape, place in tensors:
        tensor = message.inputs.add(name=name, datatype=datatype, shape=shape)
        if place is not None:
            _write_place(tensor.parameters, region, place)
    for name, classes, place in outputs:
        output = message.outputs.add(name=name)
        if classes is not None:
            output.parameters["classification"].int64_param = classes
        elif place is not None:
            _write_place(output.parameters, region, place)
    head: bytes = message.SerializeToString()
    return head


_REGION, _SIZE, _OFFSET = "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"


def _write_place(target: Any, region: str, place: tuple[int, int]) -> None:
    offset, size = place
    write_parameters(target, {_REGION: region, _SIZE: size})
    if offset:
        write_parameters(target, {_OFFSET: offset})


def _read_place(tensor: Any, what: str) -> tuple[str, int, int] | None:
    """Region, offset and size of a tensor in shared memory; ``None`` for one in the message."""
    if _REGION not in tensor.parameters:
        return None
    parameters = _read_parameters(tensor.parameters, what)
    region, size = parameters[_REGION], parameters.get(_SIZE)
    offset = parameters.get(_OFFSET, 0)
    if not (isinstance(region, str) and type(size) is int and type(offset) is int and size >= 0 <= offset):
        raise ProtocolError(f"{what}: a shared memory region needs its name, a byte size and an offset ≥ 0")
    return region, offset, size


def write_parameters(target: Any, parameters: Mapping[str, Parameter]) -> None:
    """Into a ``map<string, InferParameter>``."""
    for name, value in parameters.items():
        if isinstance(value, bool):
            target[name].bool_param = value
        elif isinstance(value, str):
            target[name].string_param = value
        elif isinstance(value, float):
            target[name].double_param = value
        elif -(2**63) <= value < 2**63:
            target[name].int64_param = value
        elif 0 <= value < 2**64:
            target[name].uint64_param = value
        else:
            raise InvalidInputError(
                f"parameter {name!r} is {value}, which does not fit in 64 bits; pass it as a string"
            )


def _read_parameters(source: Any, what: str) -> dict[str, Parameter]:
    parameters: dict[str, Parameter] = {}
    for name, value in source.items():
        choice = value.WhichOneof("parameter_choice")
        if choice is None:
            raise ProtocolError(f"{what}: parameter {name!r} has no value of a known kind")
        parameters[name] = getattr(value, choice)
    return parameters


def _read_tensors(
    tensors: Sequence[Any],
    raw: list[memoryview],
    kind: str,
    places: Mapping[str, tuple[str, int, int]],
    read: ReadRegion | None,
) -> dict[str, Array]:
    """``places``: region, offset and size of the tensors that lie in shared memory."""
    inside = [tensor.name not in places for tensor in tensors]
    numbers = list(range(len(tensors)))
    if raw and len(raw) == sum(inside):  # a sender may leave out what is in shared memory
        numbers = [number - 1 for number in itertools.accumulate(inside)]
    elif len(raw) not in (0, len(tensors)):
        raise ProtocolError(f"{len(tensors)} {kind}s, but raw contents of {len(raw)}")
    arrays: dict[str, Array] = {}
    for tensor, number in zip(tensors, numbers, strict=True):
        name = tensor.name
        what = f"{kind} {name!r}"
        if name in arrays:
            raise ProtocolError(f"{what} comes twice")
        datatype = known_to_oip(datatype_named(tensor.datatype, what), what)
        shape = tuple(tensor.shape)
        if name in places:
            assert read is not None
            arrays[name] = tensor_in_region(places[name], read, datatype, shape, what=what)
        elif raw:
            if tensor.contents.ByteSize():  # MLServer sets it, empty
                raise ProtocolError(f"{what} has both raw and typed contents")
            arrays[name] = from_raw(raw[number], datatype, shape, what=what)
        else:
            arrays[name] = _from_contents(tensor.contents, datatype, shape, what)
    return arrays


def _from_contents(contents: Any, datatype: str, shape: tuple[int, ...], what: str) -> Array:
    expected = element_count(shape, what)
    field = _CONTENTS.get(datatype)
    if field is None:
        if expected == 0:
            return from_raw(b"", datatype, shape, what=what)
        raise ProtocolError(f"{what}: {datatype} travels only in raw contents, and there are none")
    values = getattr(contents, field)
    if len(values) != expected:
        raise ShapeError(
            f"{what}: {datatype} {list(shape)} has {expected} elements; got {len(values)} in {field}"
        )
    if datatype == "BYTES":
        array = np.empty(expected, dtype=object)
        array[:] = list(values)
    else:
        wide = np.array(values, dtype=_WIDE.get(field, wire_dtype(datatype, what)))
        array = wide.astype(wire_dtype(datatype, what))
        if field in _WIDE and not np.array_equal(array, wide):
            raise ProtocolError(f"{what}: a value in {field} is beyond the range of {datatype}")
    array = array.reshape(shape)
    array.flags.writeable = False
    return array


def _read_answer(
    body: bytes, headers: Mapping[str, str], request: Request, shared: Shared | None = None
) -> Answer:
    head, raw = split(body, _RAW_OUTPUTS, "the response")
    told = parse(pb.ModelInferResponse, head, "the response")
    if shared is None:
        outputs = _read_tensors(told.outputs, raw, "output", {}, None)
    else:
        places = {
            name: (shared.region, *place) for name, place in shared.outputs.items() if place is not None
        }
        copy = shared.read
        outputs = _read_tensors(
            told.outputs, raw, "output", places, lambda _, offset, size: copy(offset, size)
        )
    check_answer(outputs, request, came_id=told.id)
    return Answer.of(
        in_order(outputs, request),
        model=told.model_name or request.model,
        version=told.model_version,
        id=request.id,
        digest=headers.get("x-model-digest", ""),
        **freshness(headers),
    )


def _is_final(body: bytes) -> bool:
    parameters = parse(pb.ModelInferResponse, body, "the response").parameters
    return "triton_final_response" in parameters and parameters["triton_final_response"].bool_param


def _read_specs(specs: Iterable[Any], what: str) -> tuple[TensorSpec, ...]:
    found = []
    for spec in specs:
        if not spec.name or not spec.datatype:
            raise ProtocolError(f"an {what} of the model lacks its name or datatype")
        shape = None if _is_said(spec, "free_rank") else tuple(max(size, -1) for size in spec.shape)
        found.append(TensorSpec(spec.name, spec.datatype, shape, optional=_is_said(spec, "optional")))
    return tuple(found)


def _is_said(spec: Any, name: str) -> bool:
    return name in spec.parameters and bool(spec.parameters[name].bool_param)


# --- the server's side --------------------------------------------------------------------------------------


class Incoming(NamedTuple):
    """A parsed inference. ``places``: region, offset and size of the outputs that are wanted in shared memory."""

    request: Request
    places: Mapping[str, tuple[str, int, int]]


def parse_infer(body: bytes, headers: Mapping[str, str], read: ReadRegion | None = None) -> Incoming:
    """The request that a message and its metadata (lower case) make; ``ServerError`` 400 if they make none.

    ``read`` gives the bytes of a region of shared memory, for a server that has them.
    """
    context = read_context(headers)
    try:
        head, raw = split(body, _RAW_INPUTS, "the request")
        told = parse(pb.ModelInferRequest, head, "the request")
        places = _places(told.inputs, "input")
        wanted = _places(told.outputs, "output")
        if (places or wanted) and read is None:
            raise ProtocolError("this server has no shared memory")
        inputs = _read_tensors(told.inputs, raw, "input", places, read)
        parameters = _read_parameters(told.parameters, "the request")
        priority, timeout = _whole(parameters, "priority"), _whole(parameters, "timeout")
        counts = {
            output.name: read_count(_read_parameters(output.parameters, "the request"), output.name)
            for output in told.outputs
        }
    except ProtocolError as error:
        code = "shape_mismatch" if isinstance(error, ShapeError) else "malformed_request"
        raise ServerError.of(400, error.message, code=code) from error
    request = Request(
        model=told.model_name,
        version=told.model_version,
        inputs=inputs,
        outputs=tuple(output.name for output in told.outputs),
        parameters=parameters,
        id=told.id or context.request_id,
        session=context.session,
        path=context.path,
        priority=priority,
        timeout_ms=least(
            timeout / 1000 if timeout else None, context.deadline_ms
        ),  # 0: no timeout, as in Triton
        purpose=context.purpose,
        classes={name: count for name, count in counts.items() if count},
    )
    return Incoming(request, wanted)


def _places(tensors: Iterable[Any], kind: str) -> dict[str, tuple[str, int, int]]:
    found = {tensor.name: _read_place(tensor, f"{kind} {tensor.name!r}") for tensor in tensors}
    return {name: place for name, place in found.items() if place is not None}


def _whole(parameters: dict[str, Parameter], name: str) -> int | None:
    value = parameters.pop(name, None)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ProtocolError(f"parameter {name!r} must be a whole number ≥ 0; got {value!r}")
    return value


def format_infer(
    answer: Answer,
    places: Mapping[str, tuple[str, int, int]] | None = None,
    write: Callable[[str, int, Buffer], None] | None = None,
) -> tuple[Buffer, ...]:
    """The parts of the ``ModelInferResponse`` of an answer; outputs with a place go there by ``write``."""
    message = pb.ModelInferResponse(model_name=answer.model, model_version=answer.version, id=answer.id)
    sent: list[Array] = []
    for name, array in answer.outputs.items():
        tensor = message.outputs.add(name=name, datatype=oip_datatype(name, array), shape=array.shape)
        if places and name in places:
            assert write is not None
            region, place = put_in_region(name, array, places[name], write)
            _write_place(tensor.parameters, region, place)
            sent.append(_NOTHING)  # as Triton: an empty entry, so that the rest keep their numbers
        else:
            sent.append(array)
    return (message.SerializeToString(), *_write_raw(_RAW_OUTPUTS, sent))


_NOTHING = np.empty(0, np.uint8)


def in_stream(response: bytes) -> bytes:
    """A ``ModelInferResponse`` as one message of a stream."""
    return b"".join((bytes((2 << 3 | 2,)), write_varint(len(response)), response))


def format_metadata(metadata: ModelMetadata) -> bytes:
    """The ``ModelMetadataResponse``. A free rank is written as one free axis, with a parameter for clients that know it."""

    def specs(source: Iterable[TensorSpec]) -> list[Any]:
        found = []
        for spec in source:
            shape = spec.shape if spec.shape is not None else (-1,)
            told = pb.ModelMetadataResponse.TensorMetadata(
                name=spec.name, datatype=spec.datatype, shape=shape
            )
            if spec.shape is None:
                write_parameters(told.parameters, {"free_rank": True})
            if spec.optional:
                write_parameters(told.parameters, {"optional": True})
            found.append(told)
        return found

    message = pb.ModelMetadataResponse(
        name=metadata.name,
        versions=metadata.versions,
        platform=metadata.platform,
        inputs=specs(metadata.inputs),
        outputs=specs(metadata.outputs),
    )
    return bytes(message.SerializeToString())
