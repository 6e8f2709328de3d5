"""What a replacement policy is: told of references, it says which page to let go. It knows keys, no values
and no sizes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Protocol, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Policy(Protocol[Key]):
    """Not thread-safe: its owner holds a lock. ``now`` is in seconds and does not run backwards."""

    def __len__(self) -> int: ...
    def __contains__(self, key: Key) -> bool: ...

    def record(self, references: Iterable[tuple[Key, float]]) -> None:
        """Pages were referenced, each at a time; one that is not here is passed over."""

    def insert(self, key: Key, now: float) -> None:
        """A page that is not here comes in because of a reference."""

    def evict(self, now: float, *, spare_proven: bool = False) -> Key | None:
        """Choose a page, forget it and return it; ``None`` if there is none.

        ``spare_proven``: only a page that nobody has come back to.
        """

    def remove(self, key: Key) -> None:
        """A page that is here goes for another reason."""

    def clear(self) -> None:
        """Forget everything."""
