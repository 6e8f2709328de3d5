"""LRU-K: which page to let go, by the time of its K-th most recent reference.

Exact as in E. J. O'Neil, P. E. O'Neil, G. Weikum, "The LRU-K Page Replacement Algorithm For Database Disk
Buffering", SIGMOD 1993, figure 2.1. The names are the paper's: a page, HIST(p, 1..K), LAST(p), the
correlated-reference period (section 2.1.1), the retained-information period (section 2.1.2). The policy knows
keys and times, no values and no clock.

The paper's figure looks at every page for each victim. Here that is O(log n), amortised, and a reference
costs O(K): K-th times only grow, so a heap may hold old ones. A victim's search takes the smallest time on
the heap; if the page's own is later by now, it goes back with that. Each such return is paid for by a
reference made since.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Hashable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

# A page's times: [LAST, HIST(p, n), …, HIST(p, 1)], oldest reference first, n ≤ K the number that is known.
_Times = list[float]


class LRUK(Generic[Key]):
    """The policy for pages of one size class; not thread-safe.

    ``k``: references remembered; 1 is plain LRU. ``correlated_s``: a reference at most this long after the
    one before is part of the same event and earns nothing (0: every reference counts), and until it is over
    the page is no victim. ``retained_s``: how long after its last reference the times of a page that is gone
    are still used. ``history``: how many such pages are remembered for each page present, at most (and 1,024
    in any case).
    """

    def __init__(
        self, k: int = 2, *, correlated_s: float = 0.0, retained_s: float = 200.0, history: float = 1.0
    ) -> None:
        self._k = k
        self._correlated_s = correlated_s if correlated_s > 0 else float("-inf")  # 0: none is within it
        self._retained_s = retained_s
        self._history_per_page = history
        self._now = float("-inf")
        self._pages: dict[Key, _Times] = {}
        # Pages with fewer than K references: infinite backward K-distance, by LAST. Plain LRU is the paper's
        # suggestion for choosing among them.
        self._young: OrderedDict[Key, None] = OrderedDict()
        # (HIST(p, K) at most, tie-break, key, times) of every other page; "at most" as said above. The times
        # tell a page from an earlier stay of the same key.
        self._old: list[tuple[float, int, Key, _Times]] = []
        # (when its correlated period ends at the soonest, …): pages taken off the heap that could not be
        # victims yet.
        self._parked: list[tuple[float, int, Key, _Times]] = []
        self._gone: OrderedDict[Key, _Times] = OrderedDict()  # by when they went
        self._ties = itertools.count()

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: Key) -> bool:
        return key in self._pages

    def record(self, key: Key, now: float) -> None:
        """A page that is here is referenced. Time that runs backwards counts as standing still."""
        if now > self._now:
            self._now = now
        else:
            now = self._now
        times = self._pages[key]
        last = times[0]
        times[0] = now
        known = len(times) - 1
        if last + self._correlated_s >= now:
            if known < self._k:
                self._young.move_to_end(key)
            return
        length = last - times[-1]
        if length:  # a burst that has ended counts as one moment: what was before it moves up by its length
            for i in range(1, known + 1):
                times[i] += length
        times.append(now)
        if known == self._k:
            del times[1]
        elif known == self._k - 1:
            del self._young[key]
            heappush(self._old, (times[1], next(self._ties), key, times))
        else:
            self._young.move_to_end(key)

    def insert(self, key: Key, now: float) -> None:
        """A page that is not here is fetched because of a reference; what is retained of its earlier times
        counts."""
        if now > self._now:
            self._now = now
        else:
            now = self._now
        times = self._gone.pop(key, None)
        if times is None or now - times[0] > self._retained_s:
            times = [now, now]
        else:
            times[0] = now
            times.append(now)
            if len(times) > self._k + 1:
                del times[1]
        self._pages[key] = times
        if len(times) > self._k:
            heappush(self._old, (times[1], next(self._ties), key, times))
        else:
            self._young[key] = None

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
        if spare_proven and self._k > 1:
            key = next(iter(self._young), None)
            if key is None or self._pages[key][0] + self._correlated_s >= now:
                return None
            del self._young[key]
        else:
            key = self._victim(now)
            if key is None:
                return None
        self._forget(key)
        return key

    def remove(self, key: Key) -> None:
        """A page is gone for another reason; its history is kept all the same."""
        self._young.pop(key, None)
        self._forget(key)
        if len(self._old) + len(self._parked) > 2 * len(self._pages) + 64:  # half of it is of removed pages
            self._old = [item for item in self._old if self._is_current(item)]
            self._parked = [item for item in self._parked if self._is_current(item)]
            heapify(self._old)
            heapify(self._parked)

    def clear(self) -> None:
        """Forget every page and all history."""
        self._pages.clear()
        self._young.clear()
        self._old.clear()
        self._parked.clear()
        self._gone.clear()

    def _victim(self, now: float) -> Key | None:
        correlated_s = self._correlated_s
        young, old, parked, pages = self._young, self._old, self._parked, self._pages
        key: Key
        for key in young:
            if pages[key][0] + correlated_s < now:
                del young[key]
                return key
            break  # the others were referenced later still
        while parked and parked[0][0] < now:
            _, tie, key, times = heappop(parked)
            if pages.get(key) is times:
                heappush(old, (times[1], tie, key, times))
        while old:
            at_most, tie, key, times = old[0]
            if pages.get(key) is not times:
                heappop(old)
            elif times[1] != at_most:
                heapreplace(old, (times[1], tie, key, times))
            else:
                heappop(old)
                if times[0] + correlated_s < now:
                    return key
                heappush(parked, (times[0] + correlated_s, tie, key, times))
        if young:
            return young.popitem(last=False)[0]
        while parked:
            until, tie, key, times = heappop(parked)
            if pages.get(key) is times:
                if times[0] + correlated_s == until:
                    return key
                heappush(parked, (times[0] + correlated_s, tie, key, times))
        return None

    def _forget(self, key: Key) -> None:
        """Move a page's times into the history, and drop history that is too old or too much."""
        times = self._pages.pop(key)
        gone = self._gone
        # A copy, so that what is left of this stay on a heap is not taken for the next.
        gone[key] = times[:]
        most = 1024 + self._history_per_page * len(self._pages)
        # Whoever went first is first here, and was last referenced no later than that.
        while len(gone) > most or self._now - next(iter(gone.values()))[0] > self._retained_s:
            gone.popitem(last=False)
            if not gone:
                break

    def _is_current(self, item: tuple[Any, int, Key, _Times]) -> bool:
        return self._pages.get(item[2]) is item[3]
