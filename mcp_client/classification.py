"""Classification outputs (an extension of the Open Inference Protocol): a tensor of scores as its best classes.

They travel as BYTES, each element ``score:index`` or ``score:index:label``, best first, as Triton writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import InvalidInputError, ProtocolError
from .tensors import FOUR_BITS, PRECISION, Array, datatype_of, is_integer


@dataclass(frozen=True, slots=True)
class Class:
    """One of the best classes: its score, its place among all of them, and its name ("" where there is none)."""

    score: float
    index: int
    label: str = ""


def read_classes(array: Array, what: str) -> list[Any]:
    """The classes in a classification output, nested as the array is (one list for each element of a batch)."""
    if array.dtype.kind != "O":
        raise InvalidInputError(
            f"{what} is {datatype_of(array)}, no classification; ask with outputs={{name: count}}"
        )
    flat = np.empty(array.size, dtype=object)
    flat[:] = [_class(item, what) for item in array.reshape(-1).tolist()]
    nested: list[Any] = flat.reshape(array.shape).tolist()
    return nested


def _class(item: bytes, what: str) -> Class:
    score, _, rest = item.decode("utf-8", "replace").partition(":")
    index, _, label = rest.partition(":")
    try:
        return Class(float(score), int(index), label)
    except ValueError:
        raise ProtocolError(
            f'{what} holds {item[:60]!r}; a class is "score:index" or "score:index:label"'
        ) from None


def classify(array: Array, count: int, labels: Sequence[str], what: str) -> Array:
    """The ``count`` best of the scores in ``array``, as BYTES. Of two axes or more the first is the batch: ``[n, count]``.

    Scores are written as Triton does (six decimals; whole numbers as they are). Equal ones come in their own order, NaN last.
    """
    datatype = datatype_of(array)
    if not is_integer(datatype) and datatype not in PRECISION:
        raise InvalidInputError(f"{what} is {datatype}; only numbers can be classified")
    rows = array.reshape(array.shape[0], -1) if array.ndim > 1 and array.size else array.reshape(1, -1)
    whole = is_integer(datatype)
    keep = min(count, rows.shape[1])
    best = np.empty((rows.shape[0], keep), dtype=object)
    for number, row in enumerate(rows):
        scores: Any = (
            (row.astype(np.int8) if datatype in FOUR_BITS else row) if whole else row.astype(np.float64)
        )
        # Stable on what is to come first: the largest, of equal ones the first; numpy sorts NaN to the end.
        order = np.argsort(-scores if not whole else ~scores, kind="stable")[:keep]
        for place, index in enumerate(order.tolist()):
            score = str(int(scores[index])) if whole else f"{scores[index]:f}"
            label = f":{labels[index]}" if index < len(labels) and labels[index] else ""
            best[number, place] = f"{score}:{index}{label}".encode()
    return best if array.ndim > 1 else best.reshape(keep)


def classified(
    outputs: Mapping[str, Array], classes: Mapping[str, int], labels: Callable[[str], Sequence[str]]
) -> dict[str, Array]:
    """Outputs with those in ``classes`` (name → how many) turned into their best classes."""
    result = dict(outputs)
    for name, count in classes.items():
        if name in result:
            result[name] = classify(result[name], count, labels(name), f"output {name!r}")
            result[name].setflags(write=False)
    return result
