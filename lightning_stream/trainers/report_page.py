"""What the report of a run shows: figures, plots and tables, from the rows that `RunReport` keeps."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_stream.loading.meter import PARTS
from lightning_stream.order.chain import readable
from lightning_stream.pages import Section, chart, drawn_page, figures, table, text

Columns = Mapping[str, Sequence[float]]
_X: dict[str, Any] = {"x_unit": "seconds", "intervals": True}


def page_of(kept: Mapping[str, Any], rows: Columns) -> str:
    """The page of a run.

    Args:
        kept: What a resumed run needs beside the rows: launches, messages, bad samples and settings.
        rows: The columns of the rows.
    """
    columns = _with_computed(rows)
    latest = kept["launches"][-1]
    sections = [_outcome(kept), _figures(rows), *(_plots(kept, columns) if columns["end_s"] else [])]
    sections += [_launches(kept["launches"]), *_messages(kept["messages"]), *_bad(kept["bad"], rows)]
    sections += [text("Settings", kept["settings"], code=True)]
    about = f"Last written {latest['written']}. Drag over a plot to zoom in; double-click to see all of it."
    hover = {"end_s": [["epoch", "epoch"], ["sample", "position"], ["step", "step"]]}
    return drawn_page(f"{kept['name']}: data of a training run", about, sections, columns, kept=kept, hover=hover)


def _with_computed(rows: Columns) -> dict[str, Sequence[float]]:
    """The columns with those that the plots need beside; their names begin with ``=``."""
    found = {"end_s": [], **rows}
    if not found["end_s"]:
        return found
    starts = [0, *found["end_s"][:-1]]
    found["=trained_s"] = [a + b for a, b in zip(rows["compute_s"], rows["wait_s"], strict=True)]
    found["=took_s"] = [end - start for start, end in zip(starts, found["end_s"], strict=True)]
    opened = zip(rows["shards_here"], rows["shards_fetched"], strict=True)
    found["=opened"] = [here + fetched for here, fetched in opened]
    streams = [rows[name] for name in rows if name.startswith("stream:")]
    found["=drawn"] = [sum(row) for row in zip(*streams, strict=True)] if streams else []
    return found


def _total(rows: Columns, name: str) -> float:
    return sum(rows.get(name, ()))


def _figures(rows: Columns) -> Section:
    trained_s = _total(rows, "compute_s") + _total(rows, "wait_s")
    opened = _total(rows, "shards_here") + _total(rows, "shards_fetched")
    shown = {
        "of the time waited for data": f"{_total(rows, 'wait_s') / trained_s:.1%}" if trained_s else "-",
        "samples per second": f"{_total(rows, 'samples') / trained_s:,.0f}" if trained_s else "-",
        "samples handed out": f"{_total(rows, 'samples'):,.0f}",
        "downloaded": readable(int(_total(rows, "fetched_bytes"))),
        "of the shards were in the cache": f"{_total(rows, 'shards_here') / opened:.0%}" if opened else "-",
        "requests were sent again": f"{_total(rows, 'retries'):,.0f}",
        "bad samples": f"{_total(rows, 'bad_samples'):,.0f}",
    }
    if tokens := _total(rows, "tokens"):
        shown["tokens"] = f"{tokens:,.0f}"
    return figures(shown)


def _outcome(kept: Mapping[str, Any]) -> Section:
    """How the run ended, what was lost or repeated, and the verdict."""
    latest = kept["launches"][-1]
    ended = latest.get("ended")
    if ended is None:
        title, lines = "Training, or killed", [f"This page was written while it trained, at {latest['written']}."]
    else:
        title, lines = ("Training has finished", []) if ended == "finished" else ("Training stopped", [ended])
    if latest.get("last_row_ranks", 1) < latest["measured_ranks"]:
        lines.append("The plots lack what the other ranks measured since the row before the last one.")
    if latest["measured_ranks"] < latest["ranks"]:
        lines.append(f"Measured in the first of {latest['ranks']} processes.")
    lines.append(_delivered(kept["launches"]))
    lines += [latest.get("ledger", ""), latest.get("verdict", "")]
    return text(title, "\n".join(line for line in lines if line))


def _delivered(launches: Sequence[Mapping[str, Any]]) -> str:
    if not all(one["checks"] and "lost" in one for one in launches):
        return ""
    (epoch, position), (end, end_position) = launches[0]["from"], launches[-1]["to"]
    counts = f"{sum(one['lost'] for one in launches):,} lost, {sum(one['repeated'] for one in launches):,} repeated"
    if position == end_position == 0 and end > epoch:
        return f"Trained on {f'epochs {epoch}-{end - 1}' if end > epoch + 1 else f'epoch {epoch}'}: {counts}"
    return f"Trained from epoch {epoch}, sample {position:,}, to epoch {end}, sample {end_position:,}: {counts}"


def _plots(kept: Mapping[str, Any], columns: Columns) -> list[Section]:
    later = kept["launches"][1:]
    options: dict[str, Any] = {**_X, "marks": [[one["at_s"], "resumed"] for one in later]}
    waits: dict[str, str | tuple[str, str]] = {part: (f"{part}_s", "=trained_s") for part in PARTS}
    found = [
        chart("Samples per second", "end_s", {"samples": ("samples", "=trained_s")}, **options),
        chart("Time spent waiting for data", "end_s", waits, **options, stacked=True, y_unit="share", top=0.01),
        chart("Position in the epoch", "end_s", {"sample": "position"}, **{**options, "intervals": False}),
    ]
    if _total(columns, "fetched_bytes"):
        rate = {"downloads": ("fetched_bytes", "=took_s")}
        found.append(chart("Downloads", "end_s", rate, **options, y_unit="bytes/s"))
    if _total(columns, "=opened"):
        cache: dict[str, str | tuple[str, str]] = {
            "in the cache already": "shards_here", "fetched": "shards_fetched", "fetched again": "shards_fetched_again",
            "evicted": "evictions",
        }  # fmt: skip
        found.append(chart("Shards", "end_s", cache, **options))
    streams = [name for name in columns if name.startswith("stream:")]
    if streams:
        same = os.path.commonprefix([name.rstrip("/") for name in streams]).rfind("/") + 1 or len("stream:")  # noqa: RUF071
        mixture: dict[str, str | tuple[str, str]] = {name[same:]: (name, "=drawn") for name in streams}
        found.insert(2, chart("Mixture", "end_s", mixture, **options, stacked=True, y_unit="share", top=1))
    if _total(columns, "retries") or _total(columns, "bad_samples"):
        trouble: dict[str, str | tuple[str, str]] = {
            "requests sent again": "retries", "of these throttled": "throttled", "bad samples": "bad_samples"
        }  # fmt: skip
        found.append(chart("Failures", "end_s", trouble, **options))
    return found


def _launches(launches: Sequence[Mapping[str, Any]]) -> Section:
    def place(at: Sequence[int]) -> str:
        return f"epoch {at[0]}, sample {at[1]:,}"

    head = ["began", "from", "to", "ranks", "nodes", "lost", "repeated", "ended"]
    rows = [
        [one["began"], place(one["from"]), place(one["to"]), one["ranks"], one["nodes"], one.get("lost"),
         one.get("repeated"), one.get("ended", "no end was written")]
        for one in launches
    ]  # fmt: skip
    return table("Launches", head, rows)


def _messages(messages: Sequence[Sequence[Any]]) -> list[Section]:
    rows = [[f"{at_s:,.0f} s", f"{step:,}", sentence] for at_s, step, sentence in messages]
    return [table("Messages", ["time", "step", "message"], rows)] if rows else []


def _bad(bad: Sequence[Mapping[str, Any]], rows: Columns) -> list[Section]:
    if not bad:
        return []
    names = ["sample", "stream", "shard", "epoch", "position", "delivered", "reason"]
    whole = max(len(bad), int(_total(rows, "bad_samples")))
    title = "Bad samples" if whole == len(bad) else f"Bad samples: {len(bad):,} of about {whole:,}"
    return [table(title, names, [[one.get(name) for name in names] for one in bad])]
