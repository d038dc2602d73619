"""Draw the curves of the four stages as an SVG: one panel a series, no dependencies.

Enters: the CSV logs of the training scripts, in one folder. Leaves: one SVG file.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

WIDTH, HEIGHT, MARGIN, COLUMNS = 360, 200, 44, 3
FRAME = 'fill="none" stroke="#bbb"'
PANELS = (  # log, column, points of the running mean, title
    ("target", "value", 5, "target: loss (nats/token) by step"),
    ("polish", "repeats", 1, "polish: repeated tokens by round"),
    ("polish", "heldout_loss", 1, "polish: held-out loss by round"),
    ("drafter", "loss", 5, "drafter: weighted loss by step"),
    ("drafter", "right_1", 5, "drafter: first draft right (greedy) by step"),
    ("last_polish", "inside", 1, "last polish: repeated 8-grams by round"),
)


def read(path: Path, column: str) -> list[tuple[float, float]]:
    """(step or round, value) points of a log; of one that holds several series, the training loss."""
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("series", "train") == "train"]
    step = "step" if "step" in rows[0] else "round"
    return [(float(row[step]), float(row[column])) for row in rows]


def smooth(points: list[tuple[float, float]], window: int) -> list[tuple[float, float]]:
    """Running mean over the last `window` points."""
    values = [v for _, v in points]
    means = [
        sum(values[max(0, i - window + 1) : i + 1]) / len(values[max(0, i - window + 1) : i + 1])
        for i in range(len(values))
    ]
    return [(x, y) for (x, _), y in zip(points, means, strict=True)]


def panel(points: list[tuple[float, float]], title: str, left: int, top: int) -> str:
    """One framed curve with the ends of its axes labelled."""
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    low, high = min(ys), min(max(ys), min(ys) + 2 * (sorted(ys)[len(ys) * 9 // 10] - min(ys)))
    span_x, span_y = max(xs) - min(xs) or 1, high - low or 1
    inner_x, inner_y = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN
    scale_x, scale_y = inner_x / span_x, inner_y / span_y
    dots = [
        (left + MARGIN + (x - min(xs)) * scale_x, top + HEIGHT - MARGIN - (min(y, high) - low) * scale_y)
        for x, y in points
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in dots)
    text = '<text x="{}" y="{}" font-size="11" text-anchor="{}">{}</text>'
    return "\n".join(
        [
            f'<rect x="{left + MARGIN}" y="{top + MARGIN}" width="{inner_x}" height="{inner_y}" {FRAME}/>',
            f'<polyline points="{path}" fill="none" stroke="#2060a0" stroke-width="1.5"/>',
            text.format(left + WIDTH // 2, top + MARGIN - 12, "middle", title),
            text.format(left + MARGIN - 4, top + MARGIN + 8, "end", f"{high:.2f}"),
            text.format(left + MARGIN - 4, top + HEIGHT - MARGIN, "end", f"{low:.2f}"),
            text.format(left + MARGIN, top + HEIGHT - MARGIN + 16, "middle", f"{min(xs):.0f}"),
            text.format(left + WIDTH - MARGIN, top + HEIGHT - MARGIN + 16, "middle", f"{max(xs):.0f}"),
        ]
    )


def main() -> None:
    """Write the SVG."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--logs", type=Path, required=True, help="folder of the CSV logs")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    panels = [
        panel(smooth(read(args.logs / f"{log}.csv", column), window), title, i % COLUMNS * WIDTH, i // COLUMNS * HEIGHT)
        for i, (log, column, window, title) in enumerate(PANELS)
    ]
    width, height = COLUMNS * WIDTH, -(-len(PANELS) // COLUMNS) * HEIGHT
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">'
    background = f'<rect width="{width}" height="{height}" fill="white"/>'
    args.out.write_text("\n".join([head, background, *panels, "</svg>"]) + "\n")


if __name__ == "__main__":
    main()
