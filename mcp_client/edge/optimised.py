"""Optimised graphs kept on disk, so that a cold start does not optimise again: 2.6 × faster to load for a 10
MB OCR model.

What ONNX Runtime writes fits only the version of it and the CPU that wrote it, so both are in the file's
name. A file that is damaged, or can't be loaded, is thrown away and made anew; it never keeps a model from
loading.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from blake3 import blake3

from ..errors import EdgeError
from .device import cpu_identity
from .onnx_file import external_files, graph_inputs

log = logging.getLogger("mcp_client.edge")

FOLDER = ".optimised"
# Constant folding can make a small file very large (a 77 KB graph of ResNet-50 without weights becomes 100
# MB): such a file loads no faster than it is computed, and an SD card pays for it.
_MOST_GROWTH = 2.0
_NOTHING_TO_GAIN = 256 * 1024  # bytes of a model that loads in a few milliseconds anyway


class Start(Protocol):
    """Makes a session of a file, with the options as ``change`` leaves them."""

    def __call__(self, file: Path, change: Callable[[Any], None] | None = None) -> Any: ...


class OptimisedGraphs:
    """A folder of them. ``load`` is all there is to it."""

    def __init__(self, folder: Path, ort: Any) -> None:
        self._folder = folder
        self._ort = ort
        self._key = hashlib.sha256(f"{ort.__version__}/{cpu_identity()}".encode()).hexdigest()[:16]

    def load(self, path: Path, digest: str, start: Start) -> Any:
        """A session of the model at ``path``: from its optimised graph, or else from itself, and then that
        graph is kept.

        ``start(file, change)`` makes a session of a file, with the options that ``change`` (if any) has set.
        """
        kept = self._folder / f"{digest[7:39]}-{self._key}.onnx"
        sums = kept.with_suffix(".blake3")
        wanted = _text(sums)
        if wanted == "none":
            return start(path)
        if wanted:
            session = self._restored(kept, wanted, start)
            if session is not None:
                return session
        if path.stat().st_size < _NOTHING_TO_GAIN or _is_split(path) or not self._writable():
            return start(path)
        fresh = kept.with_suffix(f".{os.getpid()}-{threading.get_ident()}")

        def also_write(options: Any) -> None:
            options.optimized_model_filepath = str(fresh)

        try:
            session = start(path, also_write)
        except EdgeError:
            with contextlib.suppress(OSError):
                fresh.unlink()
            return start(path)  # a full disk must not keep a model from loading; a bad model fails again
        with contextlib.suppress(OSError):
            self._keep(fresh, kept, sums, path, [node.name for node in session.get_inputs()])
        return session

    def _restored(self, kept: Path, wanted: str, start: Start) -> Any:
        def already_optimised(options: Any) -> None:
            options.graph_optimization_level = self._ort.GraphOptimizationLevel.ORT_DISABLE_ALL

        try:
            if _hash(kept) == wanted:
                return start(kept, already_optimised)
            reason = "it is damaged"
        except (EdgeError, OSError) as error:
            reason = str(error)
        log.warning("edge: the optimised graph %s is made anew: %s", kept, reason)
        for left in (kept, kept.with_suffix(".blake3")):
            with contextlib.suppress(OSError):
                left.unlink()
        return None

    def _keep(self, fresh: Path, kept: Path, sums: Path, path: Path, inputs: Sequence[str]) -> None:
        size = path.stat().st_size
        # Weights that a model lists among its inputs (IR version 3) come out as inputs that a caller would
        # have to pass.
        usable = graph_inputs(fresh) == set(inputs) and fresh.stat().st_size <= _MOST_GROWTH * size
        note = fresh.with_name(fresh.name + ".note")
        note.write_text(_hash(fresh) if usable else "none", "utf-8")
        for old in self._folder.glob(f"{kept.name[:32]}-*"):
            if old not in (fresh, note):
                old.unlink(missing_ok=True)  # of another ONNX Runtime or CPU
        if usable:
            fresh.replace(kept)
        else:
            fresh.unlink()
        note.replace(sums)

    def _writable(self) -> bool:
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
        except OSError:
            return False
        return os.access(self._folder, os.W_OK)


def forget(root: Path, digest: str) -> None:
    """Remove what was kept for a model file."""
    for left in (root / FOLDER).glob(f"{digest[7:39]}-*"):
        left.unlink(missing_ok=True)


def _is_split(path: Path) -> bool:
    try:
        return bool(external_files(path))
    except EdgeError:
        return True


def _hash(path: Path) -> str:
    """BLAKE3: several times faster than SHA-256 where the CPU has no instructions for that, and this
    record is our own.
    """
    return blake3().update_mmap(path).hexdigest()


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
