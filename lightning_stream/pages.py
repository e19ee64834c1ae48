"""Pages of HTML that need no other file and no network: the page of a run, and the frame of other pages.

Plots are drawn here, as SVG: the script only shows the values below the pointer. Every text of the data is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_stream.formats.encodings.images import pillow, rgb
from lightning_stream.formats.encodings.jpeg import FORMATS
from lightning_stream.formats.encodings.media import Media, measured
from lightning_stream.loading.meter import PARTS
from lightning_stream.loading.stats import INPUT_BOUND, PAUSE_LABELS, LoaderStats, percent
from lightning_stream.order.chain import readable
from lightning_stream.run_log import LaunchStart, Place, Row, Run, page_of, read_run
from lightning_stream.shared_files import Modes, make_folder, publish_bytes

_MODES = Modes(0o644, 0o755)  # a page is for others to look at
_IMAGES = (b"\xff\xd8", b"\x89PNG", b"GIF8", b"RIFF")
_SOUNDS = {b"ID3": "mpeg", b"\xff\xfb": "mpeg", b"fLaC": "flac", b"OggS": "ogg", b"RIFF": "wav"}
_MOST_SOUND_BYTES = 4 << 20
_THUMB = (320, 320)  # pixels
_CHARACTERS_ON_PAGE = 600
_MOST_POINTS, _LEAST_POINT_S = 240, 0.2
_SMALL = 0.01  # of the time: kinds of waiting with less are shown together
_LEAST_SHARE = 0.0005  # of the time: less is shown as 0.0%
_TIMES = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_FIRST, _OTHER = "first batches", "other stages"
_KINDS = ("training", _FIRST, *PARTS, _OTHER, *PAUSE_LABELS)
_COLORS = {name: f"var(--c{number})" for number, name in enumerate(_KINDS)}
_SERIES = [f"var(--c{number})" for number in (0, 4, 3, 5, 2, 6, 7, 8, 11, 9, 10)]
_TROUBLES = {
    "retries": "requests sent again", "bad_samples": "bad samples", "evictions": "shards evicted",
    "shards_fetched_again": "shards fetched again",
}  # fmt: skip
Numbers = NDArray[np.float64]
_STYLE = """
:root {
  color-scheme: light dark; --back: #f6f7f9; --paper: #fff; --ink: #16202e; --faint: #667085; --line: #e3e7ee;
  --c0: #2f6fed; --c1: #94a3b8; --c2: #7c5cd6; --c3: #0e9f9a; --c4: #e08a00; --c5: #d6457f; --c6: #5b9b2b;
  --c7: #c2410c; --c8: #a16207; --c9: #64748b; --c10: #b91c1c; --c11: #166534;
  --good: #16a34a; --fair: #e08a00; --bad: #dc2626;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #0f141b; --paper: #171e28; --ink: #e6eaf0; --faint: #95a1b2; --line: #2a3442;
    --c0: #6b9bff; --c1: #7d8a9c; --c2: #a68cf2; --c3: #2cc4be; --c4: #f5b041; --c5: #f178a8; --c6: #8fcf5a;
    --c7: #f08a5d; --c8: #d6a84b; --c9: #a3acb9; --c10: #ff9d9d; --c11: #7fd6a0;
    --good: #34c468; --fair: #f5b041; --bad: #f26d6d;
  }
}
* { box-sizing: border-box; }
[hidden] { display: none !important; }
body {
  background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif;
  margin: 0 auto; max-width: 1280px; padding: 1.2rem 1rem 3rem;
}
h1 { font-size: 1.35rem; line-height: 1.3; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: .95rem; font-weight: 600; margin: 0 0 .5rem; }
p { margin: .25rem 0 0; overflow-wrap: anywhere; }
.about { color: var(--faint); font-size: .9rem; margin: .15rem 0 1rem; }
main, .plots { display: flex; flex-wrap: wrap; gap: .8rem; }
main > * { flex: 1 1 100%; }
section, details {
  background: var(--paper); border: 1px solid var(--line); border-radius: 10px; min-width: 0; padding: .9rem 1rem;
}
.end { border-left: 5px solid var(--fair); }
.end.good { border-left-color: var(--good); }
.end.bad { border-left-color: var(--bad); }
.tiles { display: grid; gap: 1rem 1.5rem; grid-template-columns: repeat(auto-fit, minmax(145px, 1fr)); }
.tiles b { display: block; font-size: 1.5rem; font-weight: 650; letter-spacing: -.01em; line-height: 1.25; }
.tiles span, .legend, .xs, .ys, .tip, .note { color: var(--faint); font-size: .82rem; }
.bar { border-radius: 6px; display: flex; gap: 1px; height: 22px; margin-bottom: .6rem; overflow: hidden; }
.bar i { min-width: 2px; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; margin-bottom: .4rem; }
.legend span { overflow-wrap: anywhere; }
.legend i, .tip i { border-radius: 3px; display: inline-block; height: .7em; margin-right: .4em; width: .7em; }
.plots > section { display: flex; flex: 1 1 max(320px, 40%); flex-direction: column; }
.frame { display: grid; margin-top: auto; grid-template-columns: 4.2rem minmax(0, 1fr); padding-right: .4rem; }
.box { cursor: crosshair; height: 170px; position: relative; touch-action: pan-y; }
.box svg { display: block; height: 100%; overflow: visible; width: 100%; }
.box path { fill: none; stroke-width: 1.8; vector-effect: non-scaling-stroke; }
.box .area { fill-opacity: .85; stroke: none; }
.box .grid { stroke: var(--line); stroke-width: 1; }
.box .mark { stroke: var(--faint); stroke-dasharray: 4 4; stroke-width: 1; }
.ys, .xs { font-variant-numeric: tabular-nums; position: relative; }
.ys span { position: absolute; right: .5rem; transform: translateY(50%); white-space: nowrap; }
.xs { grid-column: 2; height: 1.3rem; }
.xs span { position: absolute; top: .15rem; transform: translateX(-50%); white-space: nowrap; }
.xs .last { transform: translateX(-100%); }
.box .label {
  background: var(--paper); color: var(--faint); font-size: .75rem; padding: 0 .2rem; position: absolute; top: 0;
}
.cursor { border-left: 1px solid var(--faint); height: 100%; pointer-events: none; position: absolute; top: 0; }
.tip {
  background: var(--paper); border: 1px solid var(--line); border-radius: 8px; box-shadow: 0 4px 14px #0003;
  color: var(--ink); max-width: 100%; padding: .4rem .6rem; pointer-events: none; position: absolute; top: 0;
  width: max-content; z-index: 1;
}
.tip b { font-weight: 600; }
.scrolls { max-height: 24rem; overflow: auto; }
table { border-collapse: collapse; font-size: .85rem; min-width: 100%; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem 1rem .3rem 0; text-align: left; vertical-align: top; }
th { color: var(--faint); font-weight: 500; white-space: nowrap; }
td { max-width: 40rem; min-width: 4rem; overflow-wrap: anywhere; }
summary { cursor: pointer; font-size: .95rem; font-weight: 600; }
pre { font-size: .78rem; line-height: 1.45; margin: .6rem 0 0; overflow-wrap: anywhere; white-space: pre-wrap; }
.cards {
  display: grid; gap: .8rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, var(--card, 320px)), 1fr));
}
article { background: var(--paper); border: 1px solid var(--line); border-radius: 8px; padding: .7rem; }
article h2, dt { color: var(--faint); font-size: .82rem; font-weight: 500; }
img { background: var(--line); border-radius: 5px; display: block; height: auto; margin-bottom: .4rem; max-width: 100% }
audio { width: 100%; }
dl { display: grid; gap: .1rem .6rem; grid-template-columns: max-content minmax(0, 1fr); margin: 0; }
dd { margin: 0; overflow-wrap: anywhere; white-space: pre-wrap; }
"""
_SCRIPT = """"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const node = (tag, ...children) => {
  const made = document.createElement(tag);
  made.append(...children);
  return made;
};
document.querySelectorAll(".box").forEach((box, number) => {
  const cursor = box.querySelector(".cursor"), tip = box.querySelector(".tip");
  const show = (event) => {
    const frame = box.getBoundingClientRect(), at = (event.clientX - frame.left) / frame.width;
    const found = data.at.findIndex((end) => end >= at), i = found < 0 ? data.at.length - 1 : found;
    const lines = data.plots[number].filter(({values}) => values[i]).map(({name, color, values}) => {
      const mark = node("i");
      mark.style.background = color;
      return node("div", mark, `${name} `, node("b", values[i]));
    });
    tip.replaceChildren(node("div", data.heads[i]), ...lines);
    cursor.hidden = tip.hidden = false;
    const x = data.at[i] * frame.width, left = at > 0.5 ? x - tip.offsetWidth - 8 : x + 8;
    cursor.style.left = `${x}px`;
    tip.style.left = `${Math.max(0, Math.min(left, frame.width - tip.offsetWidth))}px`;
  };
  box.addEventListener("pointermove", show);
  box.addEventListener("pointerdown", show);
  box.addEventListener("pointerleave", () => { cursor.hidden = tip.hidden = true; });
});
"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; media-src data:;
 style-src 'unsafe-inline'; script-src 'sha256-{digest}'">
