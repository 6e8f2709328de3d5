"""Tensors: every datatype and shape goes to each peer and comes back as it was."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mcp_client import MCPClient
from mcp_client.tensors import dtype_of
from tests.models import IDENTITY_TYPES
from tests.peers.conftest import Peer

SHAPES = [(), (0,), (3,), (0, 3), (2, 3)]
FLOATS = {"FP16": np.float16, "FP32": np.float32, "FP64": np.float64, "BF16": ml_dtypes.bfloat16}


def sample(datatype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Values that a cast to another type would change."""
    count = int(np.prod(shape))
    if datatype == "BYTES":
        flat = np.empty(count, dtype=object)
        flat[:] = [f"text {i} é".encode() for i in range(count)]
    elif datatype == "BOOL":
        flat = np.arange(count) % 2 == 0
    elif "FP" in datatype or "BF" in datatype:
        info = ml_dtypes.finfo(dtype_of(datatype))
        values = np.array([info.max, info.smallest_subnormal, info.max, info.min], dtype_of(datatype))
        values[2] /= values.dtype.type(3)
        flat = np.resize(values, count)
    else:
        info = np.iinfo(datatype.lower())
        flat = np.resize(np.array([info.max, info.min, 7], datatype.lower()), count)
    return flat.reshape(shape)


def check(client: MCPClient, model: str, x: Any, expected: np.ndarray[Any, Any] | None = None) -> None:
    """``x`` comes back bit by bit."""
    if expected is None:
        expected = x
    y = client.infer({"x": x}, model=model)["y"]
    assert y.dtype == expected.dtype
    assert y.shape == expected.shape
    assert y.tolist() == expected.tolist() if y.dtype == object else y.tobytes() == expected.tobytes()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("datatype", IDENTITY_TYPES)
def test_tensor(peer: Peer, client: MCPClient, datatype: str, shape: tuple[int, ...]) -> None:
    """Tensors of shape (), (0,), (3,), (0, 3), (2, 3)."""
    check(client, peer.identity(datatype, len(shape)), sample(datatype, shape))


@pytest.mark.parametrize("datatype", FLOATS)
def test_special_floats(peer: Peer, client: MCPClient, datatype: str) -> None:
    """NaN, infinities, −0.0."""
    x = np.array([np.nan, np.inf, -np.inf, -0.0], FLOATS[datatype])
    check(client, peer.identity(datatype, 1), x)


@pytest.mark.parametrize("datatype", ["INT64", "UINT64"])
def test_beyond_2_53(peer: Peer, client: MCPClient, datatype: str) -> None:
    """Whole numbers beyond 2⁵³."""
    x = np.array([2**53 + 1, 2**63 - 1, 1, 0], datatype.lower())
    check(client, peer.identity(datatype, 1), x)


def test_any_bytes(peer: Peer, client: MCPClient) -> None:
    """BYTES that are no text: NULs, empty, not UTF-8."""
    x = np.empty(4, dtype=object)
    x[:] = [b"a\0b", b"end\0\0", b"", b"\xff\xfe"]
    check(client, peer.identity("BYTES", 1), x)


@pytest.mark.parametrize("kind", ["str", "object of str", "S", "U", "list"])
def test_text(peer: Peer, client: MCPClient, kind: str) -> None:
    """Text as str, object, S and U arrays."""
    words = ["one", "zwölf", ""]
    x: Any = {
        "str": np.array(words, dtype=np.dtypes.StringDType()) if hasattr(np.dtypes, "StringDType") else words,
        "object of str": np.array(words, dtype=object),
        "S": np.array([word.encode() for word in words]),
        "U": np.array(words),
        "list": words,
    }[kind]
    expected = np.empty(3, dtype=object)
    expected[:] = [word.encode() for word in words]
    check(client, peer.identity("BYTES", 1), x, expected)


def test_layouts(peer: Peer, client: MCPClient) -> None:
    """Arrays that are strided, Fortran-ordered, big-endian, read-only."""
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    frozen = base.copy()
    frozen.flags.writeable = False
    model = peer.identity("FP32", 2)
    for x in (base[::2, ::3], np.asfortranarray(base), base.T, frozen):
        check(client, model, x, np.ascontiguousarray(x))
    check(client, model, base.astype(">f4"), base)


def test_large(peer: Peer, client: MCPClient) -> None:
    """A tensor of 6 MB."""
    x = np.random.default_rng(0).random((2, 3 * 2**18), np.float32)
    check(client, peer.identity("FP32", 2), x)


def test_names(client: MCPClient) -> None:
    """Two inputs and outputs, by name."""
    a, b = np.array([1, 2], np.float32), np.array([10, 20], np.float32)
    for inputs in ({"a": a, "b": b}, {"b": b, "a": a}):
        result = client.infer(inputs, model="add")
        assert set(result) == {"sum", "difference"}
        assert result["sum"].ravel().tolist() == [11, 22]
        assert result["difference"].ravel().tolist() == [-9, -18]


def test_output_order(client: MCPClient) -> None:
    """Outputs come in the order asked for."""
    inputs = {"a": np.array([1, 2], np.float32), "b": np.array([10, 20], np.float32)}
    for wanted in (["sum", "difference"], ["difference", "sum"]):
        result = client.infer(inputs, model="add", outputs=wanted)
        assert list(result) == wanted
        assert result["sum"].ravel().tolist() == [11, 22]


def test_one_output(client: MCPClient) -> None:
    """Only the outputs asked for."""
    inputs = {"a": np.array([1, 2], np.float32), "b": np.array([10, 20], np.float32)}
    result = client.infer(inputs, model="add", outputs=["difference"])
    assert list(result) == ["difference"]
    assert result.output.ravel().tolist() == [-9, -18]
