"""What is in a repository, whether it is intact, and how it stays within a disk budget."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import EdgeError
from .files import file_digest
from .optimised import forget
from .repository import MODEL_FILE, ModelRepository
from .staging import locked, set_aside


@dataclass(frozen=True, slots=True)
class Held:
    """A version on disk. ``nbytes``: of all its files. ``current``: it is the one that is used.
    ``fault``: "" if intact.
    """

    model: str
    version: str
    nbytes: int
    digest: str
    current: bool
    pinned: bool
    fault: str = ""


def survey(repository: ModelRepository) -> Iterator[Held]:
    """Every version of every model, oldest first; each is hashed (once per process, while it stays what
    it is).
    """
    for model in repository.models():
        current, pinned = repository.candidates(model)[0], repository.pinned(model)
        for version in repository.versions(model):
            digest = fault = ""
            try:
                digest = repository.resolve(model, version).digest
            except EdgeError as error:
                fault = error.message
            yield Held(
                model,
                version,
                _nbytes(repository, model, version),
                digest,
                current=version == current,
                pinned=version == pinned,
                fault=fault,
            )


def remove(repository: ModelRepository, model: str, version: str) -> int:
    """Delete a version; the bytes that this freed. A runtime that uses it goes on with what it has loaded.

    Raises ``EdgeError`` if there is none such, or if it is pinned.
    """
    if version not in repository.versions(model):
        raise EdgeError(
            f"model {model!r} has no version {version!r} in {repository.root}; nothing was removed"
        )
    if repository.pinned(model) == version:
        raise EdgeError(f"version {version!r} of {model!r} is pinned; unpin it first")
    freed = _nbytes(repository, model, version)
    folder = repository.folder(model, version)
    digest = file_digest(
        folder / MODEL_FILE if (folder / MODEL_FILE).is_file() else _plain(repository, model)
    )
    with locked(repository.root):
        if (folder / MODEL_FILE).is_file():
            shutil.rmtree(set_aside(repository, folder))
        else:
            (repository.root / f"{model}.onnx").unlink()
        forget(repository.root, digest)
    return freed


def trim(repository: ModelRepository, max_bytes: int) -> list[Held]:
    """Remove versions that are not used, those that came first first, until all models take at most
    ``max_bytes``.

    What is in use or pinned is never removed, nor are models that were put here as single files. Raises
    ``EdgeError`` if what must stay is more than the budget (everything else is gone by then).
    """
    held = list(survey(repository))
    total = sum(each.nbytes for each in held)
    spare = [
        each
        for each in held
        if not each.current
        and not each.pinned
        and (repository.folder(each.model, each.version) / MODEL_FILE).is_file()
    ]
    spare.sort(key=lambda each: repository.folder(each.model, each.version).stat().st_mtime_ns)
    removed = []
    for each in spare:
        if total <= max_bytes:
            break
        total -= remove(repository, each.model, each.version)
        removed.append(each)
    if total > max_bytes:
        raise EdgeError(
            f"the models in use in {repository.root} take {total} bytes, more than the budget of {max_bytes}; "
            "remove a model, or allow more"
        )
    return removed


def require_budget(repository: ModelRepository, model: str, nbytes: int, max_bytes: int) -> None:
    """Raises ``EdgeError`` if ``nbytes`` more of ``model`` can't fit even when all goes that is not used or pinned: then it
    is not worth fetching.
    """
    stays = 0
    for other in repository.models():
        wanted = {repository.pinned(other)} | (set() if other == model else {repository.candidates(other)[0]})
        here = wanted & set(repository.versions(other))
        stays += sum(_nbytes(repository, other, version) for version in here)
    if stays + nbytes > max_bytes:
        raise EdgeError(
            f"model {model!r} takes {nbytes} bytes, and what stays in {repository.root} {stays}: more than the budget of "
            f"{max_bytes}; nothing was fetched; remove a model, or allow more"
        )


def _nbytes(repository: ModelRepository, model: str, version: str) -> int:
    folder = repository.folder(model, version)
    files = folder.rglob("*") if (folder / MODEL_FILE).is_file() else [_plain(repository, model)]
    return sum(file.stat().st_size for file in files if file.is_file())


def _plain(repository: ModelRepository, model: str) -> Path:
    return repository.root if repository.root.is_file() else repository.root / f"{model}.onnx"
