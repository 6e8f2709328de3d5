"""Open Inference Protocol v2 over HTTP (PROTOCOL.md section 2): the client's codec, and the server's side as
functions.

Binary form: the JSON comes first, then the tensors' bytes in the order of the JSON;
``Inference-Header-Content-Length`` is the JSON's length. Each tensor says ``binary_data_size``; one without
it has its ``data`` in the JSON, so both may mix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ..errors import InvalidInputError, ProtocolError, ServerError
from ..request import Request
from ..result import Answer
from ..tensors import PRECISION, Array, ModelMetadata, ShapeError, from_raw, to_raw
from . import Buffer, Shared, WireRequest, WireResponse
from .documents import (
    check_answer,
    in_order,
    known_to_oip,
    least,
    oip_datatype,
    read_count,
    read_specs,
    read_versions,
    text_of,
    write_specs,
)
from .http_common import (
    check_parameters,
    freshness,
    read_context,
    read_parameters,
    request_headers,
    require_success,
)
from .json_tensors import (
    data_of,
    datatype_named,
    dumps,
    loads_object,
    shape_of,
    tensor_from_json,
)
from .management_http import OipHttpManagement, model_path
from .regions import ReadRegion, put_in_region, tensor_in_region

_LENGTH = "Inference-Header-Content-Length"
_BINARY_EXTENSION = "binary_tensor_data"
EXTENSIONS = (
    _BINARY_EXTENSION,
    "model_repository",
    "model_configuration",
    "statistics",
    "system_shared_memory",
)
# The JSON is padded with spaces to a multiple of this, so that the first tensor of a body is aligned for any
# datatype and can be used where it lies.
_ALIGNMENT = 64


class OipHttpCodec(OipHttpManagement):
    """The client's side. ``binary=False`` for servers without the binary extension: all tensors travel as
    JSON.
    """

    name = "oip"

    def __init__(self, binary: bool = True) -> None:
        self.binary = binary

    def infer(self, request: Request, metadata: ModelMetadata | None) -> WireRequest:
        return self._infer(request, None)

    # Triton's extension for system shared memory; sharing.py decides when.

    def register(self, region: str, size: int) -> WireRequest:
        body = dumps({"key": f"/{region}", "offset": 0, "byte_size": size})
        headers = {"Content-Type": "application/json"}
        return WireRequest("POST", f"/v2/systemsharedmemory/region/{region}/register", headers, (body,))

    def unregister(self, region: str) -> WireRequest:
        return WireRequest("POST", f"/v2/systemsharedmemory/region/{region}/unregister")

    def infer_shared(self, request: Request, shared: Shared) -> WireRequest:
        """As ``infer``, with tensors in shared memory."""
        return self._infer(request, shared)

    def decode_shared(self, response: WireResponse, request: Request, shared: Shared) -> Answer:
        require_success(response)
        places = {
            name: (shared.region, *place) for name, place in shared.outputs.items() if place is not None
        }
        return self._decode(response, request, places, lambda _, offset, size: shared.read(offset, size))

    def _infer(self, request: Request, shared: Shared | None) -> WireRequest:
        parameters: dict[str, Any] = check_parameters(request.parameters)
        if request.priority is not None:
            parameters["priority"] = request.priority
        if request.timeout_ms is not None:
            parameters["timeout"] = max(1, int(request.timeout_ms * 1000))  # Triton reads it as microseconds
        wanted = shared.outputs if shared is not None and shared.outputs else dict.fromkeys(request.outputs)
        if self.binary and not wanted:
            parameters["binary_data_output"] = True
        header: dict[str, Any] = {}
        if request.id:
            header["id"] = request.id
        if parameters:
            header["parameters"] = parameters
        if wanted:
            header["outputs"] = [
                self._wanted(name, request.classes.get(name, 0), shared, place)
                for name, place in wanted.items()
            ]
        header["inputs"], raw = [], []
        for name, array in request.inputs.items():
            if shared is not None and name in shared.inputs:
                place = _write_place(shared.region, shared.inputs[name])
                header["inputs"].append({**_describe(name, array), "parameters": place})
                continue
            tensor, data = _write_tensor(name, array, binary=self.binary, what="input")
            header["inputs"].append(tensor)
            raw += data
        headers, body = _pack(header, raw)
        path = f"{model_path(request.model, request.version)}/infer"
        return WireRequest("POST", path, {**headers, **request_headers(request)}, body)

    def _wanted(
        self, name: str, classes: int, shared: Shared | None, place: tuple[int, int] | None
    ) -> dict[str, Any]:
        """How one output is asked for."""
        parameters: dict[str, Any] = {"binary_data": True} if self.binary else {}
        if classes:
            parameters["classification"] = classes
        elif shared is not None and place is not None:
            parameters = _write_place(shared.region, place)
        return {"name": name, "parameters": parameters} if parameters else {"name": name}

    def decode_infer(self, response: WireResponse, request: Request) -> Answer:
        require_success(response)
        return self._decode(response, request, {}, None)

    def _decode(
        self,
        response: WireResponse,
        request: Request,
        places: Mapping[str, tuple[str, int, int]],
        read: ReadRegion | None,
    ) -> Answer:
        header, raw = _unpack(response.body, response.headers, "the response")
        outputs = _read_tensors(header.get("outputs"), raw, "output", places, read)
        check_answer(outputs, request, came_id=text_of(header, "id"))
        return Answer.of(
            in_order(outputs, request),
            model=text_of(header, "model_name") or request.model,
            version=text_of(header, "model_version"),
            id=request.id,
            digest=response.headers.get("x-model-digest", ""),
            **freshness(response.headers),
        )

    def metadata(self, model: str, version: str) -> WireRequest:
        return WireRequest("GET", model_path(model, version))

    def decode_metadata(self, response: WireResponse) -> ModelMetadata:
        """Servers that know nothing of a model's tensors (MLServer, KServe) describe it with no inputs and
        outputs.
        """
        require_success(response)
        document = loads_object(response.body, "the model's metadata")
        name = text_of(document, "name")
        if not name:
            raise ProtocolError('the model\'s metadata has no "name"')
        known = {"name", "versions", "platform", "inputs", "outputs"}
        versions = read_versions(document.get("versions"))
        return ModelMetadata(
            name=name,
            inputs=read_specs(document.get("inputs"), "input"),
            outputs=read_specs(document.get("outputs"), "output"),
            version=versions[-1] if len(versions) == 1 else "",
            versions=versions,
            platform=text_of(document, "platform"),
            digest=response.headers.get("x-model-digest", ""),
            extra={key: value for key, value in document.items() if key not in known},
        )

    @staticmethod
    def offers_binary(response: WireResponse) -> bool:
        """Whether the answer to ``server`` names the binary extension. JSON is what every server
        must have, so it is assumed wherever the answer says nothing. KServe's Python server has had the extension
        since 0.14 without naming it; JSON would cost it FP16 and NaN beside the time.
        """
        try:
            told = loads_object(response.body, "the server's metadata")
        except ProtocolError:
            return False
        extensions = told.get("extensions")
        named = isinstance(extensions, list) and _BINARY_EXTENSION in extensions
        return response.status == 200 and (named or _is_kserve_since(0, 14, told))


def _is_kserve_since(major: int, minor: int, told: Mapping[str, Any]) -> bool:
    """Whether a server's metadata is that of KServe's Python server, of a version or a later one."""
    version = re.match(r"(\d{1,6})\.(\d{1,6})", str(told.get("version")))
    return (
        told.get("name") == "kserve"
        and version is not None
        and (int(version[1]), int(version[2])) >= (major, minor)
    )


# --- both sides: a JSON header and raw tensors behind it ----------------------------------------------------


def _describe(name: str, array: Array) -> dict[str, Any]:
    return {"name": name, "shape": list(array.shape), "datatype": oip_datatype(name, array)}


def _write_tensor(name: str, array: Array, *, binary: bool, what: str) -> tuple[dict[str, Any], list[Buffer]]:
    tensor = _describe(name, array)
    datatype = tensor["datatype"]
    if binary:
        raw = to_raw(array)
        tensor["parameters"] = {"binary_data_size": len(raw)}
        return tensor, [raw] if len(raw) else []
    if datatype in PRECISION and datatype not in ("FP32", "FP64"):
        raise InvalidInputError(
            f"{what} {name!r} is {datatype}, which has no JSON form in the Open Inference Protocol; "
            "use binary data"
        )
    tensor["data"] = data_of(array, what=f"{what} {name!r}", b64=False)
    return tensor, []


def _pack(header: dict[str, Any], raw: list[Buffer]) -> tuple[dict[str, str], tuple[Buffer, ...]]:
    document = dumps(header)
    if not any(
        "binary_data_size" in t.get("parameters", {}) for t in header.get("inputs", header.get("outputs", []))
    ):
        return {"Content-Type": "application/json"}, (document,)
    document += b" " * (-len(document) % _ALIGNMENT)
    return {"Content-Type": "application/octet-stream", _LENGTH: str(len(document))}, (document, *raw)


def _unpack(body: Buffer, headers: Mapping[str, str], what: str) -> tuple[dict[str, Any], memoryview]:
    length = headers.get(_LENGTH.lower())
    if length is None:
        return loads_object(body, what), memoryview(b"")
    if not (length.isascii() and length.isdigit() and int(length[:20]) <= len(body)):
        raise ProtocolError(f"{what}: {_LENGTH} is {length[:40]!r}, but the body has {len(body)} bytes")
    view = memoryview(body)
    at = int(length)
    return loads_object(view[:at], f"{what}'s JSON header"), view[at:]


def _read_tensors(
    value: Any,
    raw: memoryview,
    kind: str,
    places: Mapping[str, tuple[str, int, int]],
    read: ReadRegion | None,
) -> dict[str, Array]:
    """``places``: region, offset and size of the tensors that lie in shared memory."""
    if not isinstance(value, list):
        raise ProtocolError(f'"{kind}s" must be a list')
    tensors: dict[str, Array] = {}
    at = 0
    for item in value:
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            raise ProtocolError(f"an {kind} lacks its name")
        name = item["name"]
        what = f"{kind} {name!r}"
        if name in tensors:
            raise ProtocolError(f"{what} comes twice")
        datatype = known_to_oip(datatype_named(item.get("datatype"), what), what)
        shape = shape_of(item.get("shape"), what)
        if name in places:
            assert read is not None
            tensors[name] = tensor_in_region(places[name], read, datatype, shape, what=what)
            continue
        size = _binary_size(item.get("parameters"), what)
        if size is None:
            if "data" not in item:
                raise ProtocolError(f"{what} has neither data nor a binary_data_size")
            tensors[name] = tensor_from_json(item["data"], datatype, shape, what=what)
            continue
        if at + size > len(raw):
            raise ProtocolError(
                f"{what} has {size} bytes by its binary_data_size; the body has {len(raw) - at} left"
            )
        tensors[name] = from_raw(raw[at : at + size], datatype, shape, what=what)
        at += size
    if at != len(raw):
        raise ProtocolError(f"{len(raw) - at} bytes are left over after the last {kind}")
    return tensors


def _binary_size(parameters: Any, what: str) -> int | None:
    if parameters is None:
        return None
    if not isinstance(parameters, dict):
        raise ProtocolError(f"{what}: parameters must be an object")
    size = parameters.get("binary_data_size")
    if size is not None and (type(size) is not int or size < 0):
        raise ProtocolError(f"{what}: binary_data_size must be a number of bytes; got {size!r}")
    return size


_REGION, _SIZE, _OFFSET = "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"


def _write_place(region: str, place: tuple[int, int]) -> dict[str, Any]:
    offset, size = place
    return {_REGION: region, _SIZE: size} | ({_OFFSET: offset} if offset else {})


def _places(value: Any, kind: str) -> dict[str, tuple[str, int, int]]:
    """Region, offset and size of the tensors that say that they are in shared memory."""
    places: dict[str, tuple[str, int, int]] = {}
    for item in value if isinstance(value, list) else ():
        parameters = item.get("parameters") if isinstance(item, dict) else None
        if (
            not isinstance(parameters, dict)
            or _REGION not in parameters
            or not isinstance(item.get("name"), str)
        ):
            continue
        region, size, offset = parameters[_REGION], parameters.get(_SIZE), parameters.get(_OFFSET, 0)
        if not (
            isinstance(region, str) and type(size) is int and type(offset) is int and size >= 0 <= offset
        ):
            raise ProtocolError(
                f"{kind} {item['name']!r}: a shared memory region needs its name, a byte size and an offset ≥ 0"
            )
        places[item["name"]] = region, offset, size
    return places


# --- the server's side --------------------------------------------------------------------------------------


NOWHERE: Mapping[str, tuple[str, int, int]] = MappingProxyType({})


class Incoming(NamedTuple):
    """A parsed inference. ``binary``: the form of the outputs; ``binary_of``: where an output was asked for
    in its own; ``places``: region, offset and size of those wanted in shared memory.
    """

    request: Request
    binary: bool
    binary_of: Mapping[str, bool]
    places: Mapping[str, tuple[str, int, int]] = NOWHERE


def parse_infer(
    body: bytes, headers: Mapping[str, str], *, model: str, version: str, read: ReadRegion | None = None
) -> Incoming:
    """The request that a body and its headers (lower case) make; ``ServerError`` 400 if they make none.

    ``read`` gives the bytes of a region of shared memory, for a server that has them.
    """
    context = read_context(headers)
    try:
        header, raw = _unpack(body, headers, "the body")
        lying, wanted = _places(header.get("inputs"), "input"), _places(header.get("outputs"), "output")
        if (lying or wanted) and read is None:
            raise ProtocolError("this server has no shared memory")
        inputs = _read_tensors(header.get("inputs"), raw, "input", lying, read)
        parameters = dict(read_parameters(header.get("parameters")))
        priority, timeout = _whole(parameters, "priority"), _whole(parameters, "timeout")
        outputs = header.get("outputs") or []
        if not isinstance(outputs, list) or not all(
            isinstance(o, dict) and isinstance(o.get("name"), str) for o in outputs
        ):
            raise ProtocolError('"outputs" must be a list of {"name": "…"}')
        binary_of, classes = {}, {}
        for output in outputs:
            asked = read_parameters(output.get("parameters"))
            if "binary_data" in asked:
                binary_of[output["name"]] = bool(asked["binary_data"])
            if count := read_count(asked, output["name"]):
                classes[output["name"]] = count
        binary = bool(parameters.pop("binary_data_output", False))
        request = Request(
            model=model,
            version=version,
            inputs=inputs,
            outputs=tuple(output["name"] for output in outputs),
            parameters=parameters,
            id=text_of(header, "id") or context.request_id,
            session=context.session,
            path=context.path,
            priority=priority,
            timeout_ms=least(
                timeout / 1000 if timeout else None, context.deadline_ms
            ),  # 0: no timeout, as in Triton
            purpose=context.purpose,
            classes=classes,
        )
    except ProtocolError as error:
        code = "shape_mismatch" if isinstance(error, ShapeError) else "malformed_request"
        raise ServerError.of(400, error.message, code=code) from error
    return Incoming(request, binary, binary_of, wanted)


def _whole(parameters: dict[str, Any], name: str) -> int | None:
    value = parameters.pop(name, None)
    if value is not None and (type(value) is not int or not 0 <= value < 2**64):
        raise ProtocolError(f"parameter {name!r} must be a whole number ≥ 0; got {value!r}")
    return value


def format_infer(
    answer: Answer, incoming: Incoming, write: Callable[[str, int, Buffer], None] | None = None
) -> tuple[dict[str, str], tuple[Buffer, ...]]:
    """Headers and body parts of an answer; ``ServerError`` 400 where JSON was asked for and can't carry an
    output.
    """
    outputs: list[dict[str, Any]] = []
    raw: list[Buffer] = []
    for name, array in answer.outputs.items():
        if name in incoming.places:
            assert write is not None
            region, place = put_in_region(name, array, incoming.places[name], write)
            outputs.append({**_describe(name, array), "parameters": _write_place(region, place)})
            continue
        binary = incoming.binary_of.get(name, incoming.binary)
        try:
            tensor, data = _write_tensor(name, array, binary=binary, what="output")
        except InvalidInputError as error:
            raise ServerError.of(400, error.message, code="binary_only") from error
        outputs.append(tensor)
        raw += data
    header: dict[str, Any] = {"model_name": answer.model, "model_version": answer.version, "outputs": outputs}
    if answer.id:
        header["id"] = answer.id
    return _pack(header, raw)


def format_error(error: ServerError, request_id: str) -> bytes:
    """The standard's error body, a plain string; code and request id stand beside it for those who know
    them.
    """
    return dumps({"error": error.message, "code": error.code, "request_id": request_id})


def format_metadata(metadata: ModelMetadata) -> bytes:
    """The body of ``GET /v2/models/{m}``."""
    return dumps(
        {
            "name": metadata.name,
            "versions": metadata.versions,
            "platform": metadata.platform,
            "inputs": write_specs(metadata.inputs),
            "outputs": write_specs(metadata.outputs),
        }
    )


def format_server(name: str, version: str) -> bytes:
    """The body of ``GET /v2``."""
    return dumps({"name": name, "version": version, "extensions": EXTENSIONS})
