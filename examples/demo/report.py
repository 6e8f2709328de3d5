"""The outcome as one self-contained HTML page: no scripts, no fonts, nothing to load."""

from __future__ import annotations

import base64
import io
from html import escape

from PIL import Image

from .charts import Dot, Line, curves, scatter, stacked_bars
from .library import Picture
from .scenario import PACE, READERS, Outcome, Run
from .table import rows

_SOURCES = ("cache", "prefetch", "server", "edge", "error")
_WINDOW = 40  # turns over which the moving hit ratio is taken

_STYLE = """
:root { color-scheme: light dark;
  --paper:#fbfbf9; --card:#ffffff; --ink:#1d1f23; --soft:#5d636e; --rule:#e4e4df; --band:#d9480f14;
  --c-none:#8b919c; --c-lru:#2f74d0; --c-full:#12936b;
  --c-server:#8b919c; --c-cache:#2f74d0; --c-prefetch:#12936b; --c-edge:#d9680f; --c-error:#c92a2a; }
@media (prefers-color-scheme: dark) { :root {
  --paper:#15171a; --card:#1d2024; --ink:#eceef1; --soft:#9aa2ae; --rule:#33373d; --band:#ff922b1f;
  --c-none:#868d99; --c-lru:#5b9bee; --c-full:#35b98c;
  --c-server:#868d99; --c-cache:#5b9bee; --c-prefetch:#35b98c; --c-edge:#f28c38; --c-error:#ff6b6b; } }
* { box-sizing:border-box; }
body { margin:0; background:var(--paper); color:var(--ink); font:16px/1.55 system-ui,-apple-system,"Segoe UI",sans-serif; }
main { max-width:1080px; margin:0 auto; padding:48px 24px 72px; }
h1 { font-size:30px; line-height:1.2; margin:0 0 8px; letter-spacing:-.01em; }
h2 { font-size:18px; margin:0 0 2px; }
p { margin:0 0 12px; color:var(--soft); max-width:76ch; }
.lead { font-size:17px; }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(180px,1fr)); gap:14px; margin:28px 0; }
.tile, figure { background:var(--card); border:1px solid var(--rule); border-radius:10px; }
.tile { padding:16px 18px; }
.tile b { display:block; font-size:22px; font-weight:650; white-space:nowrap; font-variant-numeric:tabular-nums; }
.tile span { color:var(--soft); font-size:14px; }
.two { display:grid; grid-template-columns:repeat(auto-fit,minmax(420px,1fr)); gap:14px; }
figure { margin:0 0 14px; padding:18px 20px; overflow-x:auto; }
figure p { font-size:14px; }
svg { width:100%; height:auto; display:block; font-size:13px; }
svg text { fill:var(--soft); }
.line { fill:none; stroke-width:2.5; stroke-linejoin:round; }
.grid { stroke:var(--rule); }
.tick-y, .row-label { text-anchor:end; }
svg .row-label { fill:var(--ink); font-size:14px; }
.tick-x, .axis, .in-bar { text-anchor:middle; }
svg .in-bar { fill:#fff; font-weight:600; }
.band { fill:var(--band); }
svg .band-label { fill:var(--ink); font-size:12px; }
.dot { fill-opacity:.8; stroke:var(--card); stroke-width:1; }
.keys { display:flex; flex-wrap:wrap; gap:4px 18px; font-size:14px; color:var(--soft); margin:4px 0 10px; }
.keys i { display:inline-block; width:12px; height:12px; border-radius:3px; margin-right:6px; vertical-align:-1px; }
table { border-collapse:collapse; width:100%; font-variant-numeric:tabular-nums; font-size:15px; }
th, td { text-align:right; padding:7px 10px; border-bottom:1px solid var(--rule); }
th:first-child, td:first-child { text-align:left; }
th { color:var(--soft); font-weight:500; }
.read { display:flex; flex-wrap:wrap; gap:24px; align-items:center; }
.read img { border:1px solid var(--rule); border-radius:6px; width:288px; max-width:100%; }
pre { margin:0; font:15px/1.6 ui-monospace,Menlo,Consolas,monospace; white-space:pre-wrap; }
footer { color:var(--soft); font-size:14px; margin-top:24px; }
"""


def page(outcome: Outcome) -> str:
    """The whole document."""
    none, full = outcome.run("none"), outcome.run("full")
    ledger, offline = outcome.ledger, outcome.offline
    tiles = [
        (
            f"{_short(none.latency_ms(50))} → {_short(full.latency_ms(50))} ms",
            "median wait for a page, without and with the client",
        ),
        (
            f"{100 * full.hit_ratio:.0f} %",
            f"hit ratio; plain LRU of the same size: {100 * outcome.run('lru').hit_ratio:.0f} %",
        ),
        (
            f"{full.overfetch:.2f}",
            f"prefetches issued per page asked for; {100 * full.precision:.0f} % of them were used",
        ),
        (
            f"{offline.errors}",
            f"errors while the server was dead; {len(offline.edge)} answers came from the edge",
        ),
        (f"{ledger.lost} / {ledger.double}", f"telemetry events lost / counted twice, of {ledger.recorded}"),
    ]
    shown = [name for name in _SOURCES if any(one.source == name for one in offline.answers)]
    cached = [(run.name, run.title) for run in outcome.runs if run.name != "none"]
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>MCP 2026 client: the demo</title><style>{_STYLE}</style>
<main>
<h1>Readers turn pages; every page is read by a real OCR model</h1>
<p class="lead">{_lead(outcome)}</p>
<div class="tiles">{"".join(map(_tile, tiles))}</div>
<div class="two">
{
        _figure(
            "How long a reader waits",
            "Share of pages that were there within a time; higher and further left is better.",
            _keys([(run.name, run.title) for run in outcome.runs]),
            _waits(outcome),
        )
    }
{
        _figure(
            "Where answers came from",
            f"The same sessions, three times. Both caches hold {outcome.budget_bytes / 1e6:.0f} MB.",
            _keys([(name, name) for name in _SOURCES[:3]]),
            stacked_bars([(run.title, run.sources) for run in outcome.runs], _SOURCES),
        )
    }
