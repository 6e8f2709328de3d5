"""Models on disk: which there are, in which versions, and whether a file is what its SHA-256 says."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from ..errors import EdgeError, IntegrityError, listed
from .files import Stamp, file_digest, file_stamp

MODEL_FILE = "model.onnx"
DIGEST_FILE = "model.onnx.sha256"
SMOKE_FILE = "smoke.npz"  # what a version must answer before it is used (smoke.py)
PLAIN_VERSION = "1"  # of a model that is a single file: {id}.onnx
_PINNED = ".pinned"  # files in a model's folder that hold a version; no version's name starts with a dot
_FOLLOWED = ".server"
_MAX_NAME_BYTES = 128  # a file name may have 255; this leaves room for suffixes
_FORBIDDEN = frozenset('/\\:*?"<>|')  # separators, and what Windows takes for something else
_HEX_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model file that may be used: its bytes are those of ``digest`` (``sha256:…``)."""

    path: Path
    model: str
    version: str
    digest: str


class ModelRepository:
    """A folder of models, read as it is now at every call; safe to share between threads and processes.

    ``{root}/{id}/{version}/model.onnx``, with ``model.onnx.sha256`` beside it (in the format of
    ``sha256sum``; external-data files have their own lines) and external-data files as the model names them.
    ``{root}/{id}.onnx`` is a model of version "1", and ``root`` may be a single ``.onnx`` file. Models that
    were synced always have their ``.sha256``, and what it does not confirm is never used; for files put here
    by hand without one the digest is computed.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        # file → what it was when it was hashed, and its digest; single operations on a dict are atomic
        self._digests: dict[Path, tuple[Stamp, str]] = {}

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> ModelRepository:
        """The repository at ``path``, which must exist: a folder or one ``.onnx`` file."""
        found = cls(path)
        if not found.root.exists():
            raise EdgeError(f"there is no model file or folder {found.root}")
        if found.root.is_file() and found.root.suffix != ".onnx":
            raise EdgeError(f"{found.root} is no .onnx file; pass an ONNX file or a folder of models")
        return found

    def models(self) -> list[str]:
        """The ids of all models here, sorted."""
        return sorted(self._plain().keys() | self._folders().keys())

    def versions(self, model: str) -> list[str]:
        """The versions of a model, oldest first; numbers inside are compared as numbers (9 before 10)."""
        found = set()
        if model in self._plain():
            found.add(PLAIN_VERSION)
        folder = self._folders().get(model)
        if folder is not None:
            found.update(
                entry.name
                for entry in _entries(folder)
                if name_fault(entry.name) is None and (entry / MODEL_FILE).is_file()
            )
        return sorted(found, key=version_order)

    def candidates(self, model: str) -> list[str]:
        """The versions of a model in the order in which they are to be tried: the one that counts, then
        newest first.

        The one that counts is the pinned one, else the one that the server ran at the last sync, else the
        newest.
        """
        versions = self.versions(model)[::-1]
        for chosen in (self.pinned(model), self.followed(model)):
            if chosen in versions:
                return [chosen, *(version for version in versions if version != chosen)]
        return versions

    def resolve(self, model: str = "", version: str = "") -> ModelFile:
        """The file of a model, verified: "" is the only model, and the version that counts.

        Raises ``EdgeError`` if there is none such, ``IntegrityError`` if the file is not what its ``.sha256``
        says.
        """
        model = model or self.only()
        path, version = self._find(model, version)
        return ModelFile(path, model, version, self._verified(path))

    def sight(self, model: str, version: str = "") -> Hashable:
        """Equal to an earlier one as long as no file of this model (or version) has come, gone or changed. A
        few ``stat`` calls.
        """
        model = model or self.only()
        found: list[object] = []
        for each in [version] if version else self.candidates(model):
            path, name = self._find(model, each)
            sums = path.with_name(path.name + ".sha256")
            smoke = path.with_name(SMOKE_FILE)
            beside = [file_stamp(file) if file.is_file() else None for file in (sums, smoke)]
            found.append((name, path, file_stamp(path), *beside))
        return tuple(found)

    def only(self) -> str:
        """The id of the only model here; an ``EdgeError`` that lists them if there are several or none."""
        models = self.models()
        if len(models) != 1:
            many = f"has {len(models)} models; name one of {listed(models)}" if models else "has no models"
            raise EdgeError(f"{self.root} {many}")
        return models[0]

    def folder(self, model: str, version: str) -> Path:
        """Where a version of a model lies or would lie. Raises ``EdgeError`` for a name that must not become
        a path.
        """
        for what, name in (("model id", model), ("version", version)):
            fault = name_fault(name)
            if fault is not None:
                raise EdgeError(f"{what} {name[:200]!r} can't name a folder here: {fault}")
        return self.root / model / version

    # --- which version counts -------------------------------------------------------------------------------

    def pinned(self, model: str) -> str:
        """The version that was pinned, or ""."""
        return self._note(model, _PINNED)

    def pin(self, model: str, version: str) -> None:
        """Use this version, whatever else is here or comes, until ``unpin``. Raises ``EdgeError`` if it
        isn't here.
        """
        self._find(model, version)
        self._write_note(model, _PINNED, version)

    def unpin(self, model: str) -> None:
        """Use the server's or the newest version again."""
        self._write_note(model, _PINNED, "")

    def followed(self, model: str) -> str:
        """The version that the server ran at the last sync, or "" if there was none."""
        return self._note(model, _FOLLOWED)

    def follow(self, model: str, version: str) -> None:
        """Take note of the version that the server runs: it may have gone back to an older one."""
        if self.followed(model) != version:
            self._write_note(model, _FOLLOWED, version)

    def rollback(self, model: str) -> str:
        """Pin the version before the one that counts, and return it. Raises ``EdgeError`` if there is
        none before it.
        """
        versions = self.versions(model)
        current = self.resolve(model).version
        at = versions.index(current)
        if at == 0:
            raise EdgeError(
                f"there is no version of {model!r} before {current!r} in {self.root}; it has {listed(versions)}"
            )
        self.pin(model, versions[at - 1])
        return versions[at - 1]

    def _note(self, model: str, name: str) -> str:
        try:
            return (self.root / model / name).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError, ValueError):
            return ""  # none, or damaged: then the newest counts, which is always safe

    def _write_note(self, model: str, name: str, version: str) -> None:
        note = self.folder(model, version or "1").with_name(name)
        if not version:
            note.unlink(missing_ok=True)
            return
        note.parent.mkdir(mode=0o700, exist_ok=True)
        fresh = note.with_name(f"{name}.new")
        fresh.write_text(version + "\n", "utf-8")
        fresh.replace(note)

    # --- finding --------------------------------------------------------------------------------------------

    def _plain(self) -> Mapping[str, Path]:
        """``{id}.onnx`` files. A single-file repository has just that one."""
        files = [self.root] if self.root.is_file() else _entries(self.root)
        return {
            file.stem: file
            for file in files
            if file.suffix == ".onnx" and name_fault(file.stem) is None and file.is_file()
        }

    def _folders(self) -> Mapping[str, Path]:
        return {
            folder.name: folder
            for folder in _entries(self.root)
            if name_fault(folder.name) is None
            and any(
                name_fault(entry.name) is None and (entry / MODEL_FILE).is_file()
                for entry in _entries(folder)
            )
        }

    def _find(self, model: str, version: str) -> tuple[Path, str]:
        versions = self.versions(model) if name_fault(model) is None else []
        if not versions:
            raise EdgeError(
                f"there is no model {model[:200]!r} in {self.root}; it has {listed(self.models())}"
            )
        if version and version not in versions:
            raise EdgeError(
                f"model {model!r} has no version {version[:200]!r} in {self.root}; it has {listed(versions)}"
            )
        version = version or self.candidates(model)[0]
        path = self.root / model / version / MODEL_FILE
        if version == PLAIN_VERSION and not path.is_file():
            path = self._plain()[model]
        return path, version

    # --- verifying ------------------------------------------------------------------------------------------

    def _verified(self, path: Path) -> str:
        announced = read_digests(path)
        digest = self.digest(path)
        for name, wanted in announced.items():
            file = path.with_name(name) if name == path.name else inside(path.parent, name)
            found = digest if file == path else self.digest(file)
            if found != wanted:
                raise IntegrityError(
                    f"{file} has {found}, but {path.name}.sha256 says {wanted}; it was not used: "
                    "sync again, or restore the file"
                )
        return digest

    def digest(self, path: Path) -> str:
        """``sha256:…`` of a file here; hashed once for as long as it stays what it is."""
        stamp = file_stamp(path)
        known = self._digests.get(path)
        if known is not None and known[0] == stamp:
            return known[1]
        digest = file_digest(path)
        if file_stamp(path) != stamp:
            raise IntegrityError(
                f"{path} changed while it was read; replace a model with a rename, not in place"
            )
        self._digests[path] = (stamp, digest)
        return digest


