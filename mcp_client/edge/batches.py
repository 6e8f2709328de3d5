"""Many requests as one run: where a model keeps the rows of a batch apart, and only there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..tensors import Array, TensorSpec
from .agreement import difference
from .limits import Halt

if TYPE_CHECKING:
    from .model import OnnxModel

Feed = Mapping[str, Array]

# A matrix product of more rows may add in another order: a few units in the last place of FP32. More than that means that the
# model mixes the rows.
_SAME = 1e-4
_MOST_ROWS = 256  # of one run: beyond it there is nothing to gain, and memory to lose


def run_many(
    model: OnnxModel,
    feeds: Sequence[Feed],
    outputs: Sequence[str] = (),
    *,
    deadline: float = math.inf,
    halt: Halt | None = None,
) -> list[dict[str, Array]]:
    """What ``model.run`` gives for each of ``feeds``, in their order; requests of equal inner shapes are run together.

    Only where the first axis of every input and output is free, and where the first batch, which is computed both ways, came out
    the same (up to the last digits): a model may mix its rows (a softmax over the first axis). Errors as ``model.run``: one bad
    request fails the call.
    """
    results: list[dict[str, Array] | None] = [None] * len(feeds)

    def alone(index: int) -> dict[str, Array]:
        return model.run(feeds[index], outputs, deadline=deadline, halt=halt)

    groups: dict[object, list[int]] = {}
    if (
        model.rows_apart is not False
        and _has_rows(model.metadata.inputs)
        and _has_rows(model.metadata.outputs)
    ):
        for index, feed in enumerate(feeds):
            if (key := _inner_shape(feed)) is not None:
                groups.setdefault(key, []).append(index)
    for members in groups.values():
        for some in _portions(feeds, members):
            if len(some) < 2 or model.rows_apart is False:
                continue
            together = {
                name: np.concatenate([feeds[index][name] for index in some]) for name in feeds[some[0]]
            }
            found = _apart(
                model.run(together, outputs, deadline=deadline, halt=halt), [_rows(feeds[i]) for i in some]
            )
            if model.rows_apart is None:
                wanted = [alone(index) for index in some]
                model.rows_apart = found is not None and all(
                    difference(one, other) <= _SAME for one, other in zip(wanted, found, strict=True)
                )
                found = wanted
            for index, result in zip(some, found or (), strict=found is not None):
                results[index] = result
    return [result if result is not None else alone(index) for index, result in enumerate(results)]


def _has_rows(specs: Sequence[TensorSpec]) -> bool:
    return bool(specs) and all(
        spec.shape and spec.shape[0] == -1 and spec.datatype != "BF16" for spec in specs
    )


def _inner_shape(feed: Feed) -> object | None:
    """What must be equal for two requests to be rows of one batch; ``None`` where its inputs have no common rows."""
    if (
        not feed
        or any(not array.ndim for array in feed.values())
        or len({len(a) for a in feed.values()}) != 1
    ):
        return None
    return tuple((name, array.dtype.str, array.shape[1:]) for name, array in sorted(feed.items()))


def _rows(feed: Feed) -> int:
    return len(next(iter(feed.values())))


def _portions(feeds: Sequence[Feed], members: Sequence[int]) -> list[list[int]]:
    portions: list[list[int]] = [[]]
    rows = 0
    for index in members:
        if portions[-1] and rows + _rows(feeds[index]) > _MOST_ROWS:
            portions.append([])
            rows = 0
        portions[-1].append(index)
        rows += _rows(feeds[index])
    return portions


def _apart(outputs: Feed, rows: Sequence[int]) -> list[dict[str, Array]] | None:
    """The outputs of a batch, request by request; ``None`` if an output has not a row for each row that went in."""
    if any(not array.ndim or len(array) != sum(rows) for array in outputs.values()):
        return None
    results, start = [], 0
    for count in rows:
        results.append({name: array[start : start + count] for name, array in outputs.items()})
        start += count
    return results
