"""What the JSON of both HTTP protocols has in common: descriptions of models, and what any answer must
fulfil.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import InvalidInputError, NotOfferedError, ProtocolError, listed
from ..request import Parameter, Request
from ..tensors import FOUR_BITS, Array, TensorSpec, cast_words, datatype_of


def check_answer(outputs: Mapping[str, Array], request: Request, *, came_id: str) -> None:
    """An answer must hold every output asked for, and belong to this request and no other."""
    missing = [name for name in request.outputs if name not in outputs]
    if missing:
        raise ProtocolError(f"the response lacks output {missing[0]!r}; it has {listed(list(outputs))}")
    for name in request.classes:
        if name in outputs and outputs[name].dtype.kind != "O":
            raise NotOfferedError(
                f"the best classes in output {name!r} were asked for, but the server sent the tensor: it does not offer "
                "classification; ask for the tensor, outputs=[…], and take the best of it here",
                status=501,
            )
    if came_id and request.id and came_id != request.id:
        raise ProtocolError(f"the response belongs to request {came_id!r}, not to {request.id!r}")


def in_order(outputs: dict[str, Array], request: Request) -> dict[str, Array]:
    """The outputs in the order asked for, whatever order they came in; what was not asked for is left out."""
    return {name: outputs[name] for name in request.outputs} if request.outputs else outputs


def read_count(parameters: Mapping[str, Parameter], output: str) -> int:
    """How many classes of an output are asked for instead of the tensor; 0: none."""
    count = parameters.get("classification", 0)
    if type(count) is not int or not 0 <= count < 2**31:
        raise ProtocolError(
            f"output {output!r}: classification is how many classes are wanted; got {count!r}"
        )
    return count


def oip_datatype(name: str, array: Array) -> str:
    """The datatype of a tensor that is to travel by the Open Inference Protocol, which has no form for 4 bits."""
    datatype = datatype_of(array)
    if datatype in FOUR_BITS:
        raise InvalidInputError(
            f"tensor {name!r} is {datatype}, for which the Open Inference Protocol has no form; pass array.astype("
            f"{cast_words(datatype.replace('4', '8'))}) to a model that takes that, or use protocol='mcp'"
        )
    return datatype


def known_to_oip(datatype: str, what: str) -> str:
    if datatype in FOUR_BITS:
        raise ProtocolError(f"{what}: the Open Inference Protocol has no form for {datatype}")
    return datatype


def read_specs(value: Any, what: str) -> tuple[TensorSpec, ...]:
    """The inputs or outputs that a server describes."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ProtocolError(f"the model's {what}s must be a list of objects")
    return tuple(_spec(item, what) for item in value)


def _spec(item: dict[str, Any], what: str) -> TensorSpec:
    name, datatype, shape = item.get("name"), item.get("datatype"), item.get("shape")
    if not isinstance(name, str) or not isinstance(datatype, str):
        raise ProtocolError(f"an {what} of the model lacks its name or datatype")
    if shape is not None and not (isinstance(shape, list) and all(type(size) is int for size in shape)):
        raise ProtocolError(
            f"{what} {name!r}: the shape must be a list of sizes, -1 where any size fits; got {shape!r}"
        )
    free = None if shape is None else tuple(max(size, -1) for size in shape)
    return TensorSpec(name, datatype, free, optional=item.get("optional") is True)


def read_versions(value: Any) -> tuple[str, ...]:
    """The versions that a server lists (text by the standard; numbers are seen too)."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(item) in (str, int) for item in value):
        raise ProtocolError("the model's versions must be a list of strings")
    return tuple(map(str, value))


def text_of(document: dict[str, Any], key: str) -> str:
    value = document.get(key)
    if value is None:
        return ""
    if type(value) not in (str, int):
        raise ProtocolError(f"{key!r} must be a string; got {type(value).__name__}")
    return str(value)


def write_specs(specs: Iterable[TensorSpec]) -> list[dict[str, Any]]:
    """Inputs or outputs as both protocols list them; the shape is left out where the rank is free."""
    return [
        {"name": spec.name, "datatype": spec.datatype}
        | ({"shape": spec.shape} if spec.shape is not None else {})
        | ({"optional": True} if spec.optional else {})
        for spec in specs
    ]


def least(first: float | None, second: float | None) -> float | None:
    """The shorter of two time limits, either of which may be absent."""
    limits = [limit for limit in (first, second) if limit is not None]
    return min(limits) if limits else None
