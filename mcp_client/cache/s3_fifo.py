"""S3-FIFO: three plain queues, for streams that LRU-K reads wrongly (clicks on ever new things, loops).

J. Yang, Y. Zhang, Z. Qiu, Y. Yue, K. V. Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023,
algorithm 1: new pages enter a small queue; those asked for twice more while they pass through it move to the
main queue, the others go and leave their names in a ghost queue; whoever comes back while its name is there
enters the main queue at once. The main queue gives a page another round for each time it was asked for, three
at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

_SMALL_SHARE = 0.1  # of the cache; section 4.1 of the paper
_GHOST_SHARE = 0.9  # as many names as the main queue has pages
_MOST_HITS = 3  # two bits
_PROMOTED_FROM = 2


class _Page(Generic[Key]):
    """One stay of a page, and its name in the ghost queue afterwards."""

    __slots__ = ("here", "hits", "key", "main")

    def __init__(self, key: Key, main: bool) -> None:
        self.key = key
        self.here = True
        self.hits = 0
        self.main = main


class S3FIFO(Generic[Key]):
    """The policy; sizes are counted in pages, shares are of those that are here. Not thread-safe."""

    def __init__(self) -> None:
        self._pages: dict[Key, _Page[Key]] = {}  # those that are here, and the names in the ghost queue
        self._small: deque[_Page[Key]] = deque()
        self._main: deque[_Page[Key]] = deque()
        self._ghosts: deque[_Page[Key]] = deque()
        self._in_small = self._in_main = (
            0  # without the removed, which stay on their queue until it is their turn
        )

    def __len__(self) -> int:
        return self._in_small + self._in_main

    def __contains__(self, key: Key) -> bool:
        page = self._pages.get(key)
        return page is not None and page.here

    def record(self, references: Iterable[tuple[Key, float]]) -> None:
        pages = self._pages
        for key, _ in references:
            page = pages.get(key)
            if page is not None and page.here and page.hits < _MOST_HITS:
                page.hits += 1

    def insert(self, key: Key, now: float) -> None:
        # While the cache fills, and after others have taken pages out, the small queue gets no more than its
        # share: so the main queue holds something from the start, which is what is left to hit in a loop over
        # too many pages.
        small_is_full = self._in_small > _SMALL_SHARE * (len(self) + 1)
        page = self._pages[key] = _Page(key, main=small_is_full or key in self._pages)
        if page.main:
            self._main.append(page)
            self._in_main += 1
        else:
            self._small.append(page)
            self._in_small += 1

    def evict(self, now: float, *, spare_proven: bool = False) -> Key | None:
        if spare_proven:
            while self._small and not self._small[0].here:
                self._small.popleft()
            if not self._small or self._small[0].hits:
                return None
            return self._forget(self._small.popleft())
        while self._in_small or self._in_main:
            if self._in_small > _SMALL_SHARE * len(self) or not self._in_main:
                page = self._small.popleft()
                if page.here and page.hits >= _PROMOTED_FROM:
                    page.main = True
                    page.hits = 0
                    self._main.append(page)
                    self._in_small -= 1
                    self._in_main += 1
                elif page.here:
                    return self._forget(page)
            else:
                page = self._main.popleft()
                if page.here and page.hits:
                    page.hits -= 1
                    self._main.append(page)
                elif page.here:
                    return self._forget(page)
        return None

    def remove(self, key: Key) -> None:
        self._forget(self._pages[key])
        for queue, most in ((self._small, self._in_small), (self._main, self._in_main)):
            if len(queue) > 2 * most + 64:  # half of it has been removed
                current = [page for page in queue if page.here and page.main is (queue is self._main)]
                queue.clear()
                queue.extend(current)

    def clear(self) -> None:
        self._pages.clear()
        self._small.clear()
        self._main.clear()
        self._ghosts.clear()
        self._in_small = self._in_main = 0

    def _forget(self, page: _Page[Key]) -> Key:
        page.here = False
        if page.main:  # it had its rounds: no name is kept
            self._in_main -= 1
            del self._pages[page.key]
            return page.key
        self._in_small -= 1
        ghosts = self._ghosts
        ghosts.append(page)
        while len(ghosts) > _GHOST_SHARE * len(self) + 1:
            ghost = ghosts.popleft()
            if self._pages.get(ghost.key) is ghost:  # else it has come back
                del self._pages[ghost.key]
        return page.key
