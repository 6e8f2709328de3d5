"""What the scheduler decided about a candidate, why, and what came of it: for ``client.prefetcher.explain()``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .predictor import NO_CANDIDATE, Candidate

Outcome = Literal["", "used", "expired", "evicted", "cancelled", "failed"]


@dataclass(slots=True, eq=False)
class Decision:
    """One candidate at one step of a session.

    ``at``: seconds of the monotonic clock. ``probability``: that it is asked for, corrected by how often such candidates came
    true. ``value_ms``: what fetching it is worth, the price of the server's work taken off; below 0 it is not fetched.
    ``cost_ms``: the server's time and the bytes' that it takes. ``reason``: the evidence, or why it was left. ``outcome``: what
    became of what was fetched; "" while that is open.
    """

    at: float
    session: str
    path: str
    fetched: bool
    reason: str
    probability: float = 0.0
    value_ms: float = 0.0
    cost_ms: float = 0.0
    outcome: Outcome = ""
    candidate: Candidate = NO_CANDIDATE
    by_hand: bool = False
    issued_after: int = 0  # demanded requests so far

    def __str__(self) -> str:
        verdict = f"fetched{f' ({self.outcome})' if self.outcome else ''}" if self.fetched else "left"
        figures = f"p {self.probability:.2f}, worth {self.value_ms:+.1f} ms, costs {self.cost_ms:.1f} ms"
        return f"{self.path or '(any)'}: {verdict}; {figures}; {self.reason}"


NO_DECISION = Decision(0.0, "", "", fetched=False, reason="")


class Decisions(list[Decision]):
    """Decisions, oldest first. ``print`` shows one a line."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "nothing was decided yet"
