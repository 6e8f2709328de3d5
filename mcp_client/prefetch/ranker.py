"""The learned ranker: boosted trees that say how likely a candidate is still asked for. Read from ONNX, never run as code.

The file comes over the wire. It is taken apart by a reader that knows one operator (``TreeEnsembleClassifier`` of ai.onnx.ml,
two classes, logistic) and checks every index; a file with anything else in it is refused. ONNX Runtime scores where it is
installed, plain numpy where it is not; both give the same numbers.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..errors import ProtocolError
from .features import INPUT, NAMES

log = logging.getLogger("mcp_client.prefetch")

Floats = np.ndarray[Any, np.dtype[np.float32]]

MAX_BYTES = 4 << 20
_MAX_NODES = 200_000
_MAX_DEPTH = 32


class Ranker:
    """Scores candidates; safe to share between threads. ``ProtocolError`` if ``onnx`` is no ranker that we can read."""

    def __init__(self, onnx: bytes, *, runtime: bool = True) -> None:
        if len(onnx) > MAX_BYTES:
            raise ProtocolError(f"a ranker takes at most {MAX_BYTES} bytes; got {len(onnx)}")
        try:
            self._trees = _Trees(onnx)
        except (ValueError, IndexError, OverflowError, struct.error) as error:
            raise ProtocolError(f"the profile's ranker can't be read: {error}") from error
        self._session = _session(onnx) if runtime else None

    def score(self, rows: Floats) -> Floats:
        """The probability of each candidate; ``rows``: float32, (candidates, features)."""
        if self._session is not None:
            scores: Floats = self._session.run(["probabilities"], {INPUT: rows})[0][:, 1]
            return scores
        return self._trees.score(rows)


def _session(onnx: bytes) -> Any:
    try:
        import onnxruntime
    except ImportError:
        return None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(onnx, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exceptions have no common base
        log.warning("ONNX Runtime does not take the profile's ranker (%s); numpy scores it", error)
        return None


class _Trees:
    """All trees in flat arrays: where ``x[feature] <= threshold``, on to ``children[2 * node]``, else to the next one."""

    def __init__(self, onnx: bytes) -> None:
        graph = _one(onnx, 7, "graph")
        nodes = list(_messages(graph, 1))
        kinds = [_text(node, 4) for node in nodes]
        if sorted(kinds) not in (["TreeEnsembleClassifier"], ["Identity", "TreeEnsembleClassifier"]):
            raise ValueError(f"expected one TreeEnsembleClassifier; its nodes are {kinds[:5]}")
        node = nodes[kinds.index("TreeEnsembleClassifier")]
        inputs = [_text(info, 1) for info in _messages(graph, 11)]
        if _text(node, 1) != INPUT or inputs != [INPUT]:
            raise ValueError(f"its input is {inputs[:5]}, not {INPUT}: it was trained on other features")
        told: dict[str, bytes | memoryview] = {
            _text(attribute, 1): attribute for attribute in _messages(node, 5)
        }
        if (post := bytes(next(_messages(told.get("post_transform", b""), 4), b""))) != b"LOGISTIC":
            raise ValueError(f"post_transform is {post[:40]!r}, not LOGISTIC")
        if _ints(told, "classlabels_int64s").tolist() != [0, 1]:
            raise ValueError("its classes are not 0 and 1")
        self._flatten(told)

    def _flatten(self, told: Mapping[str, bytes | memoryview]) -> None:
        tree, number = _ints(told, "nodes_treeids"), _ints(told, "nodes_nodeids")
        size = len(tree)
        if not 0 < size <= _MAX_NODES:
            raise ValueError(f"{size} nodes; expected 1 to {_MAX_NODES}")
        yes, no = _ints(told, "nodes_truenodeids"), _ints(told, "nodes_falsenodeids")
        feature, value = _ints(told, "nodes_featureids"), _floats(told, "nodes_values")
        modes = [bytes(mode) for mode in _messages(told.get("nodes_modes", b""), 9)]
        if not len(number) == len(yes) == len(no) == len(feature) == len(value) == len(modes) == size:
            raise ValueError("its lists of nodes differ in length")
        if set(modes) - {b"LEAF", b"BRANCH_LEQ"}:
            raise ValueError(f"nodes of kind {sorted(set(modes))[:5]}; expected LEAF and BRANCH_LEQ")
        places = {pair: at for at, pair in enumerate(zip(tree.tolist(), number.tolist(), strict=True))}
        weights = np.zeros(size, dtype=np.float32)
        _leaves(told, places, weights)
        leaf = np.array([mode == b"LEAF" for mode in modes])
        children = np.arange(size).repeat(2)  # a leaf leads to itself
        for at in np.flatnonzero(~leaf).tolist():
            for side, child in enumerate((yes[at], no[at])):
                there = places.get((int(tree[at]), int(child)))
                if there is None or there <= at:  # skl2onnx puts children behind their parent: no circle
                    raise ValueError(f"node {at} leads to no node behind it")
                children[2 * at + side] = there
        feature = np.where(leaf, 0, feature)
        if feature.min() < 0 or feature.max() >= len(NAMES):
            raise ValueError(f"it uses a feature beyond the {len(NAMES)} there are")
        if not (np.isfinite(value).all() and np.isfinite(weights).all()):
            raise ValueError("a number in it is not finite")
        base = _floats(told, "base_values")
        if len(base) != 1 or not np.isfinite(base).all():
            raise ValueError(f"{len(base)} base values; expected one")
        children_of = set(children[2 * np.flatnonzero(~leaf)].tolist()) | set(
            children[2 * np.flatnonzero(~leaf) + 1].tolist()
        )
        self._roots = np.array([at for at in range(size) if at not in children_of])
        self._depth = _depth(children, self._roots)
        self._children, self._feature, self._threshold = children, feature, value
        self._weights, self._base = weights, float(base[0])

    def score(self, rows: Floats) -> Floats:
        at = np.broadcast_to(self._roots, (len(rows), len(self._roots)))
        flat = rows.ravel()
        offsets = (np.arange(len(rows)) * rows.shape[1])[:, None]
        for _ in range(self._depth):
            beyond = ~(flat[self._feature[at] + offsets] <= self._threshold[at])
            at = self._children[2 * at + beyond]
        total = self._weights[at].sum(axis=1, dtype=np.float64) + self._base
        scores: Floats = (1.0 / (1.0 + np.exp(-total))).astype(np.float32)
        return scores


def _leaves(
    told: Mapping[str, bytes | memoryview], places: dict[tuple[int, int], int], weights: Floats
) -> None:
    trees, nodes = _ints(told, "class_treeids"), _ints(told, "class_nodeids")
    values, classes = _floats(told, "class_weights"), _ints(told, "class_ids")
    if not len(trees) == len(nodes) == len(values) == len(classes):
        raise ValueError("its lists of leaves differ in length")
    if len(set(classes.tolist())) != 1:
        raise ValueError("its leaves speak for more than one class")
    for tree, node, value in zip(trees.tolist(), nodes.tolist(), values.tolist(), strict=True):
        place = places.get((tree, node))
        if place is None:
            raise ValueError("a leaf is of no tree")
        weights[place] = value


def _depth(children: np.ndarray[Any, Any], roots: np.ndarray[Any, Any]) -> int:
    at, depth = roots, 0
    while True:
        below = np.unique(np.concatenate([children[2 * at], children[2 * at + 1]]))
        if np.array_equal(np.sort(below), np.sort(at)):
            return depth
        at, depth = below, depth + 1
        if depth > _MAX_DEPTH:
            raise ValueError(f"a tree is deeper than {_MAX_DEPTH}")


# --- the protobuf wire format, as much as onnx.proto's ModelProto takes ---


def _fields(message: bytes | memoryview) -> Iterator[tuple[int, int, Any]]:
    view, at = memoryview(message), 0
    while at < len(view):
        tag, at = _varint(view, at)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, at = _varint(view, at)
            yield number, kind, value
            continue
        if kind == 2:
            size, at = _varint(view, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError("it is damaged")
        if at + size > len(view):
            raise ValueError("it is cut short")
        yield number, kind, view[at : at + size]
        at += size


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("it is damaged")


def _messages(message: bytes | memoryview, wanted: int) -> Iterator[memoryview]:
    return (value for number, kind, value in _fields(message) if number == wanted and kind == 2)


def _one(message: bytes, wanted: int, what: str) -> memoryview:
    found = list(_messages(message, wanted))
    if len(found) != 1:
        raise ValueError(f"it has {len(found)} of {what}; expected one")
    return found[0]


def _text(message: bytes | memoryview, wanted: int) -> str:
    return bytes(next(_messages(message, wanted), b"")).decode("utf-8", "replace")


def _ints(told: Mapping[str, bytes | memoryview], name: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """AttributeProto.ints, packed or not."""
    found: list[int] = []
    for number, kind, value in _fields(told.get(name, b"")):
        if number == 8 and kind == 0:
            found.append(value)
        elif number == 8 and kind == 2:
            at = 0
            while at < len(value):
                one, at = _varint(value, at)
                found.append(one)
    return np.array([one - (1 << 64) if one >> 63 else one for one in found], dtype=np.int64)


def _floats(told: Mapping[str, bytes | memoryview], name: str) -> Floats:
    """AttributeProto.floats, packed or not."""
    parts = [
        bytes(value) for number, kind, value in _fields(told.get(name, b"")) if number == 7 and kind in (2, 5)
    ]
    return np.frombuffer(b"".join(parts), dtype="<f4")
