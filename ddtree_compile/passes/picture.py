"""The arena as a picture: stages run to the right, bytes run up, a rectangle is a buffer.

In: the buffers and their arena. Out: text for a terminal, or an SVG document.
"""

from __future__ import annotations

import re
import string
import zlib
from collections.abc import Sequence
from xml.sax.saxutils import escape

from ddtree_compile.passes.buffers import Arena, Buffer

_GLYPHS = string.ascii_letters + string.digits
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_CHAR_WIDTH = 0.6  # of a label's font size


def arena_text(buffers: Sequence[Buffer], arena: Arena, width: int = 100, height: int = 24) -> str:
    """`height` rows of about `width` columns, a letter a buffer, `·` where nothing lives; then the largest buffers by
    name. A cell shows the buffer that lies at its middle."""
    first, last = _stages(buffers)
    stages = last - first + 1
    columns = max(1, min(width - 14, stages * 8))
    rows: list[str] = []
    for row in reversed(range(height)):
        byte = (row * 2 + 1) * arena.size // (height * 2)
        line = ["·"] * columns
        for index, buffer in enumerate(buffers):
            start = arena.offsets[buffer.name]
            if start <= byte < start + buffer.size:
                left = -(-((buffer.first - first) * columns * 2 - stages) // (stages * 2))
                right = -(-((buffer.last + 1 - first) * columns * 2 - stages) // (stages * 2))
                for column in range(max(0, left), min(columns, right)):
                    line[column] = _GLYPHS[index % len(_GLYPHS)]
        rows.append(f"{_size((row + 1) * arena.size / height):>10} ┤ {''.join(line)}")
    rows.append(f"{'0 B':>10} └─{'─' * columns}")
    rows.append(f"{'':>13}stages {first} to {last}; {len(buffers)} buffers, arena {_size(arena.size)}, "
                f"lower bound {_size(arena.lower_bound)}{', proved' if arena.proved else ''}")  # fmt: skip
    for index, buffer in sorted(enumerate(buffers), key=lambda pair: (-pair[1].size, pair[0]))[:8]:
        glyph = _GLYPHS[index % len(_GLYPHS)]
        rows.append(f"{'':>13}{glyph} {_size(buffer.size):>10}  stages {buffer.first}-{buffer.last}  {buffer.name}")
    return "\n".join(rows) + "\n"


def arena_svg(buffers: Sequence[Buffer], arena: Arena, width: int = 1600, height: int = 900) -> str:
    """A standalone SVG document of `width` x `height` pixels. A buffer's colour follows its name. A label stands where
    it fits; name, size and stages of every buffer are in its tooltip."""
    first, last = _stages(buffers)
    left, top, right, bottom = 90, 44, 16, 40
    plot_width, plot_height = width - left - right, height - top - bottom
    per_stage, per_byte = plot_width / (last - first + 1), plot_height / max(arena.size, 1)

    def x(stage: float) -> float:
        return left + (stage - first) * per_stage

    def y(byte: float) -> float:
        return top + plot_height - byte * per_byte

    title = f"{len(buffers)} buffers in {_size(arena.size)}; lower bound {_size(arena.lower_bound)}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="11">',
        "<style>text {font-family: monospace}</style>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{left}" y="24" font-size="14">{escape(title)}{", proved" if arena.proved else ""}</text>',
    ]
    for tick in range(9):
        level = y(arena.size * tick / 8)
        lines.append(f'<path d="M{left} {level:.1f}H{width - right}" stroke="#dddddd"/>')
        label = _size(arena.size * tick / 8)
        lines.append(f'<text x="{left - 6}" y="{level + 4:.1f}" text-anchor="end">{label}</text>')
    step = max(1, -(-(last - first + 1) // 16))
    lines += [
        f'<text x="{x(tick + 0.5):.1f}" y="{height - bottom + 16}" text-anchor="middle">{tick}</text>'
        for tick in range(first, last + 1, step)
    ]
    lines.append(f'<text x="{left}" y="{height - 8}">stage</text>')
    for buffer in buffers:
        box = (x(buffer.first), y(arena.offsets[buffer.name] + buffer.size))
        lines.append(_rectangle(buffer, *box, (buffer.last - buffer.first + 1) * per_stage, buffer.size * per_byte))
    bound = y(arena.lower_bound)
    lines.append(f'<path d="M{left} {bound:.1f}H{width - right}" stroke="#cc0000" stroke-dasharray="6 4"/>')
    return "\n".join([*lines, "</svg>", ""])


def _rectangle(buffer: Buffer, x: float, y: float, width: float, height: float) -> str:
    name = escape(_NO_XML.sub("\ufffd", buffer.name))
    hue = zlib.crc32(buffer.name.encode("utf-8", "replace")) % 360
    text = (
        f"<g><title>{name}: {_size(buffer.size)}, stages {buffer.first} to {buffer.last}</title>"
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="hsl({hue} 60% 78%)" '
        'stroke="#444444" stroke-width="0.4"/>'
    )
    font = min(11.0, height * 0.8, width / (max(len(buffer.name), 1) * _CHAR_WIDTH))
    if font >= 5:
        text += (
            f'<text x="{x + width / 2:.2f}" y="{y + height / 2 + font * 0.35:.2f}" font-size="{font:.1f}" '
            f'text-anchor="middle">{name}</text>'
        )
    return text + "</g>"


def _stages(buffers: Sequence[Buffer]) -> tuple[int, int]:
    return min((b.first for b in buffers), default=0), max((b.last for b in buffers), default=0)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
