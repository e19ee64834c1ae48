"""What the page of a simulation shows: one number of nodes in detail, and the others as curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from lightning_stream.order.chain import readable
from lightning_stream.pages import Section, chart, figures, table, text
from lightning_stream.simulation.result import Simulated

_OF_CURVE = (
    "num_nodes", "samples_per_s", "needed_samples_per_s", "wait_share", "first_batch_s", "resume_s", "epoch_s",
    "download_bytes", "busiest_node_bytes", "cache_needed_bytes", "cache_peak_bytes", "price_usd",
)  # fmt: skip


def sections_of(
    found: Simulated, curve: Sequence[Simulated], chain: str, quality: Mapping[str, Any] | None = None
) -> tuple[list[Section], dict[str, list[float | None]]]:
    """The sections of the page, and the columns of its plots.

    Args:
        found: The training run, with its timeline.
        curve: The same over other numbers of nodes, ascending.
        chain: The settings in words.
        quality: The fields of the shuffle's `Quality`, if it was measured.
    """
    columns = {name: [getattr(one, name) for one in curve] for name in _OF_CURVE}
    settings = text("Settings", f"{_assumed(found)}\n\n{chain}", code=True)
    sections: list[Section] = [text("What limits it", found.finding)]
    if found.problem is not None:  # then the other numbers are those of a run that does not start
        return [*sections, settings], columns
    sections.append(_figures(found, quality or {}))
    if found.timeline is not None and found.timeline.seconds:
        columns |= {f"timeline_{name}": list(values) for name, values in vars(found.timeline).items()}
        sections += _timeline(has_steps=found.needed_samples_per_s is not None)
    if curve:
        sections += _curves(found)
    if found.gains:
        rows = [[name.replace("_", " "), f"{gain:.2f} times as fast"] for name, gain in found.gains.items()]
        sections.append(table("Without this limit", ["limit", "the run would be"], rows))
    if curve:
        head, *rows = curve_table(curve)
        sections.append(table("Nodes", head, rows))
    return [*sections, settings], columns


def _figures(found: Simulated, quality: Mapping[str, Any]) -> Section:
    shown = {
        "to the first batch": duration(found.first_batch_s),
        "samples per second": f"{found.samples_per_s:,.0f}",
        "of the time waiting for data": f"{found.wait_share:.1%}",
        "for an epoch": duration(found.epoch_s),
        "downloaded in an epoch": readable(found.download_bytes),
        "downloads of each byte": f"{found.download_factor:.2f}",
        "requests in an epoch": f"{found.num_requests:,}",
        "of cache needed on a node": readable(found.cache_needed_bytes),
        "shards fetched again": f"{found.fetched_again:,}",
    }
    if found.needed_samples_per_s is not None:
        shown["samples per second that training needs"] = f"{found.needed_samples_per_s:,.0f}"
    if found.resume_s is not None:
        shown["to the first batch of a resumed run"] = duration(found.resume_s)
    if found.price_usd is not None:
        shown["for the downloads of an epoch"] = f"${found.price_usd:,.2f}"
    if quality:
        shown[f"shuffle quality (at random: {quality['random']:.0f})"] = f"{quality['mean']:.0f}"
    return figures(shown)


def _timeline(*, has_steps: bool) -> list[Section]:
    options: dict[str, Any] = {"x_unit": "seconds"}
    samples, note = {"ready": "timeline_ready", "trained": "timeline_trained"}, ""
    if has_steps:
        samples = {"ready": "timeline_ready", "needed": "timeline_needed", "trained": "timeline_trained"}
        note = "Training waits where the samples that are needed are above those that are ready."
    return [
        chart("Samples over time", "timeline_seconds", samples, **options, note=note),
        chart("Fetched by a node", "timeline_seconds", {"bytes": "timeline_fetched_bytes"}, **options, y_unit="bytes"),
    ]


def _curves(found: Simulated) -> list[Section]:
    x: dict[str, Any] = {"log": True, "note": "over the number of nodes"}
    rates = {"with this data": "samples_per_s"}
    rates |= {"needed by training": "needed_samples_per_s"} if found.needed_samples_per_s is not None else {}
    starts = {"new": "first_batch_s", "resumed": "resume_s"}
    sizes = {"all nodes": "download_bytes", "the busiest node": "busiest_node_bytes"}
    cache = {"in use": "cache_needed_bytes", "held at most": "cache_peak_bytes"}
    charts = [
        chart("Samples per second", "num_nodes", rates, **x),
        chart("Time spent waiting for data", "num_nodes", {"waiting": "wait_share"}, **x, y_unit="share", top=0.01),
        chart("Time to the first batch", "num_nodes", starts, **x, y_unit="seconds"),
        chart("Downloaded in an epoch", "num_nodes", sizes, **x, y_unit="bytes"),
        chart("Cache of a node", "num_nodes", cache, **x, y_unit="bytes"),
    ]
    if found.price_usd is not None:
        charts.append(
            chart("Price of an epoch's downloads", "num_nodes", {"price": "price_usd"}, **x, y_unit="dollars")
        )
    return charts


def curve_table(curve: Sequence[Simulated]) -> list[list[str]]:
    """A row of names, and one of texts for each number of nodes; prices only where they are known."""
    has_price = any(one.price_usd is not None for one in curve)
    rows = [["nodes", "first batch", "resumed", "samples/s", "waiting", "epoch", "downloads", "price", "limited by"]]
    for one in curve:
        resumed = "" if one.resume_s is None else duration(one.resume_s)
        row = [f"{one.num_nodes:,}", duration(one.first_batch_s), resumed, f"{one.samples_per_s:,.0f}"]
        row += [f"{one.wait_share:.0%}", duration(one.epoch_s), readable(one.download_bytes)]
        rows.append([*row, f"${one.price_usd or 0:,.2f}", one.limited_by.replace("_", " ")])
    return [row if has_price else [*row[:-2], row[-1]] for row in rows]


def _assumed(found: Simulated) -> str:
    """All assumptions, one a line."""
    parts: list[Any] = [part for part in vars(found.machine).values() if part is not None]
    lines = [f"global_batch_size={found.global_batch_size}, {found.num_nodes} nodes"]
    for part in parts:
        values = ", ".join(f"{one.name}={getattr(part, one.name)}" for one in fields(part))
        lines.append(f"{type(part).__name__.lower():<7} {values}")
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """Seconds in the unit that fits them, e.g. ``2.5 min``."""
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min"), (1, "s")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.2f} s"
