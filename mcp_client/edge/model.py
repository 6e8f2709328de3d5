"""One ONNX model, loaded: the only place where ONNX Runtime is called, at the edge and in ``mcp-server``
alike.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import (
    ConfigurationError,
    DeadlineExceededError,
    EdgeError,
    IntegrityError,
    InvalidInputError,
    MissingExtraError,
    listed,
)
from ..tensors import Array, ModelMetadata, TensorSpec, datatype_of, dtype_of
from .batches import run_many
from .binding import Binding
from .device import device_hint, usable_cores
from .files import Stamp, file_digest, file_stamp
from .labels import Labels
from .limits import Halt, limit_memory, watchdog
from .onnx_file import external_files, ranks_known
from .optimised import OptimisedGraphs

__all__ = ["OnnxModel", "Stamp", "file_digest", "file_stamp"]

_DATATYPES = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(bfloat16)": "BF16",
    "tensor(float8e4m3fn)": "FP8E4M3FN",
    "tensor(float8e4m3fnuz)": "FP8E4M3FNUZ",
    "tensor(float8e5m2)": "FP8E5M2",
    "tensor(float8e5m2fnuz)": "FP8E5M2FNUZ",
    "tensor(string)": "BYTES",
}
_PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
    "rocm": "MIGraphXExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
    "coreml": "CoreMLExecutionProvider",
}
# Those that ONNX Runtime's numpy calls can't take: TensorProto.DataType, and what has their bits.
_BITS_OF: dict[str, tuple[int, type[Any]]] = {
    "BF16": (16, np.uint16),
    "FP8E4M3FN": (17, np.uint8),
    "FP8E4M3FNUZ": (18, np.uint8),
    "FP8E5M2": (19, np.uint8),
    "FP8E5M2FNUZ": (20, np.uint8),
}


class OnnxModel:
    """An ONNX file run by ONNX Runtime; safe to share between threads, and usable in a forked child.

    ``device``: ``cpu``, one with its number (``cuda:0``), or ``auto`` (as ``device_hint`` says). ``threads``:
    for one call (default: the physical cores this process may use). ``digest``: ``sha256:…`` of the file if
    the caller has just checked it, so that it is not read twice. ``cache_dir``: where its optimised graph is
    kept for the next start (default: nowhere). Raises ``MissingExtraError`` without onnxruntime,
    ``EdgeError`` if the file is no model that tensors can be passed to, ``ConfigurationError`` for a device
    that is not there.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        name: str = "",
        version: str = "",
        device: str = "cpu",
        threads: int | None = None,
        digest: str = "",
        cache_dir: Path | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        self.path = Path(path)
        self._device = device
        self._threads = threads
        self._cache_dir = cache_dir
        self._memory_bytes = memory_bytes
        self.rows_apart: bool | None = (
            None  # whether it computes the rows of a batch as if alone; not known yet
        )
        if not self.path.is_file():
            raise EdgeError(f"there is no model file {self.path}")
        stamp = file_stamp(self.path)
        digest = digest or file_digest(self.path)
        self.nbytes = (
            self.path.stat().st_size
            + sum(
                each.stat().st_size
                for each in (self.path.parent / name for name in external_files(self.path))
                if each.is_file()
            )
            if memory_bytes is not None
            else 0
        )
        self._session: Any = self._open(digest)
        from onnxruntime import RunOptions  # which is imported by now

        self._run_options = RunOptions
        self.labels = Labels(self.path)
        if file_stamp(self.path) != stamp:
            raise IntegrityError(
                f"{self.path} changed while it was loaded; replace a model with a rename, not in place"
            )
        inputs = self._specs(self._session.get_inputs(), "input")
        outputs = self._specs(self._session.get_outputs(), "output")
        self.metadata = ModelMetadata(
            name=name or self.path.stem,
            inputs=inputs,
            outputs=outputs,
            version=version,
            versions=(version,) if version else (),
            platform="onnxruntime_onnx",
            digest=digest,
        )
        self._inputs = tuple((spec.name, dtype_of(spec.datatype)) for spec in inputs)
        self._names = tuple(spec.name for spec in outputs)
        self._strings = any(spec.datatype == "BYTES" for spec in (*inputs, *outputs))
        self._bfloat16 = any(spec.datatype in _BITS_OF for spec in (*inputs, *outputs))
        _LIVE.add(self)

    def run(
        self,
        inputs: Mapping[str, Array],
        outputs: Sequence[str] = (),
        *,
        deadline: float = math.inf,
        halt: Halt | None = None,
    ) -> dict[str, Array]:
        """Name → read-only array of each output asked for, in that order (``()``: all, in the model's order).

        ``inputs`` must have the model's names and exact datatypes (``inputs.as_inputs`` makes them so).
        ``deadline`` (of ``time.monotonic``) and ``halt`` end a run between two of its nodes. Raises
        ``InvalidInputError`` if the inputs do not fit the model, ``DeadlineExceededError``, and ``EdgeError``
        if the model itself failed on them.
        """
        if len(inputs) != len(self._inputs):
            raise self._misfit(inputs, outputs)
        for name, dtype in self._inputs:
            array = inputs.get(name)
            # an exact check: ONNX Runtime reads a big-endian array as if it were little-endian
            if array is None or (array.dtype is not dtype and array.dtype != dtype and dtype.kind != "O"):
                raise self._misfit(inputs, outputs)
        names = list(outputs or self._names)
        options, ticket = self._limits(deadline, halt)
        try:
            if self._bfloat16:
                arrays = self._run_values(names, inputs, options)
            elif self._strings:
                arrays = self._run_strings(names, inputs, options)
            else:
                arrays = self._call(names, inputs, options)
        except (EdgeError, InvalidInputError):
            raise
        except Exception as error:  # onnxruntime's exceptions share no base of their own
            if options is not None and options.terminate:
                raise self._ended(deadline) from error
            raise self._explained(error, inputs, outputs) from error
        finally:
            if options is not None:
                watchdog.leave(ticket)
        for array in arrays:
            array.setflags(write=False)
        return dict(zip(names, arrays, strict=True))

    def run_bound(
        self, binding: Binding, *, deadline: float = math.inf, halt: Halt | None = None
    ) -> Mapping[str, Array]:
        """``Binding.run``."""
        options, ticket = self._limits(deadline, halt)
        session = self._session or self._reopen()
        try:
            session.run_with_iobinding(binding.of(session), options)
        except Exception as error:
            if options is not None and options.terminate:
                raise self._ended(deadline) from error
            raise self._over_memory(error) or EdgeError(
                f"model {self.metadata.name!r} failed on bound buffers: {_words(error)}"
            ) from error
        finally:
            if options is not None:
                watchdog.leave(ticket)
        return binding.outputs

    def _limits(self, deadline: float, halt: Halt | None) -> tuple[Any, int]:
        """Options of a run that may be stopped, and what to leave the watchdog with; none for one that may not."""
        if halt is None and deadline == math.inf:
            return None, 0
        options = self._run_options()
        if halt is not None:
            halt.attach(lambda: setattr(options, "terminate", True))
        return options, watchdog.watch(deadline, options)

    def run_many(
        self,
        feeds: Sequence[Mapping[str, Array]],
        outputs: Sequence[str] = (),
        *,
        deadline: float = math.inf,
        halt: Halt | None = None,
    ) -> list[dict[str, Array]]:
        """``run`` for each of ``feeds``, as few runs as the model allows (``batches.py``)."""
        return run_many(self, feeds, outputs, deadline=deadline, halt=halt)

    def bind(self, shapes: Mapping[str, Sequence[int]]) -> Binding:
        """Buffers of these input shapes (by name) that every run uses again (``binding.py``)."""
        return Binding(self, shapes)

    def zeros(self) -> dict[str, Array]:
        """Inputs that are all zero (BYTES: empty); sizes that are free are 1."""
        feed = {}
        for spec in self.metadata.inputs:
            shape = tuple(1 if size < 0 else size for size in spec.shape or ())
            feed[spec.name] = np.zeros(shape, dtype_of(spec.datatype))
            if spec.datatype == "BYTES":
                feed[spec.name][...] = b""
        return feed

    def warm(self) -> None:
        """Run once on zeros, so that the first caller does not pay for what ONNX Runtime does late.

        An error is no fault of the model: zeros may be no valid input for it.
        """
        try:
            self.run(self.zeros())
        except (EdgeError, InvalidInputError):
            return

    # --- loading --------------------------------------------------------------------------------------------

    def _open(self, digest: str) -> Any:
        try:
            import onnxruntime as ort
        except ImportError as error:
            raise MissingExtraError("edge", "onnxruntime", "running ONNX models") from error
        device = device_hint().device if self._device == "auto" else self._device
        provider, settings = _provider(device, ort.get_available_providers())
        on_cpu = provider == _PROVIDERS["cpu"]
        providers: list[Any] = [(provider, settings)] if settings else [provider]

        memory_bytes = self._memory_bytes if on_cpu else None
        if memory_bytes is not None:
            # ONNX Runtime counts weights, but lets a model whose weights alone are over the limit take what it wants.
            taken = sum(each.nbytes for each in list(_LIVE) if each is not self)
            if taken + self.nbytes > memory_bytes:
                raise EdgeError(
                    f"{self.path} has {self.nbytes} bytes of weights and the models loaded before it {taken}; "
                    f"memory_bytes={memory_bytes} allows no more"
                )
            limit_memory(ort, memory_bytes)

        def start(file: Path, change: Callable[[Any], None] | None = None) -> Any:
            options = ort.SessionOptions()
            options.log_severity_level = 4  # every error is raised; no need to print it as well
            options.intra_op_num_threads = self._threads or usable_cores()
            options.inter_op_num_threads = 1
            # Idle threads sleep, as the cores are shared with the application (or with the server's other
            # requests): PP-OCRv4 on 2 busy cores took 28 ms against 58, the server half the CPU. It costs a
            # wake-up for each parallel node: 10 to 20 µs for a small MLP, about 130 µs for one with 32 rows.
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
            if memory_bytes is not None:
                options.add_session_config_entry("session.use_env_allocators", "1")
            if change is not None:
                change(options)
            try:
                return ort.InferenceSession(
                    str(file), options, providers=providers if on_cpu else [*providers, _PROVIDERS["cpu"]]
                )
            except Exception as error:  # onnxruntime's exceptions share no base of their own
                raise self._over_memory(error) or EdgeError(
                    f"{file} can't be loaded: {_words(error)}"
                ) from error

        if on_cpu and self._cache_dir is not None:
            return OptimisedGraphs(self._cache_dir, ort).load(self.path, digest, start)
        session = start(self.path)
        if provider not in session.get_providers():
            raise ConfigurationError(
                f"device {self._device!r}: {provider} is installed but did not start "
                "(a driver or library is missing); use device='cpu', or see ONNX Runtime's log above"
            )
        return session

    def _specs(self, nodes: Sequence[Any], what: str) -> tuple[TensorSpec, ...]:
        known = ranks_known(self.path) if any(not node.shape for node in nodes) else {}
        specs = []
        for node in nodes:
            datatype = _DATATYPES.get(node.type)
            if datatype is None:
                raise EdgeError(
                    f"{self.path}: {what} {node.name!r} is a {node.type}, which no protocol can carry; "
                    f"export the model with tensors of {', '.join(_DATATYPES.values())}"
                )
            shape = tuple(size if isinstance(size, int) and size >= 0 else -1 for size in node.shape)
            specs.append(
                TensorSpec(node.name, datatype, shape if node.shape or known.get(node.name) else None)
            )
        return tuple(specs)

    def _call(self, names: list[str], feed: Mapping[str, Array], options: Any) -> list[Array]:
        session = self._session or self._reopen()
        # The extension's own run, where it is: the checks of the Python wrapper around it (1.3 of 5.8 µs for
        # a tiny model) were all made above.
        inner = getattr(session, "_sess", None)
        arrays: list[Array] = (
            session.run(names, feed, options) if inner is None else inner.run(names, feed, options)
        )
        return arrays

    def _reopen(self) -> Any:
        # After fork: two threads may both come here; both sessions are good, and the one that is not kept is
        # freed.
        if file_digest(self.path) != self.metadata.digest:
            raise IntegrityError(
                f"{self.path} has changed since model {self.metadata.name!r} was loaded before the fork"
            )
        session = self._open(self.metadata.digest)
        self._session = session
        return session

    # --- the two kinds of tensors that ONNX Runtime's numpy calls can't take as they are --------------------

    def _run_strings(self, names: list[str], inputs: Mapping[str, Array], options: Any) -> list[Array]:
        feed = {
            name: _decoded(array, name) if array.dtype.kind in "OSUT" else array
            for name, array in inputs.items()
        }
        arrays = self._call(names, feed, options)
        return [_encoded(array) if array.dtype.kind == "O" else array for array in arrays]

    def _run_values(self, names: list[str], inputs: Mapping[str, Array], options: Any) -> list[Array]:
        from onnxruntime import OrtValue

        feed = {}
        for name, array in inputs.items():
            onnx_type, kind = _BITS_OF.get(datatype_of(array), (0, None))
            if kind is not None:
                bits = np.ascontiguousarray(array).reshape(array.shape).view(kind)
                feed[name] = OrtValue.ortvalue_from_numpy_with_onnx_type(bits, onnx_type)
            elif array.dtype.kind in "OSUT":
                feed[name] = OrtValue.ortvalue_from_numpy(_decoded(array, name))
            else:
                feed[name] = OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array).reshape(array.shape))
        values = (self._session or self._reopen()).run_with_ort_values(names, feed, options)
        return [_from_value(value) for value in values]

    def _ended(self, deadline: float) -> EdgeError | DeadlineExceededError:
        name = repr(self.metadata.name)
        if time.monotonic() >= deadline:
            return DeadlineExceededError(
                f"model {name} did not answer before the deadline on this machine and was stopped; allow it more time"
            )
        return EdgeError(f"model {name}: the run was called off")

    # --- what went wrong ------------------------------------------------------------------------------------

    def _misfit(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> InvalidInputError:
        found = self._find_misfit(inputs, outputs)
        assert found is not None
        return found

    def _explained(
        self, error: Exception, inputs: Mapping[str, Array], outputs: Sequence[str]
    ) -> InvalidInputError | EdgeError:
        misfit = self._find_misfit(inputs, outputs) or self._over_memory(error)
        return misfit or EdgeError(f"model {self.metadata.name!r} failed: {_words(error)}")

    def _over_memory(self, error: Exception) -> EdgeError | None:
        if self._memory_bytes is None or "Available memory" not in str(error):
            return None
        return EdgeError(
            f"model {self.path.stem!r} needs more memory than memory_bytes={self._memory_bytes} leaves it; "
            "pass smaller inputs, or allow it more"
        )

    def _find_misfit(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> InvalidInputError | None:
        """Why a call can't fit this model; looked for only when it failed, so that a good call does not pay
        for it.
        """
        model = f"model {self.metadata.name!r}"
        specs = {spec.name: spec for spec in self.metadata.inputs}
        if inputs.keys() != specs.keys():
            return InvalidInputError(
                f"{model} takes inputs {listed(list(specs))}; got {listed(list(inputs))}"
            )
        for name, spec in specs.items():
            array = inputs[name]
            if datatype_of(array) != spec.datatype or array.dtype.byteorder == ">":
                return InvalidInputError(f"{model}: input {spec} came as {array.dtype}")
            fits = spec.shape is None or (
                len(spec.shape) == array.ndim
                and all(wanted in (-1, came) for wanted, came in zip(spec.shape, array.shape, strict=True))
            )
            if not fits:
                return InvalidInputError(f"{model}: input {spec} came with shape {list(array.shape)}")
        unknown = [name for name in outputs if name not in self._names]
        if unknown:
            return InvalidInputError(
                f"{model} has outputs {listed(self._names)}; asked for {listed(unknown)}"
            )
        return None


def _provider(device: str, there: Sequence[str]) -> tuple[str, dict[str, str]]:
    kind, _, number = device.partition(":")
    provider = _PROVIDERS.get(kind)
    if provider is None or (number and not number.isdecimal()):
        raise ConfigurationError(
            f"device {device!r}; expected one of {listed(list(_PROVIDERS))}, "
            "with a number where there are several: cuda:0"
        )
    if provider not in there:
        raise ConfigurationError(
            f"device {device!r} needs ONNX Runtime's {provider}, and this build has {listed(there)}; "
            "install the build for your device (for example onnxruntime-gpu) or use device='cpu'"
        )
    return provider, {"device_id": number} if number else {}


def _decoded(array: Array, name: str) -> Array:
    """Our BYTES (objects of ``bytes``) as ONNX Runtime's strings (objects of ``str``)."""
    result = np.empty(array.size, dtype=object)
    for index, item in enumerate(array.reshape(-1).tolist()):
        try:
            result[index] = item.decode("utf-8") if isinstance(item, bytes) else item
        except UnicodeDecodeError as error:
            raise InvalidInputError(
                f"input {name!r}, element {index}: ONNX Runtime takes only UTF-8 text as BYTES; "
                f"got {item[:20]!r} ({error.reason})"
            ) from None
    return result.reshape(array.shape)


def _encoded(array: Array) -> Array:
    result = np.empty(array.size, dtype=object)
    for index, item in enumerate(array.reshape(-1).tolist()):
        result[index] = item.encode("utf-8")
    result.setflags(write=False)
    return result.reshape(array.shape)


def _from_value(value: Any) -> Array:
    datatype = _DATATYPES[value.data_type()]
    if datatype not in _BITS_OF:
        array: Array = value.numpy()
        return _encoded(array) if array.dtype.kind == "O" else array
    # ONNX Runtime has no numpy type for it: its bytes are copied from where they lie
    shape = value.shape()
    dtype = dtype_of(datatype)
    raw = ctypes.string_at(value.data_ptr(), dtype.itemsize * int(np.prod(shape, dtype=np.int64)))
    return np.frombuffer(raw, dtype).reshape(shape)


def _words(error: Exception) -> str:
    """ONNX Runtime's message without its own prefix ``[ONNXRuntimeError] : 2 : INVALID_ARGUMENT :``."""
    return (
        str(error).split(" : ", 3)[-1].strip() if str(error).startswith("[ONNXRuntimeError]") else str(error)
    )


# A session's threads do not exist in a forked child: running it would wait for them, and so would freeing it.
_LIVE: weakref.WeakSet[OnnxModel] = weakref.WeakSet()
_LEFT_BEHIND: list[Any] = []


def _after_fork_in_child() -> None:
    for model in list(_LIVE):
        _LEFT_BEHIND.append(model._session)
        model._session = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
