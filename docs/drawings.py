"""The drawings of the documentation, made from the order itself.

``python docs/drawings.py docs/drawings`` writes them. They are committed, and a test checks that this file still makes
the same. Colors follow the light or dark mode of the reader.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lightning_stream.order import BatchPlan, OrderConfig, RunOrder, Snapshot, StreamWeights, World
from lightning_stream.order.packing import PackedWindow, RowPacking
from lightning_stream.questions.quality import measure

COLORS = {"a": "#5b6ee1", "b": "#e0793b", "c": "#2f9e77", "d": "#b8478f"}  # one for each rank or canonical node
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#3a3f58}.n{font-size:11px}path{fill:none}"
    ".axis{stroke:#9aa0b5}.ink{stroke:#3a3f58}rect{fill-opacity:.25}"
    + "".join(f"path.{name}{{stroke:{color}}}rect.{name}{{fill:{color}}}" for name, color in COLORS.items())
    + "@media(prefers-color-scheme:dark){text{fill:#d5d9e6}.ink{stroke:#d5d9e6}rect{fill-opacity:.4}}"
)


@dataclass
class Drawing:
    """An SVG picture that grows by rectangles, paths and texts."""

    width: int
    height: int
    parts: list[str] = field(default_factory=list)

    def rect(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        """A filled rectangle."""
        self.parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>')

    def path(self, steps: str, kind: str, width: float = 1, more: str = "") -> None:
        """A line along SVG path steps."""
        self.parts.append(f'<path class="{kind}" d="{steps}" stroke-width="{width:g}"{more}/>')

    def text(self, x: float, y: float, text: str, anchor: str = "middle", kind: str = "", more: str = "") -> None:
        """A line of text."""
        named = f' class="{kind}"' if kind else ""
        self.parts.append(f'<text{named} x="{x:g}" y="{y:g}" text-anchor="{anchor}"{more}>{text}</text>')

    def axes(self, box: tuple[int, int, int, int], x_label: str, y_label: str) -> None:
        """Two axes with labels, along the left and the lower side of a box (left, top, right, bottom)."""
        left, top, right, bottom = box
        self.path(f"M{left} {top}V{bottom}H{right}", "axis")
        self.text((left + right) / 2, bottom + 36, x_label)
        middle = (top + bottom) // 2
        self.text(14, middle, y_label, more=f' transform="rotate(-90 14 {middle})"')

    def svg(self) -> str:
        """The whole file."""
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        body = "\n".join(self.parts)
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>\n{body}\n</svg>\n'


def run_over(shards: int, per_shard: int, batch_size: int, *, nodes: int, window: int) -> RunOrder:
    """The order of a training run over equal shards."""
    config = OrderConfig.resolve(batch_size=batch_size, shuffle=True, seed=7, canonical_nodes=nodes, window=window)
    return RunOrder(Snapshot.of([[per_shard] * shards]), (StreamWeights(),), config)


def shares(run: RunOrder, k: int, ranks: int) -> list[list[int]]:
    """The sample ids of global batch `k` on each of `ranks` ranks."""
    worlds = [World(rank, ranks, ranks) for rank in range(ranks)]
    plans = [BatchPlan(run.epoch(0), batch_size=8, world=world, tail="pad") for world in worlds]
    return [list(plan.share(k).ids) for plan in plans]


def draw_worlds() -> Drawing:
    """The same global batches over one, two and four ranks."""
    run = run_over(8, 8, 8, nodes=4, window=2)
    drawing = Drawing(760, 172)
    for k in range(4):
        drawing.text(76, 57 + 32 * k, f"batch {k}", anchor="end")
    for panel, ranks in enumerate((1, 2, 4)):
        left = 86 + 226 * panel
        drawing.text(left + 104, 24, f"{ranks} rank{'s' if ranks > 1 else ''}")
        for k in range(4):
            cells = [(rank, sample) for rank, ids in enumerate(shares(run, k, ranks)) for sample in ids]
            for i, (rank, sample) in enumerate(cells):
                drawing.rect(left + 26 * i, 38 + 32 * k, 25, 29, "abcd"[rank])
                drawing.text(left + 26 * i + 12.5, 57 + 32 * k, str(sample), kind="n")
    return drawing


def draw_resume() -> Drawing:
    """A training run on four ranks that stops after its third step and continues on two."""
    run = run_over(8, 8, 8, nodes=4, window=2)
    drawing = Drawing(760, 274)
    drawing.text(368, 20, "4 ranks", anchor="end")
    drawing.text(392, 20, "2 ranks, resumed at sample 24", anchor="start")
    drawing.path("M380 8V248", "ink", 1.5, ' stroke-dasharray="5 4"')
    for k in range(7):
        left = 66 + 90 * k + (16 if k < 3 else 66)
        cells = [(rank, sample) for rank, ids in enumerate(shares(run, k, 4 if k < 3 else 2)) for sample in ids]
        for i, (rank, sample) in enumerate(cells):
            drawing.rect(left, 32 + 25 * i, 60, 23, "abcd"[rank])
            drawing.text(left + 30, 48 + 25 * i, str(sample), kind="n")
        drawing.text(left + 30, 250, f"step {k + 1}")
    drawing.text(380, 270, "each color is a rank; the numbers are sample ids", kind="n")
    return drawing


def draw_window() -> Drawing:
    """Which shards each position of an epoch comes from, as the window rolls over the shards."""
    run = run_over(24, 40, 16, nodes=2, window=3)
    order = run.epoch(0)
    shards = run.snapshot.shards_of(order.ids(0, run.num_samples))
    nodes = order.canonical(0, run.num_samples)
    _, first, inverse = np.unique(shards, return_index=True, return_inverse=True)
    rows = np.argsort(np.argsort(first))[inverse]
    drawing = Drawing(760, 360)
    drawing.axes((50, 14, 746, 316), "position in the epoch", "shard, by first use")
    for node in range(2):
        points = [f"M{54 + 0.72 * at:g} {306 - 12 * int(rows[at])}h0" for at in np.flatnonzero(nodes == node)]
        drawing.path("".join(points), "ab"[node], 4, ' stroke-linecap="round"')
        drawing.rect(70, 22 + 20 * node, 10, 10, "ab"[node])
        drawing.text(86, 32 + 20 * node, f"canonical node {node}", anchor="start")
    return drawing


def draw_cache() -> Drawing:
    """From when to when each shard is needed: what the cache must hold."""
    run = run_over(40, 60, 16, nodes=2, window=4)
    shards = run.snapshot.shards_of(run.epoch(0).ids(0, run.num_samples))
    spans = sorted((int(at[0]), int(at[-1])) for at in (np.flatnonzero(shards == one) for one in range(40)))
    drawing = Drawing(760, 380)
    drawing.path("M50 10V222", "axis")
    drawing.text(14, 116, "shards in use", more=' transform="rotate(-90 14 116)"')
    scale = 690 / run.num_samples
    lines = [
        f"M{52 + scale * begin:.0f} {220 - 5.3 * row:.0f}H{52 + scale * end:.0f}"
        for row, (begin, end) in enumerate(spans)
    ]
    drawing.path("".join(lines), "a", 3)
    changes = np.zeros(run.num_samples + 1, np.int64)
    for begin, end in spans:
        changes[[begin, end + 1]] += (1, -1)
    edges = np.flatnonzero(changes)
    counts = np.cumsum(changes)[edges]
    for begin, end, count in zip(edges[:-1], edges[1:], counts, strict=False):
        drawing.rect(
            round(52 + scale * begin, 1), 336 - 8 * int(count), round(scale * (end - begin), 1), 8 * int(count), "a"
        )
    drawing.axes((50, 246, 746, 336), "position in the epoch", "at once")
    drawing.text(46, 340, "0", anchor="end", kind="n")
    drawing.text(46, 340 - 8 * int(counts.max()), str(counts.max()), anchor="end", kind="n")
    return drawing


def draw_quality() -> Drawing:
    """How well settings of the window mix rows that are sorted on disk."""
    found = [measure(run_over(400, 600, 256, nodes=16, window=one), batch_size=256) for one in (1, 2, 4, 8, 16, 25)]
    drawing = Drawing(760, 320)
    drawing.axes((50, 14, 746, 276), "open shards, of 400 (the cache holds as many)", "blocks of 100 in a batch")
    for share in (0, 50, 100):
        drawing.text(46, 280 - 2.5 * share, str(share), anchor="end", kind="n")
    random = 276 - 2.5 * found[0].random
    drawing.path(f"M50 {random:.1f}H746", "axis", 1, ' stroke-dasharray="5 4"')
    drawing.text(746, round(random - 6, 1), "a random order", anchor="end")
    for name, more in (("mean", ""), ("first", ' stroke-dasharray="2 4"')):
        points = [(50 + 1.65 * one.active_shards, 276 - 2.5 * getattr(one, name)) for one in found]
        drawing.path("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points), "a", 2, more)
        drawing.path("".join(f"M{x:.1f} {y:.1f}h0" for x, y in points), "a", 7, ' stroke-linecap="round"')
    for one in found:
        drawing.text(50 + 1.65 * one.active_shards, 292, str(one.active_shards), kind="n")
    drawing.text(740, 240, "solid: middle of the epoch", anchor="end")
    drawing.text(740, 258, "dotted: its first sixteenth", anchor="end")
    return drawing


def draw_packing() -> Drawing:
    """Documents of a window in their order, and the rows that they are packed into."""
    lengths = (np.random.default_rng(4).lognormal(3.1, 0.8, 22)).astype(np.int64).clip(4, 90)
    row_length = 64
    unit = 6
    rows = PackedWindow(np.arange(len(lengths)), lengths, RowPacking(row_length)).rows()
    drawing = Drawing(760, 74 + 20 * len(rows) + 26)
    drawing.text(10, 18, "22 documents, in the order of the epoch; their widths are their tokens", anchor="start")
    scale = 720 / lengths.sum()
    at = 10.0
    for number, length in enumerate(lengths.tolist()):
        drawing.rect(at, 26, length * scale - 1, 18, "abcd"[number % 4])
        at += length * scale
    drawing.text(10, 66, f"{len(rows)} rows of {row_length} tokens", anchor="start")
    for row in range(len(rows)):
        left = 180
        top = 74 + 20 * row
        drawing.path(f"M{left} {top}h{row_length * unit}v16h-{row_length * unit}z", "axis")
        for span in range(rows.edges[row], rows.edges[row + 1]):
            number = int(rows.ids[span])
            width = int(rows.num_tokens[span]) * unit
            drawing.rect(left, top, width - 1, 16, "abcd"[number % 4])
            drawing.text(left + width / 2, top + 12, str(number), kind="n")
            left += width
    drawing.text(180 + row_length * unit / 2, 74 + 20 * len(rows) + 16, "tokens of a row; the empty ends are padding")
    return drawing


DRAWINGS = {
    "packing": draw_packing,
    "window": draw_window,
    "worlds": draw_worlds,
    "resume": draw_resume,
    "cache": draw_cache,
    "quality": draw_quality,
}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        (Path(sys.argv[1]) / f"{name}.svg").write_text(draw().svg())
