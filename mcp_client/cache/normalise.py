"""Normalisers: make near-identical inputs equal, so that a sensor's noise does not defeat the cache. Off unless asked for.

``Cache(normalisers={"thermometer": rounded(1)})``: the model then sees the normalised inputs, so that equal fingerprints
always mean equal answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ..errors import ConfigurationError
from ..tensors import Array

Normaliser = Callable[[Mapping[str, Array]], Mapping[str, Array]]


def rounded(decimals: int) -> Normaliser:
    """Floating-point inputs, rounded to so many decimals (−0.0 becomes 0.0); others stay as they are."""

    def apply(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        return {
            name: _on_floats(array, lambda x: np.round(x, decimals) + 0.0) for name, array in inputs.items()
        }

    return apply


def quantised(step: float) -> Normaliser:
    """Floating-point inputs, each to the nearest multiple of ``step``; others stay as they are."""
    if not step > 0:
        raise ConfigurationError(f"quantised(step) takes a step > 0; got {step!r}")

    def apply(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        return {
            name: _on_floats(array, lambda x: np.round(x / step) * step + 0.0)
            for name, array in inputs.items()
        }

    return apply


def _on_floats(array: Array, change: Callable[[Array], Array]) -> Array:
    if array.dtype.kind != "f":
        return array
    return change(array.astype(np.float64)).astype(array.dtype)
