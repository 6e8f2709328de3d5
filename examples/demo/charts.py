"""Small charts as inline SVG, coloured by CSS variables so that they follow the page's light or dark mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 44
Scale = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Line:
    """A named curve; ``colour`` names a CSS variable of the page (``--c-…``)."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Dot:
    """One mark with what a pointer is told over it."""

    x: float
    y: float
    colour: str
    title: str


def curves(
    lines: Sequence[Line],
    *,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    width: int = 640,
    height: int = 300,
) -> str:
    """Curves over one x axis; y runs from 0 to 1 and is shown in percent."""
    xs = [x for line in lines for x, _ in line.points]
    x_of, ticks = _x_axis(min(xs), max(xs), log_x, width)
    y_of = _linear(0, 1, height - _BOTTOM, _TOP)
    parts = [
        _grid_y([(0.25 * n, f"{25 * n} %") for n in range(5)], y_of, width),
        _ticks_x(ticks, x_of, height),
    ]
    for line in lines:
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in line.points)
        parts.append(
            f'<polyline class="line" style="stroke:var(--c-{line.colour})" points="{path}">'
            f"<title>{escape(line.name)}</title></polyline>"
        )
    return _svg(width, height, parts, x_label, y_label)


def scatter(
    dots: Sequence[Dot],
    *,
    bands: Sequence[tuple[float, float, str]],
    x_label: str,
    y_label: str,
    width: int = 980,
    height: int = 300,
) -> str:
    """Dots over a linear x and a logarithmic y axis; ``bands`` shade (from, to, label) of x, one row of labels each."""
    ys = [max(dot.y, 0.01) for dot in dots]
    last = max([dot.x for dot in dots] + [end for _, end, _ in bands])
    x_of = _linear(0, last, _LEFT, width - _RIGHT)
    low, high = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))
    bottom, top = height - _BOTTOM, _TOP + 20 * len(bands)
    y_log = _linear(low, max(high, low + 1), bottom, top)
    parts = []
    for row, (begin, end, label) in enumerate(bands):
        y = _TOP + 20 * row
        parts.append(
            f'<rect class="band" x="{x_of(begin):.1f}" y="{y}" width="{x_of(end) - x_of(begin):.1f}" height="{bottom - y}"/>'
            f'<text class="band-label" x="{x_of(begin) + 6:.1f}" y="{y + 14}">{escape(label)}</text>'
        )
    decades = [(float(power), _milliseconds(10.0**power)) for power in range(low, max(high, low + 1) + 1)]
    parts += [
        _grid_y(decades, y_log, width),
        _ticks_x([(x, f"{x:g}") for x in _round_ticks(0, last)], x_of, height),
    ]
    parts += [
        f'<circle class="dot" cx="{x_of(dot.x):.1f}" cy="{y_log(math.log10(max(dot.y, 0.01))):.1f}" r="4" '
        f'style="fill:var(--c-{dot.colour})"><title>{escape(dot.title)}</title></circle>'
        for dot in dots
    ]
    return _svg(width, height, parts, x_label, y_label)


def stacked_bars(
    rows: Sequence[tuple[str, Mapping[str, int]]], order: Sequence[str], *, width: int = 640
) -> str:
    """A bar per row, 100 % long, cut into the parts of ``order``; each part is coloured ``--c-PART`` and says its share."""
    left, bar, step = 150, 30, 52
    height = step * len(rows) + 8
    parts = []
    for number, (label, counts) in enumerate(rows):
        y = number * step + 8
        parts.append(f'<text class="row-label" x="{left - 12}" y="{y + bar / 2 + 5}">{escape(label)}</text>')
        total = sum(counts.values()) or 1
        x = float(left)
        for part in order:
            share = counts.get(part, 0) / total
            if not share:
                continue
            length = share * (width - left - _RIGHT)
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(length - 2, 0.5):.1f}" height="{bar}" rx="3" '
                f'style="fill:var(--c-{part})"><title>{escape(label)}: {part} {counts[part]}</title></rect>'
            )
            if length > 44:
                parts.append(
                    f'<text class="in-bar" x="{x + length / 2:.1f}" y="{y + bar / 2 + 5}">{100 * share:.0f} %</text>'
                )
            x += length
    return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(parts)}</svg>'


def _svg(width: int, height: int, parts: Sequence[str], x_label: str, y_label: str) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(y_label)} over {escape(x_label)}">'
        f"{''.join(parts)}"
        f'<text class="axis" x="{(_LEFT + width - _RIGHT) / 2}" y="{height - 6}">{escape(x_label)}</text></svg>'
    )


def _x_axis(low: float, high: float, log: bool, width: int) -> tuple[Scale, list[tuple[float, str]]]:
    if not log:
        x_of = _linear(low, high, _LEFT, width - _RIGHT)
        return x_of, [(x, f"{x:g}") for x in _round_ticks(low, high)]
    low = max(low, 0.01)
    straight = _linear(math.log10(low), math.log10(max(high, low * 10)), _LEFT, width - _RIGHT)
    powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    return (lambda x: straight(math.log10(max(x, low)))), [(10.0**p, _milliseconds(10.0**p)) for p in powers]


def _linear(low: float, high: float, start: float, end: float) -> Scale:
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _round_ticks(low: float, high: float) -> list[float]:
    """Five or so round numbers between two others."""
    rough = (high - low or 1.0) / 5
    step = 10 ** math.floor(math.log10(rough))
    step *= next(factor for factor in (1, 2, 5, 10) if factor * step >= rough)
    return [step * n for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _milliseconds(value: float) -> str:
    return f"{value:g} ms" if value < 1000 else f"{value / 1000:g} s"


def _grid_y(ticks: Sequence[tuple[float, str]], y_of: Scale, width: int) -> str:
    return "".join(
        f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y_of(y):.1f}" y2="{y_of(y):.1f}"/>'
        f'<text class="tick-y" x="{_LEFT - 8}" y="{y_of(y) + 4:.1f}">{label}</text>'
        for y, label in ticks
    )


def _ticks_x(ticks: Sequence[tuple[float, str]], x_of: Scale, height: int) -> str:
    return "".join(
        f'<text class="tick-x" x="{x_of(x):.1f}" y="{height - _BOTTOM + 18}">{label}</text>'
        for x, label in ticks
    )
