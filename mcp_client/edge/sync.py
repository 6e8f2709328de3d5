"""Bring models onto this machine: only what changed, checked before it is used, whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .._httpx import httpx
from ..errors import ConfigurationError, EdgeError, IntegrityError, MCPError, ProtocolError
from .contents import SIDE_FILES, digests_of
from .download import FileOrigin, Origin, download
from .onnx_file import external_files
from .repository import DIGEST_FILE, MODEL_FILE, ModelRepository, inside, read_digests
from .signing import SIGNATURE_FILE, PublicKey, read_signature
from .sources import Announced, Source, open_source
from .staging import Staging, locked, private_folder
from .upkeep import require_budget, trim

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What a sync did. ``downloaded`` and ``unchanged``: model → version; ``failed``: model → why. ``bytes`` came from the
    source. ``removed``: (model, version) of what went to stay within the budget. ``refused``: of a running edge's models,
    what came and is not used, because it could not be loaded or failed its smoke input: model → why.
    """

    downloaded: Mapping[str, str]
    unchanged: Mapping[str, str]
    failed: Mapping[str, MCPError]
    bytes: int = 0
    removed: Sequence[tuple[str, str]] = ()
    refused: Mapping[str, str] = field(default_factory=dict)


def sync(
    repository: ModelRepository,
    source: str,
    *,
    http: httpx.Client | None = None,
    models: Sequence[str] | None = None,
    progress: Progress | None = None,
    public_key: str | os.PathLike[str] | None = None,
    max_bytes: int | None = None,
) -> SyncReport:
    """Fetch the version that counts of each model (``models``: only these) that is not here yet or is another one here.

    ``source``: the URL of an ``mcp-server``, of an ``.onnx`` file with its ``.sha256`` beside it, or of a ``.json`` manifest;
    or a folder (``sources.py``). A model that fails is reported and costs the others nothing; what was here of it stays as it
    was, and its download goes on where it broke off at the next sync. ``progress(what, bytes_done, bytes_total)`` is called
    as bytes come in. ``public_key``: a PEM file; what it did not sign is not used (``signing.py``). ``max_bytes``: the budget
    on disk of all models here; versions that are not used go first, and what can't fit is not fetched.

    Raises ``ConnectionFailedError`` or ``ServerError`` if the source can't even be asked what it has.
    """
    if repository.root.is_file():
        raise ConfigurationError(
            f"{repository.root} is a single model file; sync needs a folder to put models in"
        )
    key = PublicKey(public_key) if public_key is not None else None
    with contextlib.ExitStack() as stack:
        if http is None and source.startswith(("http://", "https://")):
            http = stack.enter_context(httpx.Client(timeout=30.0))
        job = _Job(repository, open_source(source, http), key, progress, max_bytes)
        for model in dict.fromkeys(job.source.models() if models is None else models):
            job.take(model)
    removed = trim(repository, max_bytes) if max_bytes is not None else []
    return SyncReport(
        job.downloaded,
        job.unchanged,
        job.failed,
        job.received,
        tuple((each.model, each.version) for each in removed),
    )