</div>
{
        _figure(
            "Hit ratio as the sessions go on",
            f"Of the last {_WINDOW} pages asked for. The profile was learned from other sessions, so prefetch starts "
            "with the first page.",
            _keys(cached),
            _moving(outcome),
        )
    }
{
        _figure(
            "The servers die, the readers go on",
            "Each dot is an answer. Both servers were killed (SIGKILL) and started again later; the models had been "
            "synced to this machine before. No probability in an answer is further than "
            f"{offline.differs:.2g} from the server's first answer to the same page.",
            _keys([(name, name) for name in shown]),
            _timeline(outcome),
        )
    }
{_figure("The figures", "", f"<table>{_table(outcome)}</table>")}
{
        _figure(
            "What a page is",
            f"{outcome.accuracy:.1%} of the characters of {len(outcome.pages)} pages were read as they are printed. "
            "One of them, and what the model read:",
            f'<div class="read">{_picture(outcome.sample.pictures[0])}',
            f"<pre>{escape(chr(10).join(outcome.sample_text))}</pre></div>",
        )
    }
<footer>{_footer(outcome)}</footer>
</main></html>
"""


def _short(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 10 else f"{ms:.2g}"


def _tile(tile: tuple[str, str]) -> str:
    value, told = tile
    return f'<div class="tile"><b>{value}</b><span>{escape(told)}</span></div>'


def _figure(heading: str, text: str, *content: str) -> str:
    told = f"<p>{escape(text)}</p>" if text else ""
    return f"<figure><h2>{escape(heading)}</h2>{told}{''.join(content)}</figure>"


def _lead(outcome: Outcome) -> str:
    size = outcome.size
    return (
        f"{READERS} readers at a time turn {size.turns} pages of a library of {size.documents} documents "
        f"({size.documents * size.pages} pages). Each page goes through PP-OCRv4 on mcp-server, a process on the same machine. "
        f"The client's cache holds {outcome.budget_bytes / outcome.library_bytes:.0%} of all answers."
    )


def _footer(outcome: Outcome) -> str:
    return (
        f"Latencies are those that the client reports for each call. Readers pause between pages, {PACE} times shorter than "
        f"people would; the pauses are the same in all runs. Text: Python's own language reference. The whole demo took "
        f"{outcome.seconds:.0f} s. Telemetry: {outcome.ledger.stored} events in {outcome.ledger.batches} batches, "
        f"{outcome.ledger.resent} events sent again and recognised."
    )


def _waits(outcome: Outcome) -> str:
    lines = []
    for run in outcome.runs:
        waits = sorted(one.latency_ms for one in run.answers)
        points = [(wait, (number + 1) / len(waits)) for number, wait in enumerate(waits)]
        lines.append(Line(run.title, run.name, points))
    return curves(lines, x_label="wait (logarithmic)", y_label="share of pages", log_x=True)


def _moving(outcome: Outcome) -> str:
    lines = [Line(run.title, run.name, _hits(run)) for run in outcome.runs if run.name != "none"]
    return curves(lines, x_label="pages asked for so far", y_label="hit ratio", width=980, height=240)


def _hits(run: Run) -> list[tuple[float, float]]:
    hits = [one.source in ("cache", "prefetch") for one in run.answers]
    moving = []
    for end in range(1, len(hits) + 1):
        window = hits[max(0, end - _WINDOW) : end]
        moving.append((float(end), sum(window) / len(window)))
    return moving[min(_WINDOW, len(hits)) // 2 :]


def _timeline(outcome: Outcome) -> str:
    marks = {what: at for at, what in outcome.offline.marks}
    bands = [
        (marks[f"{server} killed"], marks["servers back"], f"{server} is dead")
        for server in ("mcp-server", "mcp-profile")
    ]
    dots = [
        Dot(one.at, one.latency_ms, one.source, f"{one.path}: {one.source}, {one.latency_ms:.1f} ms")
        for one in outcome.offline.answers
    ]
    return scatter(dots, bands=bands, x_label="seconds", y_label="wait")


def _table(outcome: Outcome) -> str:
    head, *body = rows(outcome)
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    return f"<tr>{cells}</tr>" + "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body
    )


def _keys(entries: list[tuple[str, str]]) -> str:
    return (
        '<div class="keys">'
        + "".join(
            f'<span><i style="background:var(--c-{colour})"></i>{escape(name)}</span>'
            for colour, name in entries
        )
        + "</div>"
    )


def _picture(picture: Picture) -> str:
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    return f'<img alt="a page" src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}">'
