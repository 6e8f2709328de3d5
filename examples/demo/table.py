"""The outcome as a table, for the terminal and the report alike."""

from __future__ import annotations

from collections import Counter

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .scenario import PACE, READERS, THINK_S, Outcome

_SOURCES = ("server", "cache", "prefetch", "edge", "error")


def rows(outcome: Outcome) -> list[tuple[str, ...]]:
    """A header and a row per figure; a column per run, and one for the phase in which the servers die."""
    runs, full = outcome.runs, outcome.run("full")
    counts = Counter(one.source for one in outcome.offline.answers)
    return [
        ("", *(run.title for run in runs), "servers killed"),
        ("p50", *(f"{run.latency_ms(50):.1f} ms" for run in runs), ""),
        ("p95", *(f"{run.latency_ms(95):.1f} ms" for run in runs), ""),
        ("hit ratio", *(f"{run.hit_ratio:.1%}" for run in runs), ""),
        ("overfetch", *("" if run is not full else f"{run.overfetch:.2f}" for run in runs), ""),
        ("prefetch precision", *("" if run is not full else f"{run.precision:.1%}" for run in runs), ""),
        *(
            (f"from {source}", *(str(run.sources.get(source, 0)) for run in runs), str(counts[source]))
            for source in _SOURCES
        ),
    ]


def summary(outcome: Outcome) -> RenderableType:
    """The table, and below it what it can't say."""
    head, *body = rows(outcome)
    table = Table(title=f"{outcome.size.turns} pages by {READERS} readers, three times", title_justify="left")
    table.add_column(head[0])
    for name in head[1:]:
        table.add_column(name, justify="right", style="bold" if name == outcome.run("full").title else "")
    for row in body:
        table.add_row(*row)
    none, full, ledger, offline = outcome.run("none"), outcome.run("full"), outcome.ledger, outcome.offline
    lines = (
        f"A page's median wait: {full.latency_ms(50):.3g} ms in place of {none.latency_ms(50):.3g} ms, "
        f"{full.latency_ms(50) / none.latency_ms(50):.3g} × as long.",
        f"OCR read {outcome.accuracy:.1%} of the characters of {len(outcome.pages)} pages as they are printed.",
        f"Cache: {outcome.budget_bytes / 1e6:.0f} MB, {outcome.budget_bytes / outcome.library_bytes:.1%} of the answers to "
        "the whole library. Profile: learned from other sessions, downloaded before the first page.",
        f"Readers look at a page for {THINK_S[0] * 1e3:.0f} to {THINK_S[1] * 1e3:.0f} ms: people's time, {PACE} times as fast.",
        f"mcp-server killed under the readers: {offline.errors} errors, {len(offline.edge)} answers from the edge "
        f"({', '.join(offline.synced)} synced before), at most {offline.differs:.2g} from the server's.",
        f"mcp-profile killed too: {ledger.recorded} events recorded, {ledger.distinct} arrived, {ledger.lost} lost, "
        f"{ledger.double} counted twice ({ledger.resent} sent again and recognised).",
    )
    return Group(table, *map(Text, lines))
