"""The standard ONNX node tests, each model over every way to it: what ``infer`` returns is what ONNX Runtime itself returns.

They ship in the ``onnx`` package. Every model that ONNX Runtime can run is served by ``mcp-server`` and asked for over HTTP JSON
(MCP), HTTP binary (Open Inference Protocol), gRPC, and a Unix socket with every tensor in shared memory; and run at the edge.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx.numpy_helper import to_array

from mcp_client import MCPClient
from stub_server import StubServer

PARTS = 8  # pytest items, a server each
WAYS = ("HTTP JSON", "HTTP binary", "gRPC", "shared memory", "edge")
# Models that can't be served, by what stands in their way. No protocol has sequences, optionals, or these datatypes.
NOT_TENSORS = re.compile(r"seq\(|optional\(|map\(")
NO_DATATYPE = re.compile(
    r"float8e8m0|float4|int4|int2"
)  # ONNX Runtime's Python API gives no tensors of 4 bits


def cases() -> list[Any]:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # numpy's, about casts on the limit, as the cases are made
        from onnx.backend.test.loader import load_model_tests

        return list(load_model_tests(kind="node"))


class Case(NamedTuple):
    """A model, its inputs, and what ONNX Runtime's own ``run`` returns for them.

    ``agreement``: ``exact``: each time to the bit; ``close``: sums that depend on where in memory the inputs lie; ``alike``:
    random numbers.
    """

    name: str
    path: Path
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    agreement: Literal["exact", "close", "alike"]


Found = tuple[list[Case], Counter[str]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The cases whose model can be served; and how many can't, by reason."""
    folder = tmp_path_factory.mktemp("nodes")
    served: list[Case] = []
    left_out: Counter[str] = Counter()
    for case in cases():
        path = folder / f"{case.name}.onnx"
        onnx.save(case.model, path)
        try:
            session = direct(path)
            types = " ".join(tensor.type for tensor in [*session.get_inputs(), *session.get_outputs()])
            if NOT_TENSORS.search(types) or NO_DATATYPE.search(types):
                left_out["not tensors" if NOT_TENSORS.search(types) else "datatype"] += 1
                continue
            served.append(asked(case, path, session, types))
        except Exception:  # onnxruntime's exceptions share no base of their own
            left_out["ONNX Runtime"] += 1
    return served, left_out


def direct(path: Path) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def asked(case: Any, path: Path, session: Any, types: str) -> Case:
    arrays = [to_array(each) if isinstance(each, onnx.TensorProto) else each for each in case.data_sets[0][0]]
    inputs = dict(zip([tensor.name for tensor in session.get_inputs()], arrays, strict=True))
    names = [tensor.name for tensor in session.get_outputs()]
    agreement: Literal["exact", "close", "alike"] = "alike"
    if "bfloat16" in types or "float8" in types:  # run() takes none: the data set's own outputs stand in
        outputs = [
            to_array(each) if isinstance(each, onnx.TensorProto) else each for each in case.data_sets[0][1]
        ]
        agreement = "close" if "bfloat16" in types else "exact"
        return Case(case.name, path, inputs, dict(zip(names, outputs, strict=True)), agreement)
    once, again = (session.run(None, inputs) for _ in range(2))
    elsewhere = [
        session.run(None, {name: moved(array, by) for name, array in inputs.items()}) for by in range(1, 16)
    ]
    if all(map(same, once, again)):
        agreement = "exact" if all(all(map(same, once, outputs)) for outputs in elsewhere) else "close"
    return Case(case.name, path, inputs, dict(zip(names, once, strict=True)), agreement)


