"""A picture of a chain of runs over the uninterrupted one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from lightning_stream.errors import missing_extra
from lightning_stream.recipes.loss_curve import Link, Record, compare

_INK, _PALE, _LINE = "#22222a", "#b8bcc8", "#8a8f9c"
_COLOURS = ("#1f6fb4", "#c2571a", "#2f8f4e", "#8a4fb0", "#b23a5e", "#6b6b1e")


def draw_curves(path: Path, title: str, whole: Record, chain: Sequence[Link]) -> Path:
    """Draw the losses of both by step, the changes of the world, and below how far apart the losses are.

    Args:
        path: A PNG, SVG or PDF.
        title: What was trained.
        whole: The run that was never stopped.
        chain: The runs that were.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_extra("matplotlib", "recipes", "the picture of the loss curves") from error
    found = compare(whole, chain)
    figure = Figure(figsize=(10, 6), dpi=130, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    above.plot(list(whole), [step.loss for step in whole.values()], color=_PALE, linewidth=5, label="never stopped")
    for number, link in enumerate(chain):
        colour = _COLOURS[number % len(_COLOURS)]
        above.plot(
            list(link.record), [step.loss for step in link.record.values()], color=colour, linewidth=1.4,
            label=f"{number + 1}. {link.name}",
        )  # fmt: skip
        steps = [n for n in link.record if n in found.differences]
        # a logarithm has no place for zero: what is equal bit for bit lies on the floor
        below.plot(steps, [max(found.differences[n], 1e-9) for n in steps], color=colour, marker=".", linewidth=0.8)
    _mark_changes((above, below), chain)
    told = "the samples of every step are equal" if found.exact else f"{len(found.wrong)} steps have other samples"
    above.set_title(f"{title}: {told}", loc="left", color=_INK, fontsize=12)
    above.set_ylabel("loss of the step")
    above.legend(frameon=False, loc="best", fontsize=9)
    below.set_yscale("log")
    below.set_ylim(5e-10, max(1e-2, 3 * max(found.differences.values(), default=0.0)))
    below.set_ylabel("difference\n(bottom: none)")
    below.set_xlabel("optimizer step")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e8ee", linewidth=0.8)
        axes.set_axisbelow(True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def _mark_changes(panels: Sequence[Any], chain: Sequence[Link]) -> None:
    """A line where one run ends and the next, in another world, goes on."""
    for before, after in pairwise(chain):
        if not before.record or not after.record:
            continue
        for axes in panels:
            axes.axvline(max(before.record) + 0.5, color=_LINE, linestyle=(0, (4, 3)), linewidth=1)
        panels[0].annotate(
            f"{before.devices} → {after.devices}", (max(before.record) + 0.5, 1.0), xycoords=("data", "axes fraction"),
            xytext=(4, -12), textcoords="offset points", color=_INK, fontsize=10,
        )  # fmt: skip
