"""A request: what is asked of which model, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from .tensors import Array

Parameter = str | int | float | bool
Purpose = Literal["demand", "prefetch"]

NO_PARAMETERS: Mapping[str, Parameter] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Request:
    """One inference. ``version`` "" is the server's default; ``outputs`` () asks for all of them.

    ``inputs`` are arrays that already fit the model (``tensors.as_inputs``). ``timeout_ms`` is what is left of the
    call's deadline when it is sent. ``session`` is the application's own id; it goes to the inference server, never to telemetry.
    ``trace`` are the headers of W3C's trace context, if there is one.
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

    @property
    def cacheable(self) -> bool:
        """Whether an equal request must give an equal answer: not one that belongs to a server-side sequence."""
        return "sequence_id" not in self.parameters
