"""What a peer can't do, and why: the one table. A case that is listed and works fails, and so does a line that nothing uses."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

import pytest

from mcp_client import (
    ConfigurationError,
    InvalidInputError,
    MCPError,
    NotFoundError,
    NotOfferedError,
    RequestRejectedError,
    ServerError,
)

from .report import Case


@dataclass(frozen=True)
class Incapable:
    """``case``: the test's name without ``test_`` and its parameters, with wildcards; ``error``: what it ends in."""

    peer: str
    protocol: str
    case: str
    reason: str
    error: type[BaseException] = MCPError

    def covers(self, case: Case) -> bool:
        return (
            fnmatchcase(case.peer, self.peer)
            and fnmatchcase(case.protocol, self.protocol)
            and fnmatchcase(case.name, self.case)
        )


_HTTP_STREAM = "Streams are a gRPC call of the protocol; over HTTP there is none (the client says so before it sends anything)."
_ONNX_STATELESS = "It runs ONNX models, which see their tensors alone: nothing that goes along with a request, no sequences."
_ONNX_ONE_ANSWER = "It runs ONNX models, which answer once."
_NO_JSON_FORM = (
    "FP16, BF16 and BYTES that are not UTF-8 have no JSON form in the protocol, and the server has no binary extension; "
    "gRPC carries them, if the server knows the datatype."
)
_NO_BF16 = "The server does not know BF16."
_NO_SHARED_MEMORY = "It has no shared memory: tensors stay in the messages, with the same results."
_NO_EXTENSION = "It does not have this extension: `NotOfferedError`."
_NO_CLASSIFICATION = "It does not have the extension and sends the tensor: `NotOfferedError`."

_STREAMS = (
    "decoupled",
    "no_answer_at_all",
    "error_midway",
    "stream_left_early",
    "stream_asyncio",
)

TABLE: list[Incapable] = [
    # mcp-server
    *(
        Incapable("mcp-server", "*", case, _ONNX_STATELESS, NotFoundError)
        for case in ("request_id", "parameters", "headers", "sequence")
    ),
    *(Incapable("mcp-server", "*", case, _ONNX_ONE_ANSWER, NotFoundError) for case in _STREAMS),
    Incapable(
        "mcp-server", "*", "any_bytes", "ONNX Runtime takes only UTF-8 text as BYTES.", RequestRejectedError
    ),
    # everybody else
    *(
        Incapable("*", "http", case, _HTTP_STREAM, ConfigurationError)
        for case in ("stream_of_one", *_STREAMS)
    ),
    *(
        Incapable(
            peer,
            "*",
            "tensor FP8* *",
            "FP8 is not in the protocol; ours have names of their own for it.",
            MCPError,
        )
        for peer in ("triton", "mlserver", "kserve")
    ),
    # Triton
    Incapable("triton", "*", "tensor * ()", "Triton's models have no tensors of rank 0.", NotFoundError),
    # MLServer
    Incapable("mlserver", "http", "tensor FP16 *", _NO_JSON_FORM, InvalidInputError),
    Incapable("mlserver", "http", "special_floats FP16", _NO_JSON_FORM, InvalidInputError),
    Incapable("mlserver", "http", "tensor BF16 *", _NO_JSON_FORM, InvalidInputError),
    Incapable("mlserver", "http", "special_floats BF16", _NO_JSON_FORM, InvalidInputError),
    Incapable("mlserver", "http", "any_bytes", _NO_JSON_FORM, InvalidInputError),
    Incapable("mlserver", "grpc", "tensor BF16 *", _NO_BF16, ServerError),
    Incapable("mlserver", "grpc", "special_floats BF16", _NO_BF16, ServerError),
    Incapable("mlserver", "*", "shared_memory", _NO_SHARED_MEMORY, AssertionError),
    Incapable("mlserver", "*", "classification", _NO_CLASSIFICATION, NotOfferedError),
    *(Incapable("mlserver", "*", case, _NO_EXTENSION, NotOfferedError) for case in ("config", "statistics")),
    Incapable(
        "mlserver",
        "grpc",
        "no_answer_at_all",
        "MLServer itself fails where a model streams nothing.",
        ServerError,
    ),
    # KServe
    Incapable("kserve", "*", "tensor BF16 *", _NO_BF16, ServerError),
    Incapable("kserve", "*", "special_floats BF16", _NO_BF16, ServerError),
    Incapable("kserve", "http", "any_bytes", "KServe reads BYTES as UTF-8 text over HTTP.", ServerError),
    Incapable("kserve", "http", "compression", "KServe does not unpack requests.", RequestRejectedError),
    Incapable("kserve", "*", "shared_memory", _NO_SHARED_MEMORY, AssertionError),
    Incapable("kserve", "*", "classification", _NO_CLASSIFICATION, NotOfferedError),
    *(
        Incapable("kserve", "*", case, _NO_EXTENSION, NotOfferedError)
        for case in ("index", "config", "statistics")
    ),
    Incapable("kserve", "grpc", "models", _NO_EXTENSION, NotOfferedError),
    Incapable(
        "kserve", "http", "unknown_version", "KServe has no versions and says so with a 501.", ServerError
    ),
    Incapable(
        "kserve",
        "grpc",
        "unknown_version",
        "KServe passes over the version: it answers with what it has.",
        pytest.fail.Exception,
    ),
    Incapable(
        "kserve",
        "http",
        "unload_and_load",
        "KServe forgets a model that is unloaded: it can't load it.",
        ServerError,
    ),
    Incapable(
        "kserve",
        "grpc",
        "unload_and_load",
        "KServe's messages of these calls have the model's name in another field than Triton's and MLServer's.",
        ServerError,
    ),
    *(
        Incapable("kserve", "grpc", case, "KServe has no streams: `NotOfferedError`.", NotOfferedError)
        for case in ("stream_of_one", *_STREAMS)
    ),
]


def expected(case: Case) -> Incapable | None:
    """The first line that covers a case."""
    return next((line for line in TABLE if line.covers(case)), None)
