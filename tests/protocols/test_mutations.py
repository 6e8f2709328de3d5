"""Responses and requests cut short, padded or with flipped bits: an answer or one of our errors, nothing
else."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_client.errors import ProtocolError, ServerError
from mcp_client.management import IndexEntry
from mcp_client.protocols import Shared, WireResponse, management_http, mcp_v1, oip_http
from mcp_client.protocols.mcp_v1 import McpV1Codec
from mcp_client.protocols.oip_http import OipHttpCodec
from mcp_client.request import Request
from mcp_client.result import Answer
from mcp_client.tensors import ModelMetadata, TensorSpec
from tests.protocols.mutations import mutated

OUTPUTS = {
    "floats": np.array([[1.5, np.nan, -0.0]], np.float32),
    "ints": np.array([2**53 + 1, -1], np.int64),
    "text": np.array([b"a\0", b"", b"\xff"], object),
    "empty": np.zeros((0, 3), np.float64),
    "scalar": np.array(True),
}
REQUEST = Request("m", OUTPUTS, id="r1")
METADATA = ModelMetadata(
    "m", (TensorSpec("x", "FP32", (-1, 3)),), (TensorSpec("y", "FP32", None),), "1", ("1",)
)
_HEADERS, _PARTS = oip_http.format_infer(
    Answer.of(OUTPUTS, model="m", version="1", id="r1"), oip_http.Incoming(REQUEST, True, {})
)
OIP_HEADERS = {name.lower(): value for name, value in _HEADERS.items()}
OIP_WIRE = OipHttpCodec().infer(REQUEST, None)
OIP_REQUEST_HEADERS = {name.lower(): value for name, value in OIP_WIRE.headers.items()}

REGION = bytes(range(64))
SHARED = Shared(
    "r", {}, {"floats": (8, 12), "text": None}, lambda offset, size: REGION[offset : offset + size]
)
_SHARED_HEADERS, _SHARED_PARTS = oip_http.format_infer(
    Answer.of(OUTPUTS, model="m", id="r1"),
    oip_http.Incoming(REQUEST, True, {}, {"floats": ("r", 8, 12)}),
    lambda *place: None,
)
SHARED_HEADERS = {name.lower(): value for name, value in _SHARED_HEADERS.items()}
CLASSES = Request("m", {"x": OUTPUTS["floats"]}, outputs=("a", "b"), classes={"b": 3})

Reader = Callable[[bytes], object]
READERS: dict[str, tuple[bytes, Reader]] = {
    "mcp answer": (
        mcp_v1.format_infer(Answer.of(OUTPUTS, model="m", version="1", id="r1"), short=False),
        lambda body: McpV1Codec().decode_infer(WireResponse(200, {}, body), REQUEST),
    ),
    "mcp request": (
        b"".join(McpV1Codec().infer(REQUEST, None).body),
        lambda body: mcp_v1.parse_infer(body, {}),
    ),
    "mcp metadata": (
        mcp_v1.format_metadata(METADATA),
        lambda body: McpV1Codec().decode_metadata(WireResponse(200, {}, body)),
    ),
    "oip answer": (
        b"".join(_PARTS),
        lambda body: OipHttpCodec().decode_infer(WireResponse(200, OIP_HEADERS, body), REQUEST),
    ),
    "oip answer in shared memory": (
        b"".join(_SHARED_PARTS),
        lambda body: OipHttpCodec().decode_shared(WireResponse(200, SHARED_HEADERS, body), REQUEST, SHARED),
    ),
    "mcp models": (
        mcp_v1.format_models([METADATA]),
        lambda body: McpV1Codec().decode_models(WireResponse(200, {}, body)),
    ),
    "mcp request for classes": (
        b"".join(McpV1Codec().infer(CLASSES, None).body),
        lambda body: mcp_v1.parse_infer(body, {}),
    ),
    "oip request for classes": (
        b"".join(OipHttpCodec(binary=False).infer(CLASSES, None).body),
        lambda body: oip_http.parse_infer(body, {}, model="m", version=""),
    ),
    "oip request": (
        b"".join(OIP_WIRE.body),
        lambda body: oip_http.parse_infer(body, OIP_REQUEST_HEADERS, model="m", version=""),
    ),
    "oip metadata": (
        oip_http.format_metadata(METADATA),
        lambda body: OipHttpCodec().decode_metadata(WireResponse(200, {}, body)),
    ),
    "oip index": (
        management_http.format_index([IndexEntry("m", "1", "READY")]),
        lambda body: OipHttpCodec().decode_models(WireResponse(200, {}, body)),
    ),
}


@pytest.mark.parametrize("what", READERS)
def test_the_unharmed_body_is_read(what: str) -> None:
    body, read = READERS[what]
    read(body)


@pytest.mark.parametrize("what", READERS)
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_a_harmed_body_gives_an_answer_or_one_of_our_errors(what: str, data: st.DataObject) -> None:
    body, read = READERS[what]
    try:
        read(data.draw(mutated(body)))
    except (ProtocolError, ServerError):
        return


@pytest.mark.parametrize("what", READERS)
def test_every_truncation_is_noticed(what: str) -> None:
    body, read = READERS[what]
    for end in range(len(body)):
        with pytest.raises((ProtocolError, ServerError)):
            read(body[:end])


def test_every_padding_of_a_binary_answer_is_noticed() -> None:
    body, read = READERS["oip answer"]
    with pytest.raises(ProtocolError, match="left over"):
        read(body + b"\0")


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=25))
def test_any_header_length_is_survived(length: str) -> None:
    headers = {"inference-header-content-length": length}
    try:
        OipHttpCodec().decode_infer(WireResponse(200, headers, READERS["oip answer"][0]), REQUEST)
    except ProtocolError:
        return