<title>{title}</title><style>{style}</style></head><body><h1>{title}</h1><p class="about">{about}</p>
{body}</body></html>
"""


def page(title: str, about: str, body: str, script: str = "") -> str:
    """A page of HTML with a body that is HTML already."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = _PAGE.format(title=escape(title), about=escape(about), body=body, digest=digest, style=_STYLE)
    return text.encode(errors="replace").decode()  # half a character, which JSON and names of files may hold


def write_run_page(log: Path, out: Path | None = None) -> Path:
    """Draw the page of a run from its log; returns where it is: beside the log, unless `out` is given.

    Raises:
        ValueError: The file is no log of a run.
        OSError: The log cannot be read, or the page cannot be written.
    """
    run = read_run(log)
    path = page_of(run.path) if out is None else out
    publish_bytes(run_page(run).encode(), path, _MODES, durable=False)
    return path


def run_page(run: Run) -> str:
    """The page of a run: how it ended, where its time went, plots over time, launches, messages and settings."""
    first, last = run.launches[0].start, run.launches[-1].start
    world = f"{_number(last.ranks, 'rank')} on {_number(last.nodes, 'node')}"
    about = f"Began {first.began} · {world} · {_seconds(run.seconds)} · drawn from {run.path.name}"
    plots = _Plots(run)
    sections = [_end(run), _tiles(run), _time(run.stats), plots.html(), _launches(run), _messages(run), _bad(run)]
    sections.append(_settings(last))
    data = json.dumps(plots.data).replace("<", "\\u003c")  # which would end the element where a name has "</script>"
    tail = f'<script type="application/json" id="data">{data}</script><script>{_SCRIPT}</script>'
    return page(f"{run.name}: data of a training run", about, f"<main>{''.join(sections)}</main>{tail}", _SCRIPT)


