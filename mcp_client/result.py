"""Answers: what a server, the cache or the edge said, and what ``infer`` hands to the user."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from .classification import read_classes
from .errors import MCPError, listed
from .tensors import Array, read_only

Source = Literal["cache", "prefetch", "server", "edge", "stale"]


@dataclass(frozen=True, slots=True)
class Answer:
    """A decoded response. Arrays are read-only. ``digest`` is ``sha256:…`` of the model file, if the server said so.

    What follows it comes from ``Cache-Control``; ``None`` means that the server said nothing.
    """

    outputs: Mapping[str, Array]
    model: str = ""
    version: str = ""
    id: str = ""
    digest: str = ""
    max_age_s: float | None = None
    no_store: bool = False
    stale_while_revalidate_s: float | None = None
    stale_if_error_s: float | None = None

    @classmethod
    def of(cls, outputs: Mapping[str, Array], **rest: object) -> Answer:
        """An answer whose arrays nobody can write to (writable ones are copied)."""
        sealed = MappingProxyType({name: read_only(array) for name, array in outputs.items()})
        return cls(outputs=sealed, **rest)  # type: ignore[arg-type]


class InferResult:
    """What ``infer`` returns.

    ``outputs``: name → read-only ndarray. ``source``: where the answer came from: ``cache``, ``prefetch`` (asked for
    ahead of time), ``server``, ``edge`` (the local model) or ``stale``. ``latency_ms``: the time the call took here.
    ``age_s``: how long ago a server computed it (0 when just now).
    """

    __slots__ = ("age_s", "latency_ms", "model", "outputs", "request_id", "source", "version")

    def __init__(
        self, answer: Answer, *, source: Source, latency_ms: float, request_id: str, age_s: float = 0.0
    ) -> None:
        self.outputs = answer.outputs
        self.model = answer.model
        self.version = answer.version
        self.source: Source = source
        self.latency_ms = latency_ms
        self.request_id = request_id
        self.age_s = age_s

    @property
    def output(self) -> Array:
        """The only output; an error that lists the names if there are several."""
        if len(self.outputs) != 1:
            raise MCPError(
                f"the model has {len(self.outputs)} outputs, so .output is ambiguous; "
                f"take one by name, result[name], of {listed(list(self.outputs))}"
            )
        return next(iter(self.outputs.values()))

    def classes(self, name: str | None = None) -> list[Any]:
        """The best classes in an output that was asked for with ``outputs={name: count}``: a list of ``Class``, best first
        (of a batch: a list of such lists). ``name`` may be left out where there is one output."""
        array = self.output if name is None else self[name]
        return read_classes(array, "the output" if name is None else f"output {name!r}")

    def __getitem__(self, name: str) -> Array:
        try:
            return self.outputs[name]
        except KeyError:
            raise KeyError(f"no output {name!r}; this result has {listed(list(self.outputs))}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.outputs)

    def __len__(self) -> int:
        return len(self.outputs)

    def __repr__(self) -> str:
        shapes = ", ".join(
            f"{name}: {array.dtype}{list(array.shape)}" for name, array in self.outputs.items()
        )
        return f"InferResult({shapes}; source={self.source}, {self.latency_ms:.2f} ms, model={self.model}:{self.version})"
