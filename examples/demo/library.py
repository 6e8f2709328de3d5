"""The library: documents of real text (Python's own language reference), set in pages and rendered as pictures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pydoc_data.topics import topics

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from mcp_client.tensors import Array

Picture = NDArray[np.uint8]  # [height, width], 255 is white

STRIP_HEIGHT = 48  # what PP-OCRv4's recognition model was trained on
PAGE_WIDTH = 320
LINES = 2  # a page is a card: recognising it costs about 70 ms of one core, 35 to 50 ms on two
FONT_SIZE = 26
MARGIN = 6
COVER_SIZE = (192, 320)  # height, width: multiples of 32, as the detection model wants


@dataclass(frozen=True, slots=True)
class Document:
    """A chapter; ``pages`` holds the lines of each page, and page numbers start at 1."""

    id: str
    pages: tuple[tuple[str, ...], ...]
    pictures: tuple[Picture, ...] = field(repr=False)
    cover_lines: tuple[str, ...]
    cover: Picture = field(repr=False)


def open_library(documents: int, pages: int) -> dict[str, Document]:
    """The ``documents`` longest chapters of the language reference, ``pages`` pages of each, by id.

    ``ValueError`` if the text of this Python is too short for that.
    """
    font = ImageFont.load_default(size=FONT_SIZE)  # scalable: it ships within Pillow
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise ValueError(
            "this Pillow was built without FreeType; install a wheel: pip install --force-reinstall pillow"
        )
    chapters: dict[str, Document] = {}
    for id in sorted(topics, key=lambda name: (-len(topics[name]), name)):
        text = " ".join(_prose(topics[id]))
        lines = _wrapped(text, font, most=pages * LINES)
        if len(lines) == pages * LINES:
            chapters[id] = _typeset(id, lines, font)
        if len(chapters) == documents:
            return chapters
    raise ValueError(
        f"this Python's own documentation fills {len(chapters)} documents of {pages} pages, not {documents}"
    )


def strips(page: Picture) -> dict[str, Array]:
    """A page's text lines as the recognition model's input: ``x``, FP32 ``[lines, 3, 48, width]``, -1 to 1.

    Lines are found by where the page has ink: rows without any part one from the next.
    """
    height, width = page.shape
    cut = []
    for top, bottom in ink_bands(page < 128):
        start = min(max((top + bottom - STRIP_HEIGHT) // 2, 0), height - STRIP_HEIGHT)
        strip = np.full((STRIP_HEIGHT, width), 255, np.uint8)
        # only the line itself: what its neighbours put into the 48 rows stays out
        strip[top - start : bottom - start] = page[top:bottom][:STRIP_HEIGHT]
        cut.append(strip)
    return {"x": _normalised(np.stack(cut))}


def layout_input(cover: Picture) -> dict[str, Array]:
    """A cover as the detection model's input: ``x``, FP32 ``[1, 3, height, width]``."""
    return {"x": _normalised(cover[np.newaxis])}


def ink_bands(ink: NDArray[np.bool_], *, gap: int = 2) -> list[tuple[int, int]]:
    """(first row, row after the last) of each run of rows with ink; runs less than ``gap`` rows apart are one."""
    rows = np.flatnonzero(ink.any(axis=1))
    if not rows.size:
        return []
    breaks = np.flatnonzero(np.diff(rows) > gap)
    firsts = [rows[0], *rows[breaks + 1]]
    lasts = [*rows[breaks], rows[-1]]
    return [(int(first), int(last) + 1) for first, last in zip(firsts, lasts, strict=True)]


def _prose(topic: str) -> Iterator[str]:
    """The paragraphs that are sentences: no headings, grammar, tables or examples."""
    for paragraph in topic.split("\n\n"):
        lines = paragraph.split("\n")
        if paragraph.isascii() and not any(
            line.startswith((" ", "*", "=", "-", "~", "|", "+")) for line in lines
        ):
            yield " ".join(paragraph.split())


def _wrapped(text: str, font: ImageFont.FreeTypeFont, *, most: int) -> list[str]:
    """The first ``most`` lines of a text set to the page's width."""
    lines: list[str] = []
    line = ""
    for word in text.split():
        longer = f"{line} {word}" if line else word
        if font.getlength(longer) <= PAGE_WIDTH - 2 * MARGIN:
            line = longer
            continue
        lines.append(line)
        if len(lines) == most:
            break
        line = word if font.getlength(word) <= PAGE_WIDTH - 2 * MARGIN else ""
    return [one for one in lines if one]


def _typeset(id: str, lines: list[str], font: ImageFont.FreeTypeFont) -> Document:
    pages = tuple(tuple(lines[at : at + LINES]) for at in range(0, len(lines), LINES))
    cover_lines = (id, *lines[:2])  # its name, and how it begins
    return Document(
        id=id,
        pages=pages,
        pictures=tuple(render(page, font, (LINES * STRIP_HEIGHT, PAGE_WIDTH)) for page in pages),
        cover_lines=cover_lines,
        cover=render(cover_lines, font, COVER_SIZE, pitch=60),
    )


def render(
    lines: tuple[str, ...], font: ImageFont.FreeTypeFont, size: tuple[int, int], *, pitch: int = STRIP_HEIGHT
) -> Picture:
    """Black text on white; ``size`` is (height, width), ``pitch`` the distance of two lines, in pixels."""
    height, width = size
    picture = Image.new("L", (width, height), 255)
    draw = ImageDraw.Draw(picture)
    for number, line in enumerate(lines):
        draw.text((MARGIN, number * pitch + pitch // 2), line, font=font, fill=0, anchor="lm")
    return np.asarray(picture, dtype=np.uint8)


def _normalised(grey: NDArray[np.uint8]) -> Array:
    """[n, h, w] of 0…255 → FP32 [n, 3, h, w]: (x / 255 - 0.5) / 0.5, the same in the three colours."""
    scaled = grey.astype(np.float32) / 127.5 - 1
    return np.ascontiguousarray(np.broadcast_to(scaled[:, np.newaxis], (grey.shape[0], 3, *grey.shape[1:])))