# What a reader sees first


def _end(run: Run) -> str:
    launch = run.launches[-1]
    end, start = launch.end, launch.start
    kind = "fair" if run.stats.wait_share >= INPUT_BOUND else "good"
    if end is None:
        kind, title = "fair", "Still training, or killed"
        lines = [f"The log has no end. Its last record was written {_seconds(launch.seconds)} after the launch began."]
    elif end.how == "finished":
        title, lines = "Training has finished", []
    else:
        kind, title, lines = "bad", "Training stopped", [end.how]
    if start.measured_ranks < start.ranks:
        lines.append(f"Measured in the first of {start.ranks} processes.")
    lines.append(_delivered(run))
    if end is not None:
        latest = "Latest launch: " if end.verdict and len(run.launches) > 1 else ""
        lines += [end.ledger, latest + end.verdict]
        lines.append("" if end.is_whole else "What the other ranks measured last is missing.")
    text = "".join(f"<p>{escape(line)}</p>" for line in lines if line)
    return f'<section class="end {kind}"><h2>{title}</h2>{text}</section>'


def _delivered(run: Run) -> str:
    (epoch, position), (end, end_position) = run.launches[0].start.place, run.launches[-1].place
    if run.num_lost is None or (epoch, position) == (end, end_position):
        return ""
    counts = f"{run.num_lost:,} lost, {run.num_repeated:,} repeated."
    if position == end_position == 0:
        return f"Trained on {f'epochs {epoch}-{end - 1}' if end > epoch + 1 else f'epoch {epoch}'}: {counts}"
    return f"Trained from {_place((epoch, position))}, to {_place((end, end_position))}: {counts}"


