"""LRU-K: which page to let go, by the time of its K-th most recent reference.

Exact as in E. J. O'Neil, P. E. O'Neil, G. Weikum, "The LRU-K Page Replacement Algorithm For Database Disk
Buffering", SIGMOD 1993, figure 2.1. The names are the paper's: a page, HIST(p, 1..K), LAST(p), the
correlated-reference period (section 2.1.1), the retained-information period (section 2.1.2). The policy knows
keys and times, no values and no clock.

The paper's figure looks at every page for each victim. Here that is O(log n), amortised, and a reference
costs O(K) and touches nothing but the page: the queues that victims are taken from may be out of date. Times
only grow, so a page is never due earlier than its place in a queue says; found at the front, it goes back to
where it belongs by now, which a reference made since has paid for.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Hashable, Iterable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class _Page(Generic[Key]):
    """One stay of a page in the cache, and its history block afterwards."""

    __slots__ = ("here", "key", "last", "times")

    def __init__(self, key: Key, last: float, times: list[float]) -> None:
        self.key = key
        self.here = True
        self.last = last  # LAST(p)
        self.times = times  # HIST(p, n), …, HIST(p, 1) for the n ≤ K that are known: oldest first


class LRUK(Generic[Key]):
    """The policy for pages of one size class; not thread-safe.

    ``k``: references remembered; 1 is plain LRU. ``correlated_s``: a reference at most this long after the
    one before is part of the same event and earns nothing (0: every reference counts), and until it is over
    the page is no victim. ``retained_s``: how long after its last reference the history of a page that is
    gone is still used. ``history``: how many evictions back history is kept, for each page present, at most
    (and 1,024 in any case).
    """

    def __init__(
        self, k: int = 2, *, correlated_s: float = 0.0, retained_s: float = 200.0, history: float = 1.0
    ) -> None:
        self._k = k
        self._correlated_s = correlated_s if correlated_s > 0 else float("-inf")  # 0: none is within it
        self._retained_s = retained_s
        self._history = history
        # References with which a page leaves the class of infinite backward K-distance. Where HIST(p, K) is
        # LAST(p), the subsidiary LRU of that class is the whole policy, and the cheaper one.
        self._proven = k if k > 1 or correlated_s > 0 else 2
        self._now = float("-inf")
        self._sweep_at = float("-inf")  # when the history is next looked through for what is too old
        self._pages: dict[Key, _Page[Key]] = {}  # those that are here, and the history of those that are gone
        self._here = 0
        # The class of infinite distance by LAST, the least recently used first (the paper's suggestion for
        # that class): (LAST at the time, page), in the order they came, and those found out of date since, as
        # a heap.
        self._young: deque[tuple[float, _Page[Key]]] = deque()
        self._young_again: list[tuple[float, int, _Page[Key]]] = []
        # The others by HIST(p, K), a heap: (the time when pushed, tie-break, page).
        self._old: list[tuple[float, int, _Page[Key]]] = []
        # Those taken off that heap that could not be victims yet: (the end of its correlated period then, …).
        self._parked: list[tuple[float, int, _Page[Key]]] = []
        self._gone: deque[_Page[Key]] = deque()  # history by when it began
        self._ties = itertools.count()

    def __len__(self) -> int:
        return self._here

    def __contains__(self, key: Key) -> bool:
        page = self._pages.get(key)
        return page is not None and page.here

    def record(self, references: Iterable[tuple[Key, float]]) -> None:
        """Pages that are here were referenced, each at a time; one that has gone meanwhile is passed over.

        Time that runs backwards counts as standing still.
        """
        pages, k, correlated_s, clock = self._pages, self._k, self._correlated_s, self._now
        for key, now in references:
            page = pages.get(key)
            if page is None or not page.here:
                continue
            if now > clock:  # noqa: PLR1730 (max() would cost a call)
                clock = now
            last = page.last
            page.last = clock
            if last + correlated_s >= clock:
                continue
            times = page.times
            if last != times[-1]:  # a burst has ended; it counts as one moment, so what was before moves up
                length = last - times[-1]
                times[:] = [time + length for time in times]
            times.append(clock)
            known = len(times)
            if known > k:
                del times[0]
            elif known == self._proven:
                heappush(self._old, (times[0], next(self._ties), page))
        self._now = clock

    def insert(self, key: Key, now: float) -> None:
        """A page that is not here is fetched because of a reference; what is retained of its history
        counts."""
        if now > self._now:
            self._now = now
        else:
            now = self._now
        earlier = self._pages.get(key)
        if earlier is None or earlier.last + self._retained_s < now:
            times = [now]
        else:
            times = earlier.times
            times.append(now)
            if len(times) > self._k:
                del times[0]
        page = self._pages[key] = _Page(key, now, times)
        self._here += 1
        if len(times) < self._proven:
            self._young.append((now, page))
        else:
            heappush(self._old, (times[0], next(self._ties), page))

    def evict(self, now: float, *, spare_proven: bool = False) -> Key | None:
        """Take the page with the greatest backward K-distance out and say which it was; ``None`` if there is
        none.

        Pages in their correlated period are spared. If all are in it, which the paper leaves open, the least
        recently used of infinite distance goes, else the one whose period ends first. ``spare_proven``: only
        take a page of infinite distance whose correlated period is over: one that nobody has come back to
        (with K = 1, which keeps no such record, any page).
        """
        if now > self._now:
            self._now = now
        else:
            now = self._now
        page = self._least_recent_young()
        if page is not None and page.last + self._correlated_s < now:
            self._take_young(page)
        elif spare_proven and self._k > 1:
            return None
        else:
            self._tidy()
            found = self._least_proven(now)
            if found is None:
                if page is None:
                    return None
                self._take_young(page)
                found = page
            page = found
        self._forget(page)
        return page.key

    def remove(self, key: Key) -> None:
        """A page is gone for another reason; its history is kept all the same."""
        self._forget(self._pages[key])
        self._tidy()

    def clear(self) -> None:
        """Forget every page and all history."""
        self._pages.clear()
        self._here = 0
        self._young.clear()
        self._young_again.clear()
        self._old.clear()
        self._parked.clear()
        self._gone.clear()

    def _least_recent_young(self) -> _Page[Key] | None:
        """The page of infinite distance that was referenced longest ago: then at the front of one of its two
        queues."""
        young, again, proven = self._young, self._young_again, self._proven
        while young:
            last, page = young[0]
            if page.here and len(page.times) < proven:
                if page.last == last:
                    break
                heappush(again, (page.last, next(self._ties), page))
            young.popleft()
        while again:
            last, tie, page = again[0]
            if page.here and len(page.times) < proven:
                if page.last == last:
                    return page if not young or last <= young[0][0] else young[0][1]
                heapreplace(again, (page.last, tie, page))
            else:
                heappop(again)
        return young[0][1] if young else None

    def _take_young(self, page: _Page[Key]) -> None:
        if self._young and self._young[0][1] is page:
            self._young.popleft()
        else:
            heappop(self._young_again)

    def _least_proven(self, now: float) -> _Page[Key] | None:
        """The page with the earliest HIST(p, K) whose correlated period is over; off its queue.

        If there is none such: the one whose period ends first, unless there are pages of infinite distance.
        """
        correlated_s, old, parked = self._correlated_s, self._old, self._parked
        while parked and parked[0][0] < now:
            _, tie, page = heappop(parked)
            if page.here:
                heappush(old, (page.times[0], tie, page))
        while old:
            time, tie, page = old[0]
            if page.here and page.times[0] != time:
                heapreplace(old, (page.times[0], tie, page))
                continue
            heappop(old)
            if page.here:
                if page.last + correlated_s < now:
                    return page
                heappush(parked, (page.last + correlated_s, tie, page))
        while parked and not (self._young or self._young_again):
            until, tie, page = heappop(parked)
            if page.here:
                if page.last + correlated_s == until:
                    return page
                heappush(parked, (page.last + correlated_s, tie, page))
        return None

    def _forget(self, page: _Page[Key]) -> None:
        """Make a page history, and drop history that is too much or too old."""
        page.here = False
        self._here -= 1
        gone = self._gone
        gone.append(page)
        while len(gone) > self._history * self._here + 1024:
            self._drop_history(gone.popleft())
        if self._now >= self._sweep_at:
            # Whoever went first is first here, and was last referenced no later than that.
            while gone and gone[0].last + self._retained_s < self._now:
                self._drop_history(gone.popleft())
            self._sweep_at = self._now + self._retained_s / 16

    def _drop_history(self, page: _Page[Key]) -> None:
        if self._pages.get(page.key) is page:  # else it has come back
            del self._pages[page.key]

    def _tidy(self) -> None:
        """Rebuild the queues once half of what is on them has left or moved on, so that they stay in
        proportion."""
        if len(self._young) > 2 * self._here + 64:
            current = [item for item in self._young if item[1].here and len(item[1].times) < self._proven]
            self._young = deque(current)
        for heap in (self._young_again, self._old, self._parked):
            if len(heap) > 2 * self._here + 64:
                heap[:] = [item for item in heap if item[2].here]
                heapify(heap)