def read_digests(path: Path) -> dict[str, str]:
    """File name → ``sha256:…`` as ``{path}.sha256`` announces; {} if there is none. Always names ``path``
    itself otherwise.

    Read as ``sha256sum`` writes it, ``<hex>  <name>`` a line; a bare ``<hex>`` (or ``sha256:<hex>``) is the
    model file's.
    """
    sums = path.with_name(path.name + ".sha256")
    try:
        text = sums.read_text("utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise IntegrityError(f"{sums} can't be read: {error}") from error
    return parse_digests(text, path.name, str(sums))


def parse_digests(text: str, model_file: str, where: str) -> dict[str, str]:
    """The same from the text of a ``.sha256``; ``where`` it was read is for messages."""
    found = {}
    for line in text.splitlines():
        digest, _, name = line.strip().partition(" ")
        digest = digest.removeprefix("sha256:").lower()
        if not line.strip():
            continue
        if _HEX_DIGEST.fullmatch(digest) is None:
            raise IntegrityError(
                f"{where} is damaged: {line[:80]!r} is no SHA-256; sync again, or write it with sha256sum"
            )
        found[name.strip().removeprefix("*") or model_file] = f"sha256:{digest}"
    if model_file not in found:
        raise IntegrityError(f"{where} says nothing of {model_file}; sync again, or write it with sha256sum")
    return found


def is_digest(value: object) -> TypeGuard[str]:
    """Whether a value from outside is ``sha256:`` and 64 hex digits."""
    return (
        isinstance(value, str)
        and value.startswith("sha256:")
        and _HEX_DIGEST.fullmatch(value[7:]) is not None
    )


def inside(folder: Path, name: str) -> Path:
    """``folder / name`` for a relative name, which may have folders of its own but never leads out of
    ``folder``.
    """
    parts = name.split("/")
    fault = next((fault for part in parts if (fault := name_fault(part)) is not None), None)
    if fault is not None:
        raise IntegrityError(f"{name[:200]!r} is not allowed as a file beside a model: {fault}")
    return folder.joinpath(*parts)


def name_fault(name: str) -> str | None:
    """Why a model id or version can't be the name of a folder, or ``None`` if it can. Ids may come from a
    hostile server.
    """
    if not name:
        return "it is empty"
    if name[0] == "." or name != name.strip() or name[-1] == ".":
        return "it starts or ends with a dot or a space"
    if not name.isprintable() or not _FORBIDDEN.isdisjoint(name):
        return f"it holds a control character or one of {' '.join(sorted(_FORBIDDEN))}"
    if len(name.encode("utf-8")) > _MAX_NAME_BYTES:
        return f"it is longer than {_MAX_NAME_BYTES} bytes"
    return None


def version_order(version: str) -> list[tuple[int, int, str]]:
    """Sorts versions as people count: 9 before 10, 1.9 before 1.10."""
    return [
        (1, int(part), "") if part.isdecimal() else (0, 0, part)
        for part in re.findall(r"[0-9]+|[^0-9]+", version)
    ]


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise EdgeError(f"{folder} can't be read: {error}") from error