def _tiles(run: Run) -> str:
    stats, counted = run.stats, run.stats.counters
    opened = counted["shards_here"] + counted["shards_fetched"]
    shown = {
        f"of the time spent waiting: {stats.waited}": percent(stats.wait_share),
        "samples per second": f"{stats.samples_per_s:,.0f}",
        "samples trained on": f"{stats.num_samples:,}",
        "tokens": f"{stats.num_tokens:,}" if stats.num_tokens else "",
        "downloaded": readable(counted["fetched_bytes"]) if counted["fetched_bytes"] else "",
        f"of {_number(opened, 'opened shard')} in the cache already": f"{stats.cache_hit:.0%}" if opened else "",
        "requests sent again": f"{counted['retries']:,.0f}" if counted["retries"] else "",
        "bad samples": f"{counted['bad_samples']:,.0f}" if counted["bad_samples"] else "",
    }
    tiles = (f"<div><b>{value}</b><span>{label}</span></div>" for label, value in shown.items() if value)
    return f'<section class="tiles">{"".join(tiles)}</section>'


def _waits(stats: LoaderStats) -> dict[str, float]:
    """The seconds of each kind of waiting, of which small ones are added up; together they are `LoaderStats.wait_s`."""
    shown = {name: seconds for name, seconds in stats.waits.items() if seconds >= _SMALL * stats.elapsed_s}
    waits = {_FIRST: stats.first_wait_s, **shown}
    return {**waits, _OTHER: stats.wait_s - sum(waits.values())}


def _time(stats: LoaderStats) -> str:
    """All the time as one bar."""
    pauses = {name: stats.pauses[name] for name in PAUSE_LABELS}
    parts = {"training": stats.training_s, **_waits(stats), **pauses}
    shares = {name: seconds / max(1e-9, stats.elapsed_s) for name, seconds in parts.items()}
    shares = {name: share for name, share in shares.items() if share >= _LEAST_SHARE}
    bar = "".join(f'<i style="flex:{share:.6f};background:{_COLORS[name]}"></i>' for name, share in shares.items())
    labels = {**{name: f"waiting: {name}" for name in (_FIRST, *PARTS, _OTHER)}, **PAUSE_LABELS}
    legend = _legend({f"{labels.get(name, name)} {percent(share)}": _COLORS[name] for name, share in shares.items()})
    besides = f"<p class=note>Validation took {_seconds(stats.validation_s)} besides.</p>" if stats.validation_s else ""
    return f'<section><h2>Where the time went</h2><div class="bar">{bar}</div>{legend}{besides}</section>'


def _legend(colors: Mapping[str, str]) -> str:
    items = (f'<span><i style="background:{color}"></i>{escape(name)}</span>' for name, color in colors.items())
    return f'<div class="legend">{"".join(items)}</div>'


# Plots


