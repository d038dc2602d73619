"""Draw loss curves as an SVG: one panel a series, no dependencies.

Enters: the CSV logs of the training scripts. Leaves: one SVG file.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

WIDTH, HEIGHT, MARGIN = 360, 200, 44


def read(path: Path, column: str, series: str | None) -> list[tuple[float, float]]:
    """(step, value) points of a log; `series` picks rows by their first field."""
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if series is None or row["series"] == series]
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


def panel(points: list[tuple[float, float]], title: str, left: int) -> str:
    """One framed curve with the ends of its axes labelled."""
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    low, high = min(ys), min(max(ys), min(ys) + 2 * (sorted(ys)[len(ys) * 9 // 10] - min(ys)))
    span_x, span_y = max(xs) - min(xs) or 1, high - low or 1
    inner_x, inner_y = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN
    scale_x, scale_y = inner_x / span_x, inner_y / span_y
    dots = [
        (left + MARGIN + (x - min(xs)) * scale_x, HEIGHT - MARGIN - (min(y, high) - low) * scale_y) for x, y in points
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in dots)
    text = '<text x="{}" y="{}" font-size="11" text-anchor="{}">{}</text>'
    return "\n".join(
        [
            f'<rect x="{left + MARGIN}" y="{MARGIN}" width="{inner_x}" height="{inner_y}" fill="none" stroke="#bbb"/>',
            f'<polyline points="{path}" fill="none" stroke="#2060a0" stroke-width="1.5"/>',
            text.format(left + WIDTH // 2, MARGIN - 12, "middle", title),
            text.format(left + MARGIN - 4, MARGIN + 8, "end", f"{high:.2f}"),
            text.format(left + MARGIN - 4, HEIGHT - MARGIN, "end", f"{low:.2f}"),
            text.format(left + MARGIN, HEIGHT - MARGIN + 16, "middle", f"{min(xs):.0f}"),
            text.format(left + WIDTH - MARGIN, HEIGHT - MARGIN + 16, "middle", f"{max(xs):.0f}"),
        ]
    )


def main() -> None:
    """Write the SVG."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    panels = [
        panel(smooth(read(args.target, "value", "train"), 5), "target: loss (nats/token) by step", 0),
        panel(smooth(read(args.drafter, "loss", None), 5), "drafter: weighted loss by step", WIDTH),
        panel(smooth(read(args.drafter, "right_1", None), 5), "drafter: first draft right (greedy)", 2 * WIDTH),
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{3 * WIDTH}" height="{HEIGHT}" font-family="sans-serif">'
    background = f'<rect width="{3 * WIDTH}" height="{HEIGHT}" fill="white"/>'
    args.out.write_text("\n".join([head, background, *panels, "</svg>"]) + "\n")


if __name__ == "__main__":
    main()