def moved(array: Any, by: int) -> Any:
    """The same at an address that lies ``by`` elements behind one that suits any instruction."""
    if array.dtype.kind == "O" or not array.size:
        return array
    space = np.empty(array.nbytes + 64 + by * array.itemsize, np.uint8)
    start = -space.ctypes.data % 64 + by * array.itemsize
    there = space[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    there[...] = array
    return there


def same(one: Any, other: Any) -> bool:
    """Equal to the bit; any NaN equals any other."""
    if one.dtype.kind == "O":
        texts = [
            [x.decode() if isinstance(x, bytes) else x for x in array.reshape(-1).tolist()]
            for array in (one, other)
        ]
        return one.shape == other.shape and texts[0] == texts[1]
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.dtype.kind not in "fcV" and one.dtype != ml_dtypes.bfloat16:
        return np.array_equal(one, other)
    nan = np.isnan(one)
    return bool(np.array_equal(nan, np.isnan(other)) and one[~nan].tobytes() == other[~nan].tobytes())


@pytest.fixture
def clients(found: Found, part: int, tmp_path: Path) -> Iterator[dict[str, MCPClient]]:
    folder = tmp_path / "models"
    folder.mkdir()
    for case in found[0][part::PARTS]:
        (folder / case.path.name).hardlink_to(case.path)
    options: dict[str, Any] = {"cache": None, "prefetch": None}
    with ExitStack() as stack:
        server = stack.enter_context(StubServer(folder, grpc=True))
        local = stack.enter_context(StubServer(folder, uds=tmp_path / "s"))
        made = {
            "HTTP JSON": MCPClient(server.url, protocol="mcp", **options),
            "HTTP binary": MCPClient(server.url, protocol="oip", **options),
            "gRPC": MCPClient(server.grpc_url, **options),
            "shared memory": MCPClient(local.url, protocol="oip", **options),
            "edge": MCPClient(f"edge:{folder}", **options),
        }
        for way, client in made.items():
            stack.enter_context(client)
            for endpoint in client._engine.endpoints:
                if way == "shared memory":
                    endpoint.transport.arena.threshold = 1
                else:
                    endpoint.transport.arena = None
        yield made


@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_way_gives_what_onnx_runtime_gives(
    found: Found, clients: dict[str, MCPClient], part: int
) -> None:
    wrong: list[str] = []
    for case in found[0][part::PARTS]:
        for way in WAYS:
            try:
                outputs = clients[way].infer(case.inputs, model=case.name).outputs
            except Exception as error:
                wrong.append(f"{case.name} over {way}: {type(error).__name__}: {error}")
                continue
            wrong += [f"{case.name} over {way}: {what}" for what in differences(outputs, case)]
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:40])


def differences(outputs: Mapping[str, Any], case: Case) -> list[str]:
    if list(outputs) != list(case.outputs):
        return [f"outputs {list(outputs)}, not {list(case.outputs)}"]
    return [
        f"{name} is {outputs[name]!r}, not {array!r}"
        for name, array in case.outputs.items()
        if not AGREE[case.agreement](outputs[name], array)
    ]


def alike(one: Any, other: Any) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape)


def close(one: Any, other: Any) -> bool:
    return alike(one, other) and np.allclose(
        one.astype(np.float64),
        other.astype(np.float64),
        rtol=1e-2 if one.itemsize == 2 else 1e-5,
        equal_nan=True,
    )


AGREE = {"exact": same, "close": close, "alike": alike}


def test_how_many_there_are(found: Found) -> None:
    """None is left out for a reason of ours, and docs/protocol.md says how many there are."""
    served, left_out = found
    assert set(left_out) <= {"ONNX Runtime", "not tensors", "datatype"}
    assert len(served) > 1000
    docs = (Path(__file__).parents[1] / "docs" / "protocol.md").read_text()
    versions = f"onnx {onnx.__version__}, ONNX Runtime {ort.__version__}"
    if versions not in docs:
        return  # other releases have other cases
    told = f"{len(served):,} models; left out are {left_out['ONNX Runtime']} that ONNX Runtime can't run, "
    told += f"{left_out['not tensors']} with sequences or optionals, and {left_out['datatype']} with FP4, E8M0, INT4 or INT2"
    assert told in docs
