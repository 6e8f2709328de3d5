"""A request: what is asked of which model, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from .tensors import Array

Parameter = str | int | float | bool
Outputs = Sequence[str] | Mapping[str, int | None]  # names, or name → how many of the best classes
Purpose = Literal["demand", "prefetch"]

NO_PARAMETERS: Mapping[str, Parameter] = MappingProxyType({})
NO_CLASSES: Mapping[str, int] = MappingProxyType({})
NO_HEADERS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Request:
    """One inference. ``version`` "" is the server's default; ``outputs`` () asks for all of them; of those in ``classes`` so
    many of the best classes are wanted instead of the tensor.

    ``inputs`` are arrays that already fit the model (``tensors.as_inputs``). ``timeout_ms`` is what is left of the
    call's deadline when it is sent. ``session`` is the application's own id; it goes to the inference server, never to telemetry.
    ``trace`` are the headers of W3C's trace context, if there is one; ``headers`` the caller's own for this request.
    """

    model: str
    inputs: Mapping[str, Array]
    version: str = ""
    outputs: tuple[str, ...] = ()
    parameters: Mapping[str, Parameter] = field(default_factory=lambda: NO_PARAMETERS)
    id: str = ""
    session: str = ""
    path: str = ""
    priority: int | None = None
    timeout_ms: float | None = None
    purpose: Purpose = "demand"
    trace: Mapping[str, str] | None = None
    classes: Mapping[str, int] = field(default_factory=lambda: NO_CLASSES)
    headers: Mapping[str, str] = field(default_factory=lambda: NO_HEADERS)

    @property
    def cacheable(self) -> bool:
        """Whether an equal request must give an equal answer: not one that belongs to a server-side sequence."""
        return "sequence_id" not in self.parameters

    @property
    def wanted(self) -> Outputs:
        """The outputs as ``infer`` takes them."""
        return {name: self.classes.get(name) for name in self.outputs} if self.classes else self.outputs