class _Plots:
    """All plots of a run that have something to show, over one time axis.

    Rows that would share a pixel are added up; the time between two launches is left out.

    Attributes:
        data: What the script shows below the pointer.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._seconds = run, max(run.seconds, 1e-9)
        self._rows: list[Row] = []
        self._resumes: list[float] = []
        ends_s: list[float] = []
        begin_s = 0.0
        for launch in run.launches:
            if begin_s:
                self._resumes.append(begin_s / self._seconds)
            self._rows += launch.rows
            ends_s += [begin_s + row.at_s for row in launch.rows]
            begin_s += launch.seconds
        pixels = np.array(ends_s) // max(_LEAST_POINT_S, self._seconds / _MOST_POINTS)
        firsts = np.flatnonzero(np.diff(pixels, prepend=-1.0)).tolist()
        # Row of each point. One without a batch, as after the last one, has no rate.
        self._first = np.array([row for row in firsts if not row or "num_batches" in self._rows[row].stats], np.int64)
        last = [*(self._first[1:] - 1).tolist(), len(self._rows) - 1][: len(self._first)]
        self._places = [0.0, *(ends_s[number] / self._seconds for number in last)]  # where points end, from 0 to 1
        latest = [self._rows[number] for number in last]
        self._epochs = np.array([row.epochs for row in latest])
        wheres = [f"epoch {row.epochs:.2f} · step {row.step:,}" for row in latest]
        heads = [f"{_seconds(ends_s[number])} · {where}" for number, where in zip(last, wheres, strict=True)]
        self.data: dict[str, Any] = {"at": [round(place, 5) for place in self._places[1:]], "heads": heads, "plots": []}

    def html(self) -> str:
        """The plots."""
        if len(self._first) < 2:
            return ""
        return f'<div class="plots">{"".join(self._drawn())}</div>'

    def _drawn(self) -> Iterator[str]:
        whole, elapsed_s = self._run.stats, self._sum("wait_s", "compute_s")
        yield self._plot("Samples per second", {"samples": _ratio(self._sum("num_samples"), elapsed_s)}, _amount)
        shown = [name for name, seconds in _waits(whole).items() if seconds >= _LEAST_SHARE * whole.elapsed_s]
        waits = {_FIRST: self._sum(*(f"first_waits.{part}" for part in PARTS))}
        waits |= {part: self._sum(f"waits.{part}") for part in PARTS if part in shown}
        waits[_OTHER] = np.maximum(0.0, self._sum("wait_s") - sum(waits.values()))
        shares = {name: _ratio(seconds, elapsed_s) for name, seconds in waits.items() if name in shown}
        if shares:
            yield self._plot("Share of the time spent waiting for data", shares, _share, is_stacked=True)
        if names := dict.fromkeys(name for row in self._rows for name in row.drawn):
            drawn = {name: self._add([row.drawn.get(name, 0.0) for row in self._rows]) for name in names}
            drawn = dict(sorted(drawn.items(), key=lambda item: -item[1].sum()))
            same = os.path.commonprefix([name.rstrip("/") for name in names]).rfind("/") + 1  # noqa: RUF071
            all_drawn = np.sum(list(drawn.values()), axis=0)
            mixture = {name[same:]: _ratio(counts, all_drawn) for name, counts in drawn.items()}
            yield self._plot("Mixture of the streams", mixture, _share, is_stacked=True)
        if self._epochs.any():
            yield self._plot("Epochs trained on", {"epochs": self._epochs}, _amount)
        fetched = self._sum("counters.fetched_bytes")
        if np.count_nonzero(fetched) > 2:  # else there is nothing to see but the beginning
            speed = _ratio(fetched, np.diff(self._places) * self._seconds)
            yield self._plot("Downloads", {"downloads": speed}, _speed)
        counts = {label: self._sum(f"counters.{name}") for name, label in _TROUBLES.items()}
        if troubles := {label: values for label, values in counts.items() if values.any()}:
            yield self._plot("Failures and evictions", troubles, _amount)

    def _sum(self, *names: str) -> Numbers:
        """What was measured under these names, by point."""
        return self._add([sum(row.stats.get(name, 0.0) for name in names) for row in self._rows])

    def _add(self, values: Sequence[float]) -> Numbers:
        return np.add.reduceat(np.array(values, np.float64), self._first)

    def _plot(
        self,
        title: str,
        series: Mapping[str, Numbers],
        text: Callable[[float], str],
        *,
        is_stacked: bool = False,
    ) -> str:
        """A plot: values hold from the point before to their own."""
        colors = {name: _COLORS.get(name, _SERIES[number % len(_SERIES)]) for number, name in enumerate(series)}
        values = np.nan_to_num(list(series.values()))
        edges = np.concatenate([np.zeros((1, len(self._first))), np.cumsum(values, axis=0)])
        ticks = _ticks(float(edges[-1].max() if is_stacked else values.max()), 4)
        paths = ""
        for number, (name, line) in enumerate(series.items()):
            if is_stacked:
                path = self._steps(edges[number + 1], ticks[-1]) + self._steps(edges[number], ticks[-1], back=True)
                paths += f'<path class="area" style="fill:{colors[name]}" d="{path}Z"/>'
            else:
                paths += f'<path style="stroke:{colors[name]}" d="{self._steps(line, ticks[-1])}"/>'
        texts = {name: [None if math.isnan(value) else text(value) for value in line] for name, line in series.items()}
        self.data["plots"].append([{"name": name, "color": colors[name], "values": texts[name]} for name in series])
        grid = "".join(f"M0 {_y(tick, ticks[-1])}H1000" for tick in ticks)
        marks = "".join(f"M{1000 * place:.1f} 0V100" for place in self._resumes)
        ys = "".join(f'<span style="bottom:{100 * tick / ticks[-1]:.1f}%">{text(tick)}</span>' for tick in ticks)
        labels = "".join(f'<span class="label" style="left:{100 * at:.2f}%">resumed</span>' for at in self._resumes)
        return (
            f"<section><h2>{title}</h2>{_legend(colors) if len(series) > 1 else ''}"
            f'<div class="frame"><div class="ys">{ys}</div><div class="box">'
            f'<svg viewBox="0 0 1000 100" preserveAspectRatio="none" role="img" aria-label="{title}">'
            f'<path class="grid" d="{grid}"/>{paths}<path class="mark" d="{marks}"/></svg>{labels}'
            f'<div class="cursor" hidden></div><div class="tip" hidden></div></div><div class="xs">{self._xs()}</div>'
            "</div></section>"
        )

    def _xs(self) -> str:
        unit, name = _unit(self._seconds)
        ticks = [tick for tick in _ticks(self._seconds / unit, 4) if tick * unit <= self._seconds]
        spans = ""
        for tick in ticks:
            place = 100 * tick * unit / self._seconds
            kind = ' class="last"' if place > 96 else ""
            spans += f'<span{kind} style="left:{place:.2f}%">{f"{_amount(tick)} {name}" if tick else 0}</span>'
        return spans

    def _steps(self, values: Numbers, top: float, *, back: bool = False) -> str:
        """A line that keeps each value up to its point's end; with `back`, from the last to the first, for areas."""
        path = ""
        ends = [f"{1000 * place:.1f}" for place in self._places]
        steps = list(zip(values.tolist(), ends[:-1], ends[1:], strict=True))
        for value, begin, end in reversed(steps) if back else steps:
            if math.isnan(value):
                continue
            start = f"V{_y(value, top)}" if path or back else f"M{begin} {_y(value, top)}"
            path += f"{start}H{begin if back else end}"
        return path