class _Job:
    """One sync. ``take`` brings one model."""

    def __init__(
        self,
        repository: ModelRepository,
        source: Source,
        key: PublicKey | None,
        progress: Progress | None,
        max_bytes: int | None,
    ) -> None:
        self.source = source
        self.downloaded: dict[str, str] = {}
        self.unchanged: dict[str, str] = {}
        self.failed: dict[str, MCPError] = {}
        self.received = 0
        self._repository = repository
        self._key = key
        self._progress = progress
        self._max_bytes = max_bytes
        private_folder(repository.root)

    def take(self, model: str) -> None:
        repository = self._repository
        try:
            announced = self.source.announced(model)
            if self._is_here(announced) and repository.followed(model) == announced.version:
                self.unchanged[model] = announced.version
                return
            if self._key is not None:  # before anything is fetched
                self._key.check(model, announced.version, announced.digests, announced.signature)
            with locked(repository.root):
                here = self._is_here(announced)  # another process may have been quicker
                if not here:
                    self._fetch(announced)
                repository.follow(model, announced.version)
            (self.unchanged if here else self.downloaded)[model] = announced.version
        except MCPError as error:
            self.failed[model] = error
        except OSError as error:
            self.failed[model] = EdgeError(f"{repository.root} can't be written: {error}")

    def _is_here(self, announced: Announced) -> bool:
        repository, model, version = self._repository, announced.model, announced.version
        repository.folder(model, version)  # names from elsewhere, refused before anything is asked for
        if version not in repository.versions(model):
            return False
        try:
            found = repository.resolve(model, version)
            here = digests_of(repository, found)
            if self._key is not None:
                self._key.check(model, version, here, read_signature(found.path))
        except EdgeError:
            return False  # damaged, incomplete or not signed: it is fetched again
        wanted = announced.digests
        beside = (name for name in SIDE_FILES if name in wanted or name in here)
        return (
            all(digest == wanted.get(name, digest) for name, digest in here.items())
            and all(here.get(name) == wanted.get(name) for name in beside)
            and announced.signature in ("", read_signature(found.path))
        )

    def _fetch(self, announced: Announced) -> None:
        """Get a model with all its files and put it in place. The lock is held."""
        if self._max_bytes is not None:
            sizes = [size or 0 for _, size in announced.files.values()]
            require_budget(self._repository, announced.model, sum(sizes), self._max_bytes)
        staging = Staging(self._repository, announced.model, announced.version, announced.digest)
        model_file = staging.folder / MODEL_FILE
        digests = {MODEL_FILE: announced.digest}
        try:
            self._get(announced, MODEL_FILE, model_file)
            beside = [name for name in SIDE_FILES if name in announced.files]
            for name in [*external_files(model_file), *beside]:
                file = inside(staging.folder, name)
                if name in (MODEL_FILE, DIGEST_FILE, SIGNATURE_FILE) or name.endswith(".part"):
                    raise IntegrityError(f"a model can't keep its tensors in a file named {name!r}")
                if name not in announced.files:
                    raise ProtocolError(
                        f"model {announced.model!r} needs the file {name!r}, which its source does not announce"
                    )
                digests[name] = announced.files[name][0]
                private_folder(file.parent)
                self._get(announced, name, file)
            if self._key is not None and digests != announced.digests:
                more = sorted(announced.digests.keys() - digests.keys())
                raise IntegrityError(
                    f"what was signed of model {announced.model!r} has files that it does not use: {more}"
                )
        except IntegrityError:
            staging.discard()
            raise
        (staging.folder / SIGNATURE_FILE).unlink(missing_ok=True)
        if announced.signature:
            (staging.folder / SIGNATURE_FILE).write_text(announced.signature + "\n", "ascii")
        staging.publish(digests)

    def _get(self, announced: Announced, name: str, target: Path) -> None:
        digest, size = announced.files[name]
        if target.exists():  # from an earlier attempt: it was checked before it got this name
            return
        if self._link(announced.model, digest, target):
            return
        what = f"{announced.model} {announced.version} {name}".removesuffix(f" {MODEL_FILE}")
        told = None
        if self._progress is not None:
            progress = self._progress
            told = lambda done, total: progress(what, done, total)  # noqa: E731
        origin: Origin = self.source.origin(announced, name)
        self.received += download(origin, target, digest=digest, size=size, progress=told)

    def _link(self, model: str, digest: str, target: Path) -> bool:
        """Whether a version that is here has the same file; then it is taken from there. Files are never written into, so
        two versions may share one.
        """
        for version in self._repository.versions(model):
            model_file = self._repository.folder(model, version) / MODEL_FILE
            try:
                names = [name for name, wanted in read_digests(model_file).items() if wanted == digest]
                for name in names:
                    path = inside(model_file.parent, name)
                    if self._repository.digest(path) != digest:
                        continue
                    target.with_name(target.name + ".part").unlink(missing_ok=True)
                    try:
                        os.link(path, target)
                    except OSError:  # a file system without links
                        download(FileOrigin(path), target, digest=digest)
                    return True
            except EdgeError:  # damaged there
                continue
        return False
