"""The models of a repository, ready to run: loaded when first asked for, swapped while in use when a file
changes.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from ..classification import classified
from ..errors import ClientClosedError, EdgeError, IntegrityError
from ..request import Request
from ..result import Answer
from ..tensors import Array, ModelMetadata
from .binding import Binding
from .limits import Halt
from .model import OnnxModel
from .optimised import FOLDER
from .repository import ModelFile, ModelRepository
from .smoke import prove
from .watch import Watch

__all__ = ["EdgeRuntime", "OnnxModel"]

_LOADS = 3  # of a file that is replaced again while it is loaded

log = logging.getLogger("mcp_client.edge")


@dataclass(slots=True, eq=False)
class _Slot:
    """One (model, version) as callers ask for it. ``model`` is what they run now; it is replaced in one
    assignment.

    ``renewing`` is held by the one who loads. ``seen`` is what the folder was like at the last look, whether
    the load then went well or not: what could not be loaded is tried again only when it changes.
    """

    renewing: threading.Lock = field(default_factory=threading.Lock)
    model: OnnxModel | None = None
    seen: Hashable = None
    looked_at: float = 0.0


class EdgeRuntime:
    """Runs the models of a folder; safe to share between threads, usable in a forked child.

    A newer version, or a changed file, is noticed within a second (``watch.py``), else by a call within
    ``check_s`` seconds: it is loaded and warmed in the background while calls go on with the old one, then
    switched to; the old one is freed when its last caller lets go. One that can't be loaded, or fails its smoke
    input (``smoke.py``), is reported in the log and by ``refused()``, and the old one stays.
    ``device``, ``threads`` and ``memory_bytes`` as in ``OnnxModel``.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | ModelRepository,
        *,
        device: str = "cpu",
        threads: int | None = None,
        memory_bytes: int | None = None,
        check_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.repository = root if isinstance(root, ModelRepository) else ModelRepository(root)
        self._device = device
        self._threads = threads
        self._memory_bytes = memory_bytes
        self._cache_dir = None if self.repository.root.is_file() else self.repository.root / FOLDER
        self._check_s = check_s
        self._clock = clock
        self._closed = False
        self._slots: dict[tuple[str, str], _Slot] = {}  # single operations on a dict are atomic
        # One session per file, however callers name it; ``_opening`` has a lock per (model, version) and is
        # never shrunk: its names are folders that exist.
        self._open: weakref.WeakValueDictionary[ModelFile, OnnxModel] = weakref.WeakValueDictionary()
        self._opening: dict[tuple[str, str], threading.Lock] = {}
        self._refused: dict[tuple[str, str], str] = {}
        self._watch: Watch | None = None
        _LIVE.add(self)

    def models(self) -> list[str]:
        """The ids of the models in the folder."""
        return self.repository.models()

    def holds(self, model: str = "") -> bool:
        """Whether a model is in the folder; "": whether it has one that needs no naming."""
        there = self.repository.models()
        return model in there if model else len(there) == 1

    def metadata(self, model: str = "", version: str = "") -> ModelMetadata:
        """What a model takes and gives; loads it if need be. Raises ``EdgeError`` if there is none such."""
        return self._model(model, version).metadata

    def run(self, request: Request, *, deadline: float = math.inf, halt: Halt | None = None) -> Answer:
        """Answer a request here. ``model`` "" is the only one, ``version`` "" the one that counts
        (``ModelRepository.candidates``).

        ``deadline`` and ``halt`` as in ``OnnxModel.run``; loading a model is not cut short. Raises
        ``EdgeError`` if there is no such model or it fails, ``InvalidInputError`` if the inputs do not fit it,
        ``DeadlineExceededError``.
        """
        model = self._model(request.model, request.version)
        return _answer(
            model, request, model.run(request.inputs, request.outputs, deadline=deadline, halt=halt)
        )

    def run_many(
        self, requests: Sequence[Request], *, deadline: float = math.inf, halt: Halt | None = None
    ) -> list[Answer]:
        """``run`` for each of ``requests``, in their order, in as few runs as the model allows. All are of one
        model, version and choice of outputs: those of the first.
        """
        if not requests:
            return []
        first = requests[0]
        model = self._model(first.model, first.version)
        feeds = [request.inputs for request in requests]
        found = model.run_many(feeds, first.outputs, deadline=deadline, halt=halt)
        return [_answer(model, request, each) for request, each in zip(requests, found, strict=True)]

    def bind(self, shapes: Mapping[str, Sequence[int]], model: str = "", version: str = "") -> Binding:
        """The model in use now, bound to buffers of these input shapes: for a loop that must not allocate
        (``binding.py``).
        """
        return self._model(model, version).bind(shapes)

    def refresh(self) -> None:
        """Look at the folder now and switch to what is new or changed in it before returning (as after a
        sync).
        """
        for (name, version), slot in list(self._slots.items()):
            with slot.renewing:
                self._renew(slot, name, version)

    def refused(self) -> dict[tuple[str, str], str]:
        """(model, version) → why it is not used though it is there: it could not be loaded, or failed its smoke input."""
        return {
            (model, version): why
            for (model, version), why in list(self._refused.items())
            if version in self.repository.versions(model)
        }

    def close(self) -> None:
        """Let go of all models. Calls that are running end normally; later ones raise
        ``ClientClosedError``.
        """
        self._closed = True
        if self._watch is not None:
            self._watch.close()
        for slot in list(self._slots.values()):
            with slot.renewing:
                slot.model = None
        self._slots.clear()

    # --- which model a caller gets --------------------------------------------------------------------------

    def _model(self, name: str, version: str) -> OnnxModel:
        slot = self._slots.get((name, version))
        model = slot.model if slot is not None else None
        if slot is None or model is None:
            return self._first(name, version)
        if self._clock() - slot.looked_at >= self._check_s:
            self._look(slot, name, version)
        return model

    def _first(self, name: str, version: str) -> OnnxModel:
        slot = self._slots.setdefault((name, version), _Slot())
        with slot.renewing:
            try:
                if self._closed:
                    raise ClientClosedError("the edge was closed")
                if slot.model is None:
                    slot.looked_at = self._clock()
                    slot.seen = self._sight(name, version)
                    slot.model = self._load(name, version, keep=True)
                    self._start_watch()
                return slot.model
            finally:
                if slot.model is None:  # names that callers made up must not pile up
                    self._slots.pop((name, version), None)
                else:  # another caller's failure may have taken it out
                    self._slots.setdefault((name, version), slot)

    def _look(self, slot: _Slot, name: str, version: str) -> None:
        """Start a background load if the folder changed. One caller looks, the others go on."""
        if not slot.renewing.acquire(blocking=False):
            return
        handed_over = False
        try:
            self._start_watch()
            slot.looked_at = self._clock()
            if self._sight(name, version) != slot.seen:
                threading.Thread(
                    target=self._renew_and_release,
                    args=(slot, name, version),
                    name="mcp-edge-swap",
                    daemon=True,
                ).start()
                handed_over = True
        finally:
            if not handed_over:
                slot.renewing.release()

    def _start_watch(self) -> None:
        """Once; two threads that both come here first start one too many, which does no harm."""
        if self._watch is None and not self._closed and self.repository.root.is_dir():
            self._watch = Watch(self.repository.root, self.refresh, delay_s=self._check_s)

    def _renew_and_release(self, slot: _Slot, name: str, version: str) -> None:
        try:
            self._renew(slot, name, version)
        finally:
            slot.renewing.release()

    def _renew(self, slot: _Slot, name: str, version: str) -> None:
        """Load what the folder has now, beside the model in use, and switch to it. ``slot.renewing`` is
        held.
        """
        sight = self._sight(name, version)
        if sight == slot.seen or slot.model is None or self._closed:
            return
        slot.seen = sight
        try:
            # A swap is not kept waiting for the optimised graph to be written: the next cold start does that.
            slot.model = self._load(name, version, keep=False, before=slot.model)
        except EdgeError as error:
            log.warning("edge: version %s of %r stays in use: %s", slot.model.metadata.version, name, error)

    def _sight(self, name: str, version: str) -> Hashable:
        """What the folder looks like to this slot; it is equal as long as there is nothing new to load."""
        try:
            return self.repository.sight(name, version)
        except EdgeError as error:
            return str(error)

    # --- loading --------------------------------------------------------------------------------------------

    def _load(self, name: str, version: str, *, keep: bool, before: OnnxModel | None = None) -> OnnxModel:
        """The first candidate that can be loaded and passes its smoke input; where the caller named a version, that one.
        ``before``: the one in use.
        """
        repository = self.repository
        name = name or repository.only()
        failures: list[EdgeError] = []
        for candidate in [version] if version else repository.candidates(name) or [""]:
            try:
                model = self._opened(name, candidate, keep, before)
            except EdgeError as error:
                failures.append(error)
                if candidate in repository.versions(name):  # names that callers made up must not pile up
                    self._refused[name, candidate] = error.message
                continue
            self._refused.pop((name, candidate), None)
            for failure in failures:
                log.warning(
                    "edge: version %s of %r stands in for one that can't be used: %s",
                    candidate,
                    name,
                    failure,
                )
            return model
        raise failures[0]

    def _opened(self, name: str, version: str, keep: bool, before: OnnxModel | None) -> OnnxModel:
        file = self.repository.resolve(name, version)
        with self._opening.setdefault((file.model, file.version), threading.Lock()):
            for _ in range(_LOADS):
                model = self._open.get(file)
                if model is not None:
                    return model
                failure: EdgeError | None = None
                try:
                    model = OnnxModel(
                        file.path,
                        name=file.model,
                        version=file.version,
                        digest=file.digest,
                        device=self._device,
                        threads=self._threads,
                        memory_bytes=self._memory_bytes,
                        cache_dir=self._cache_dir if keep else None,
                    )
                except EdgeError as error:
                    failure = error
                found = self.repository.resolve(name, version)
                if found != file:
                    file = found  # replaced while it was loaded: what was loaded may be neither the one nor the other
                    continue
                if model is None:
                    assert failure is not None
                    raise failure
                prove(model, before)
                self._open[file] = model
                return model
            raise IntegrityError(f"{file.path} keeps changing; replace a model with a rename, not in place")

    def _after_fork_in_child(self) -> None:
        """Locks may be held by threads that the child does not have."""
        self._opening = {}
        self._watch = None
        for slot in self._slots.values():
            slot.renewing = threading.Lock()


def _answer(model: OnnxModel, request: Request, outputs: dict[str, Array]) -> Answer:
    if request.classes:
        outputs = classified(outputs, request.classes, model.labels)
    found = model.metadata
    return Answer(
        MappingProxyType(outputs),  # read-only and nobody else's already
        model=found.name,
        version=found.version,
        id=request.id,
        digest=found.digest,
    )


_LIVE: weakref.WeakSet[EdgeRuntime] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for runtime in list(_LIVE):
        runtime._after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