def _ratio(amounts: Numbers, by: Numbers) -> Numbers:
    """The quotients; NaN where there is nothing to divide by."""
    quotients: Numbers = np.divide(amounts, by, out=np.full(len(amounts), np.nan), where=by > 0)
    return quotients


def _y(value: float, top: float) -> str:
    return f"{100 - 100 * value / top:.2f}"


def _ticks(top: float, most: int) -> list[float]:
    """Round values from 0 to at least `top`."""
    if top <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(top / most))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor * most >= top * (1 - 1e-9))
    return [step * number for number in range(math.ceil(top / step * (1 - 1e-9)) + 1)]


# Texts and tables


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _speed(value: float) -> str:
    return f"{readable(value).replace('.0 ', ' ')}/s" if value else "0"


def _share(value: float) -> str:
    return f"{100 * value:.3g}%"


def _unit(seconds: float) -> tuple[int, str]:
    return next(((unit, name) for unit, name in _TIMES if seconds >= 2 * unit), _TIMES[-1])


def _seconds(seconds: float) -> str:
    unit, name = _unit(seconds)
    return f"{_amount(round(seconds / unit, 1))} {name}"


def _number(number: float, noun: str) -> str:
    return f"{number:,.0f} {noun}{'' if number == 1 else 's'}"


def _place(place: Place) -> str:
    return f"epoch {place[0]}, sample {place[1]:,}"


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    if not rows:
        return ""
    body = "".join(f"<th>{escape(name)}</th>" for name in head)
    for row in rows:
        cells = "".join(f"<td>{escape('-' if cell is None else str(cell))}</td>" for cell in row)
        body += f"</tr><tr>{cells}"
    return f'<section><h2>{title}</h2><div class="scrolls"><table><tr>{body}</tr></table></div></section>'


def _launches(run: Run) -> str:
    head = ("began", "took", "from", "to", "ranks", "nodes", "waited", "lost", "repeated", "ended")
    rows = []
    for launch in run.launches:
        start, waited = launch.start, percent(launch.stats.wait_share)
        row = [start.began, _seconds(launch.seconds), _place(start.place), _place(launch.place), start.ranks]
        rows.append([*row, start.nodes, waited, launch.counted("lost"), launch.counted("repeated"), launch.how])
    return _table("Launches", head, rows if len(rows) > 1 else [])


