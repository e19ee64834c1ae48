"""The drawings of the concepts page, made from the order itself whenever the site is built.

`on_pre_build` is MkDocs' hook; ``python docs/drawings.py FOLDER`` makes the drawings alone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lightning_stream.order import BatchPlan, OrderConfig, RunOrder, Snapshot, StreamWeights, World
from lightning_stream.order.quality import measure

INK, FAINT = "#3a3f58", "#9aa0b5"
NODES = ("#5b6ee1", "#e0793b", "#2f9e77", "#b8478f")
mpl.rcParams |= {
    "svg.hashsalt": "lightning-stream",  # the same drawing is the same file
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def run_over(
    shards: int, per_shard: int, batch_size: int, *, nodes: int, window: int | None, shuffle: bool = True
) -> RunOrder:
    """The order of a run over equal shards."""
    config = OrderConfig.resolve(batch_size=batch_size, shuffle=shuffle, seed=7, canonical_nodes=nodes, window=window)
    return RunOrder(Snapshot.of([[per_shard] * shards]), (StreamWeights(),), config)


def draw_window() -> Figure:
    """Which shards each position of an epoch comes from, as the window rolls on."""
    run = run_over(24, 40, 16, nodes=2, window=3)
    order = run.epoch(0)
    ids = order.ids(0, run.num_samples)
    positions, nodes = np.arange(run.num_samples), order.canonical(0, run.num_samples)
    figure, axes = plt.subplots(figsize=(7.6, 3.6))
    rows = first_use_rows(run.snapshot.shards_of(ids))
    for node in range(2):
        own = nodes == node
        axes.scatter(positions[own], rows[own], s=7, color=NODES[node], lw=0, label=f"canonical node {node}")
    axes.set_xlabel("position in the epoch")
    axes.set_ylabel("shard, by first use")
    axes.legend(frameon=False, loc="upper left", markerscale=2)
    return figure


def first_use_rows(shards: np.ndarray) -> np.ndarray:
    """For each entry, the rank of its shard in order of first use."""
    _, first, inverse = np.unique(shards, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse]


def draw_worlds() -> Figure:
    """The same global batches over one, two and four ranks."""
    run = run_over(8, 8, 8, nodes=4, window=2)
    figure, panels = plt.subplots(1, 3, figsize=(7.6, 3.2), sharey=True)
    for axes, ranks in zip(panels, (1, 2, 4), strict=True):
        for rank in range(ranks):
            plan = BatchPlan(run.epoch(0), batch_size=8, world=World(rank, ranks, ranks), tail="pad")
            for k in range(4):
                share = plan.share(k).ids
                for place, sample in enumerate(share):
                    cell(axes, rank * len(share) + place, k, str(sample), NODES[rank])
        axes.set_title(f"{ranks} rank{'s' if ranks > 1 else ''}", fontsize=10, color=INK)
        frame(axes, 8, 3.6, -0.6)
    panels[0].set_ylabel("global batch")
    panels[0].set_yticks(range(4))
    return figure


def draw_resume() -> Figure:
    """A run on four ranks that stops after its third step and goes on with two."""
    run = run_over(8, 8, 8, nodes=4, window=2)
    figure, axes = plt.subplots(figsize=(7.6, 2.6))
    for k in range(7):
        ranks = 4 if k < 3 else 2
        for rank in range(ranks):
            world = World(rank, ranks, ranks)
            start = 0 if k < 3 else 3 * 8
            plan = BatchPlan(run.epoch(0), batch_size=8, world=world, tail="pad", start=start)
            share = plan.share(k if k < 3 else k - 3).ids
            for place, sample in enumerate(share):
                cell(axes, k * 1.0, 7 - (rank * len(share) + place), str(sample), NODES[rank])
    axes.axvline(2.5, color=INK, lw=1.2, ls="--")
    axes.text(2.44, 8.0, "4 ranks", ha="right", va="bottom", fontsize=9)
    axes.text(2.56, 8.0, "2 ranks, position 24", ha="left", va="bottom", fontsize=9)
    frame(axes, 7, -0.6, 8.6)
    axes.set_xticks(range(7))
    axes.set_xlabel("optimizer step")
    return figure


def cell(axes: Axes, x: float, y: float, text: str, color: str) -> None:
    """One sample in its square."""
    axes.add_patch(Rectangle((x - 0.47, y - 0.44), 0.94, 0.88, facecolor=color, alpha=0.22, lw=0))
    axes.text(x, y, text, ha="center", va="center", fontsize=7.5)


def frame(axes: Axes, width: int, low: float, high: float) -> None:
    """Room for columns of cells between two heights, without scales."""
    axes.set(xlim=(-0.6, width - 0.4), ylim=(low, high), xticks=[], yticks=[])
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)


def draw_cache() -> Figure:
    """From when to when each shard is needed: what the cache must hold."""
    run = run_over(40, 60, 16, nodes=2, window=4)
    shards = run.snapshot.shards_of(run.epoch(0).ids(0, run.num_samples))
    spans = sorted((int(at[0]), int(at[-1])) for at in (np.flatnonzero(shards == one) for one in range(40)))
    figure, (above, below) = plt.subplots(2, 1, figsize=(7.6, 3.8), sharex=True, height_ratios=(2.2, 1))
    for row, (first, last) in enumerate(spans):
        above.plot([first, last], [row, row], color=NODES[0], lw=2.4, solid_capstyle="butt")
    changes = np.zeros(run.num_samples + 1, np.int64)
    for first, last in spans:
        changes[[first, last + 1]] += (1, -1)
    edges = np.flatnonzero(changes)
    below.stairs(np.cumsum(changes)[edges[:-1]], edges, fill=True, color=NODES[0], alpha=0.3)
    above.set_ylabel("shards in use")
    below.set_ylabel("at once")
    below.set_ylim(0)
    below.set_xlabel("position in the epoch")
    return figure


def draw_quality() -> Figure:
    """How well settings of the window mix rows that lie sorted on disk."""
    windows = (1, 2, 4, 8, 16, 25)
    found = [measure(run_over(400, 600, 256, nodes=16, window=window), batch_size=256) for window in windows]
    figure, axes = plt.subplots(figsize=(7.6, 3.0))
    active = [one.active_shards for one in found]
    axes.plot(active, [one.mean for one in found], "o-", color=NODES[0], label="window, middle of the epoch")
    axes.plot(active, [one.first for one in found], "o:", color=NODES[0], alpha=0.6, label="first sixteenth")
    axes.axhline(found[0].random, color=FAINT, ls="--", lw=1)
    axes.text(active[-1], found[0].random + 1, "a truly random order", ha="right", va="bottom", fontsize=9)
    axes.set_ylim(0, 100)
    axes.set_xlabel("active shards, of 400 (cache: that many)")
    axes.set_ylabel("blocks of 100 in a batch")
    axes.legend(frameon=False, loc="lower right")
    return figure


DRAWINGS = {
    "window": draw_window,
    "worlds": draw_worlds,
    "resume": draw_resume,
    "cache": draw_cache,
    "quality": draw_quality,
}


def draw_all(folder: Path) -> None:
    """Write every drawing as SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWINGS.items():
        figure = draw()
        figure.savefig(folder / f"{name}.svg", bbox_inches="tight", transparent=True, metadata={"Date": None})
        plt.close(figure)


def on_pre_build(config: Any) -> None:
    """MkDocs calls this before it reads the pages."""
    draw_all(Path(config["docs_dir"]) / "drawings")


if __name__ == "__main__":
    draw_all(Path(sys.argv[1]))
