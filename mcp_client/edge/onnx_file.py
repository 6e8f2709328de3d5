"""What ONNX Runtime does not tell of a model file: which tensors have a free rank, and which files it refers
to.

A reader of the few protobuf fields that matter (numbers from onnx.proto), so that the edge needs no ``onnx``
package. Only lengths are followed: the weights themselves are never touched.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

from ..errors import EdgeError

_VARINT, _I64, _BYTES, _I32 = 0, 1, 2, 5
_Span = tuple[int, int]


def ranks_known(path: Path) -> dict[str, bool]:
    """Name of each input and output of the graph → whether its shape is stated; ONNX Runtime says ``[]`` for
    both.
    """
    with _View(path) as view:
        known = {}
        for graph in view.messages(view.whole, 7):
            for number in (11, 12):  # GraphProto.input, .output
                for info in view.messages(graph, number):
                    name = view.text(info, 1)
                    tensors = [
                        tensor for kind in view.messages(info, 2) for tensor in view.messages(kind, 1)
                    ]  # TypeProto.tensor_type
                    known[name] = any(True for tensor in tensors for _ in view.messages(tensor, 2))
        return known


def graph_inputs(path: Path) -> set[str]:
    """The names of all inputs that the graph states."""
    with _View(path) as view:
        return {
            view.text(info, 1) for graph in view.messages(view.whole, 7) for info in view.messages(graph, 11)
        }


def external_files(path: Path) -> tuple[str, ...]:
    """The files (relative to the model's folder) that hold tensors of this model, sorted; () if it is all in
    one file.
    """
    with _View(path) as view:
        found: set[str] = set()
        for graph in view.messages(view.whole, 7):
            view.locations_in_graph(graph, found)
        for function in view.messages(view.whole, 25):  # ModelProto.functions
            for node in view.messages(function, 7):
                view.locations_in_node(node, found)
        return tuple(sorted(found))


def metadata_props(path: Path) -> dict[str, str]:
    """What the exporter wrote into the file beside the graph: key → value."""
    with _View(path) as view:
        return {view.text(entry, 1): view.text(entry, 2) for entry in view.messages(view.whole, 14)}


class _View:
    """The bytes of a model file, as spans of protobuf messages."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> _View:
        try:
            with self._path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file can't be mapped
            raise EdgeError(f"{self._path} can't be read as an ONNX model: {error}") from error
        self.whole: _Span = (0, len(self._bytes))
        return self

    def __exit__(self, *_: object) -> None:
        self._bytes.close()

    def locations_in_graph(self, graph: _Span, found: set[str]) -> None:
        for node in self.messages(graph, 1):
            self.locations_in_node(node, found)
        for tensor in self.messages(graph, 5):  # initializer
            self._locations(tensor, found)
        for sparse in self.messages(graph, 15):  # sparse_initializer
            for number in (1, 2):
                for tensor in self.messages(sparse, number):
                    self._locations(tensor, found)

    def locations_in_node(self, node: _Span, found: set[str]) -> None:
        for attribute in self.messages(node, 5):
            for number in (5, 10):  # t, tensors
                for tensor in self.messages(attribute, number):
                    self._locations(tensor, found)
            for number in (6, 11):  # g, graphs
                for graph in self.messages(attribute, number):
                    self.locations_in_graph(graph, found)

    def _locations(self, tensor: _Span, found: set[str]) -> None:
        for entry in self.messages(tensor, 13):  # external_data: StringStringEntryProto
            if self.text(entry, 1) == "location":
                found.add(self.text(entry, 2))

    def messages(self, span: _Span, wanted: int) -> Iterator[_Span]:
        for number, kind, inner in self._fields(span):
            if number == wanted and kind == _BYTES:
                yield inner

    def text(self, span: _Span, wanted: int) -> str:
        for start, end in self.messages(span, wanted):
            return bytes(self._bytes[start:end]).decode("utf-8", "replace")
        return ""

    def _fields(self, span: _Span) -> Iterator[tuple[int, int, _Span]]:
        at, end = span
        while at < end:
            tag, at = self._varint(at, end)
            number, kind = tag >> 3, tag & 7
            if kind == _VARINT:
                start = at
                _, at = self._varint(at, end)
            elif kind == _BYTES:
                size, start = self._varint(at, end)
                at = start + size
            elif kind in (_I64, _I32):
                start = at
                at += 8 if kind == _I64 else 4
            else:
                raise self._damaged()
            if at > end:
                raise self._damaged()
            yield number, kind, (start, at)

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        value = shift = 0
        while at < end and shift < 70:
            byte = self._bytes[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, at
            shift += 7
        raise self._damaged()

    def _damaged(self) -> EdgeError:
        return EdgeError(f"{self._path} is no complete ONNX model: it is truncated or damaged")
