"""How far two answers to the same request are apart."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from ..tensors import Array

_SIXTEEN_BITS = 0.01  # FP16 has 11 significant bits, BF16 8: what a few layers add up to


def difference(wanted: Mapping[str, Array], got: Mapping[str, Array]) -> float:
    """The largest difference of an element, as a share of the largest absolute value of its output, over all outputs.

    Of what is no number (BOOL, BYTES): the share of elements that differ. ``inf`` where names, datatypes or shapes differ, or one
    side is not finite where the other is.
    """
    if wanted.keys() != got.keys():
        return math.inf
    return max((_of_one(wanted[name], got[name]) for name in wanted), default=0.0)


def tolerance_of(outputs: Mapping[str, Array], tolerance: float) -> float:
    """``tolerance``, or what 16-bit floats allow, where an output is of those."""
    coarse = any(array.dtype.itemsize == 2 and array.dtype.kind in "fV" for array in outputs.values())
    return max(tolerance, _SIXTEEN_BITS) if coarse else tolerance


def _of_one(wanted: Array, got: Array) -> float:
    if wanted.dtype != got.dtype or wanted.shape != got.shape:
        return math.inf
    if not wanted.size:
        return 0.0
    if wanted.dtype.kind in "bOSU":
        return float(np.count_nonzero(wanted != got)) / wanted.size
    one, other = wanted.astype(np.float64), got.astype(np.float64)
    finite = np.isfinite(one)
    if (
        not np.array_equal(one[~finite], other[~finite], equal_nan=True)
        or not np.isfinite(other[finite]).all()
    ):
        return math.inf
    apart = np.abs(one[finite] - other[finite])
    if not apart.size or not apart.max():
        return 0.0
    largest = float(np.abs(one[finite]).max())
    return float(apart.max()) / largest if largest else math.inf
