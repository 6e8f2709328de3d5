"""Every ONNX node test that ONNX Runtime runs gives at the edge what a bare session gives: dtype, shape
and bytes.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx.backend.test.case.node import collect_testcases

from mcp_client.edge.model import OnnxModel
from mcp_client.errors import EdgeError

# Fewer would mean that the comparison has stopped comparing: onnx 1.23 with onnxruntime 1.32 has 1,570.
AT_LEAST = 1500


def as_bytes(array: Any) -> np.ndarray:
    """Strings as we have them: objects of ``bytes``; ONNX's cases and ONNX Runtime have objects of
    ``str``.
    """
    array = np.asarray(array)
    if array.dtype.kind not in "OSUT":
        return array
    result = np.empty(array.size, dtype=object)
    result[:] = [item if isinstance(item, bytes) else item.encode() for item in array.reshape(-1).tolist()]
    return result.reshape(array.shape)


def equal(ours: np.ndarray, bare: Any) -> bool:
    theirs = as_bytes(bare)
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return False
    return ours.tolist() == theirs.tolist() if ours.dtype == object else ours.tobytes() == theirs.tobytes()


@pytest.mark.timeout(900)  # two minutes on an emulated machine that has a core to itself
def test_all_node_tests_give_what_a_bare_session_gives(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the cases divide by zero on purpose
        cases = collect_testcases(None)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    path = tmp_path / "node.onnx"
    compared, differ = 0, []
    for case in cases:
        content = case.model.SerializeToString()
        try:
            session = ort.InferenceSession(content, options)
        except Exception:  # an operator that this ONNX Runtime does not have
            continue
        path.write_bytes(content)
        try:
            model = OnnxModel(path, threads=1)
        except EdgeError as error:  # sequences, optionals, 4- and 8-bit floats
            if "no protocol can carry" not in str(error):
                differ.append(case.name)
            continue
        for inputs, _ in case.data_sets:
            feed = {
                node.name: np.asarray(value) for node, value in zip(session.get_inputs(), inputs, strict=True)
            }
            try:
                bare = session.run(None, feed)
            except Exception:  # what bare ONNX Runtime can't run, or numpy can't carry for it
                continue
            ours = model.run({name: as_bytes(value) for name, value in feed.items()})
            compared += 1
            if not all(map(equal, ours.values(), bare)):
                differ.append(case.name)
    assert differ == []
    assert compared >= AT_LEAST