def _messages(run: Run) -> str:
    known = [launch.end.verdict for launch in run.launches if launch.end is not None]  # shown above
    rows = [
        [number, _seconds(message.at_s), f"{message.step:,}", message.text]
        for number, launch in enumerate(run.launches, 1)
        for message in launch.messages
        if message.text not in known
    ]
    return _table("Messages", ("launch", "after", "step", "message"), rows)


def _bad(run: Run) -> str:
    head = ("sample", "stream", "shard", "epoch", "position", "delivered", "reason")
    rows = [[sample.values.get(name) for name in head] for launch in run.launches for sample in launch.bad]
    number = max(len(rows), int(run.stats.counters["bad_samples"]))
    return _table(f"Bad samples: {len(rows):,} of about {number:,}", head, rows)


def _settings(start: LaunchStart) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in start.versions.items())
    text = escape(f"{start.settings}\n\n{versions}")
    return f"<details><summary>Settings</summary><pre>{text}</pre></details>"


# Samples


def write_sample_page(
    path: Path, title: str, about: str, samples: Mapping[int, Mapping[str, Any]], as_text: Callable[[Any], str]
) -> None:
    """Write samples by their ids as a page, with their images, sounds and texts; a former one is replaced as a whole.

    Args:
        path: Where to.
        title, about: The heading of the page, and the line below it.
        samples: The samples.
        as_text: Says what a value is that is no text.
    """
    cards = "\n".join(_card(number, sample, as_text) for number, sample in samples.items())
    width = 220 if "<img" in cards else 420
    text = page(title, about, f'<div class="cards" style="--card: {width}px">\n{cards}\n</div>')
    make_folder(path.absolute().parent, _MODES)
    publish_bytes(text.encode(), path.absolute(), _MODES, durable=False)


def _card(number: int, sample: Mapping[str, Any], as_text: Callable[[Any], str]) -> str:
    media, rows = "", ""
    for name, value in sample.items():
        label = escape(name)
        text = value[:_CHARACTERS_ON_PAGE] if isinstance(value, str) else as_text(value)
        try:
            for image in _images_in(value):
                media += f'<img loading="lazy" alt="{label} of sample {number}" src="{_thumbnail(image)}">'
        except Exception as error:  # noqa: BLE001 - Pillow raises anything for a damaged file
            text += f" (cannot be decoded: {' '.join(str(error).split())})"
        if sound := _sound(value):
            media += f'<audio controls preload="none" src="{sound}" aria-label="{label}"></audio>'
        rows += f"<dt>{label}</dt><dd>{escape(text)}</dd>"
    return f"<article><h2>sample {number:,}</h2>{media}<dl>{rows}</dl></article>"


def _images_in(value: Any) -> Iterator[Any]:
    """The images of Pillow that a value is or holds: an image, the bytes of one, pixels, or a list of these."""
    if hasattr(value, "getbands"):
        yield value
    elif isinstance(value, list):
        for part in value:
            yield from _images_in(part)
    elif isinstance(value, bytes) and value.startswith(_IMAGES):
        with suppress(OSError):  # of other bytes that begin so
            yield pillow().open(io.BytesIO(value), formats=FORMATS)
    elif isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.shape[2:] in ((1,), (3,)):
        yield pillow().fromarray(value.squeeze())


def _thumbnail(image: Any) -> str:
    image = rgb(image)
    image.thumbnail(_THUMB)
    data = io.BytesIO()
    image.save(data, "JPEG", quality=85)
    return _embedded("image/jpeg", data.getvalue())


def _embedded(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _sound(value: Any) -> str:
    """Sound of a kind that browsers play, as the source of an element; empty for anything else."""
    data = value.data if isinstance(value, Media) else value
    if not isinstance(data, bytes) or len(data) > _MOST_SOUND_BYTES or "sample_rate" not in measured(value):
        return ""
    return next((_embedded(f"audio/{kind}", data) for start, kind in _SOUNDS.items() if data.startswith(start)), "")
