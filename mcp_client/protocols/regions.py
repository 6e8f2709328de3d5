"""Tensors in regions of shared memory, as both forms of the Open Inference Protocol have them (Triton's extension)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import ServerError
from ..tensors import Array, ShapeError, element_count, from_raw, to_raw, wire_dtype
from . import Buffer

Place = tuple[str, int, int]  # region, offset and size in bytes
ReadRegion = Callable[[str, int, int], Buffer]  # bytes of a region: name, offset, size


def tensor_in_region(
    place: Place, read: ReadRegion, datatype: str, shape: Sequence[int], *, what: str
) -> Array:
    """The tensor that lies at a place, which may be larger than it."""
    region, offset, size = place
    if datatype != "BYTES":
        needed = element_count(shape, what) * wire_dtype(datatype, what).itemsize
        if needed > size:
            raise ShapeError(
                f"{what}: {datatype} {list(shape)} takes {needed} bytes; its place in shared memory has {size}"
            )
        size = needed
    return from_raw(read(region, offset, size), datatype, shape, what=what)


def put_in_region(
    name: str, array: Array, place: Place, write: Callable[[str, int, Buffer], None]
) -> tuple[str, tuple[int, int]]:
    """Write an output to the place that was asked for; the region, and the offset and size that it took there."""
    region, offset, room = place
    raw = to_raw(array)
    if len(raw) > room:
        raise ServerError.of(
            400,
            f"output {name!r} takes {len(raw)} bytes; its place in shared memory region {region!r} has {room}",
            code="shared_memory_too_small",
        )
    write(region, offset, raw)
    return region, (offset, len(raw))
