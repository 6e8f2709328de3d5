"""Models' descriptions, kept behind memory with the answers: a process that starts while its server is away needs them to
know what it is asked, before it can look for an answer.

A description is filed as an entry with one BYTES output, its JSON: it has the checksum, the scope and the tiers of answers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import orjson

from ..result import Answer
from ..tensors import ModelMetadata, TensorSpec, nbytes_of
from .fingerprint import fingerprint
from .memory import Entry

# A server that is away longer than this is not coming back as it was.
_KEPT_S = 30 * 86400.0


def key_of(servers: Sequence[str], model: str, version: str) -> bytes:
    """Where the description of a model, as these servers gave it, is filed. No answer has such a key: its model is "\\0"."""
    return fingerprint("\0", version, {}, (model, *sorted(servers)))


def pack(metadata: ModelMetadata, now: float) -> Entry:
    text = np.empty(1, dtype=object)
    text[0] = orjson.dumps(
        {
            "name": metadata.name,
            "version": metadata.version,
            "versions": metadata.versions,
            "platform": metadata.platform,
            "digest": metadata.digest,
            "inputs": [[spec.name, spec.datatype, spec.shape, spec.optional] for spec in metadata.inputs],
            "outputs": [[spec.name, spec.datatype, spec.shape, spec.optional] for spec in metadata.outputs],
        }
    )
    answer = Answer.of({"description": text})
    return Entry(answer=answer, stored_at=now, expires_at=now + _KEPT_S, nbytes=nbytes_of(answer.outputs))


def unpack(entry: Entry) -> ModelMetadata | None:
    """``None`` if it is not what ``pack`` made: whoever can write to a store can put anything there."""
    try:
        data = orjson.loads(entry.answer.outputs["description"][0])
        return ModelMetadata(
            name=str(data["name"]),
            inputs=_specs(data["inputs"]),
            outputs=_specs(data["outputs"]),
            version=str(data["version"]),
            versions=tuple(map(str, data["versions"])),
            platform=str(data["platform"]),
            digest=str(data["digest"]),
        )
    except (KeyError, IndexError, TypeError, ValueError):
        return None


def _specs(found: list[list[object]]) -> tuple[TensorSpec, ...]:
    specs = []
    for name, datatype, shape, optional in found:
        sizes = None if shape is None else tuple(map(int, shape))  # type: ignore[call-overload]
        specs.append(TensorSpec(str(name), str(datatype), sizes, bool(optional)))
    return tuple(specs)
