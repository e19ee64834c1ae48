"""Pages of HTML that need no other file and no network: the page of a run, and the frame of other pages.

Plots are drawn here, as SVG without a script. Every text of the data is escaped.
"""

from __future__ import annotations

import base64
import io
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from html import escape
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lightning_stream.formats.encodings.images import pillow
from lightning_stream.formats.encodings.media import Media
from lightning_stream.media.facts import media_facts
from lightning_stream.media.jpeg import FORMATS, rgb
from lightning_stream.monitoring.measured import INPUT_BOUND, PARTS, PAUSE_LABELS, percent
from lightning_stream.monitoring.stats import LoaderStats
from lightning_stream.questions.describe import readable
from lightning_stream.run_log import Place, Row, Run, page_of, read_run
from lightning_stream.shared_files import Modes, make_folder, publish_bytes

_MODES = Modes(0o644, 0o755)  # a page is for others to look at
_IMAGES = (b"\xff\xd8", b"\x89PNG", b"GIF8", b"RIFF")
_SOUNDS = {b"ID3": "mpeg", b"\xff\xfb": "mpeg", b"fLaC": "flac", b"OggS": "ogg", b"RIFF": "wav"}
_MOST_SOUND_BYTES = 4 << 20
_THUMB = (320, 320)  # pixels
_CHARACTERS_ON_PAGE = 600
_MOST_POINTS = 240
_LEAST_POINT_S = 0.2
_SMALL = 0.01  # of the time: kinds of waiting with less are shown together
_LEAST_SHARE = 0.0005  # of the time: less is shown as 0.0%
_FIRST = "first batches"
_OTHER = "other stages"
_COLORS = {name: f"var(--c{index})" for index, name in enumerate(("training", _FIRST, *PARTS, _OTHER, *PAUSE_LABELS))}
_TROUBLES = ("retries", "bad_samples", "evictions", "shards_fetched_again")
_Plot = tuple[str, Mapping[str, Sequence[float]], Callable[[float], str], bool]  # title, values, their text, stacked
_STYLE = """
:root {
  color-scheme: light dark; --back: #f6f7f9; --paper: #fff; --ink: #16202e; --faint: #667085; --line: #e3e7ee;
  --c0: #2f6fed; --c1: #e08a00; --c2: #0e9f9a; --c3: #d6457f; --c4: #7c5cd6; --c5: #5b9b2b; --c6: #c2410c;
  --c7: #a16207; --c8: #b91c1c; --c9: #94a3b8; --c10: #166534; --c11: #64748b; --c12: #475569;
  --good: #16a34a; --fair: #e08a00; --bad: #dc2626;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #0f141b; --paper: #171e28; --ink: #e6eaf0; --faint: #95a1b2; --line: #2a3442;
    --c0: #6b9bff; --c1: #f5b041; --c2: #2cc4be; --c3: #f178a8; --c4: #a68cf2; --c5: #8fcf5a; --c6: #f08a5d;
    --c7: #d6a84b; --c8: #ff9d9d; --c9: #7d8a9c; --c10: #7fd6a0; --c11: #a3acb9; --c12: #5b687b;
    --good: #34c468; --fair: #f5b041; --bad: #f26d6d;
  }
}
* { box-sizing: border-box; }
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
.tiles span, .legend, .xs, .ys, .note { color: var(--faint); font-size: .82rem; }
.bar { border-radius: 6px; display: flex; gap: 1px; height: 22px; margin-bottom: .6rem; overflow: hidden; }
.bar i { min-width: 2px; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; margin-bottom: .4rem; }
.legend span { overflow-wrap: anywhere; }
.legend i { border-radius: 3px; display: inline-block; height: .7em; margin-right: .4em; width: .7em; }
.plots > section { display: flex; flex: 1 1 max(320px, 40%); flex-direction: column; }
.frame { display: grid; margin-top: auto; grid-template-columns: 4.2rem minmax(0, 1fr); padding-right: .4rem; }
.box { height: 170px; position: relative; }
.box svg { display: block; height: 100%; overflow: visible; width: 100%; }
.box path { fill: none; stroke-width: 1.8; vector-effect: non-scaling-stroke; }
.box .area { stroke: none; }
.box .grid { stroke: var(--line); stroke-width: 1; }
.box rect { fill: var(--ink); opacity: 0; }
.box rect:hover { opacity: .12; }
.ys, .xs { font-variant-numeric: tabular-nums; position: relative; }
.ys span { position: absolute; right: .5rem; transform: translateY(50%); white-space: nowrap; }
.xs { grid-column: 2; height: 1.3rem; }
.xs span { position: absolute; top: .15rem; transform: translateX(-50%); white-space: nowrap; }
.xs :last-child { transform: translateX(-100%); }
.box .label {
  border-left: 1px dashed var(--ink); color: var(--ink); font-size: .75rem; height: 100%; padding: 0 .2rem;
  pointer-events: none; position: absolute; text-shadow: 0 0 3px var(--paper), 0 0 3px var(--paper); top: 0;
}
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
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; media-src data:;
 style-src 'unsafe-inline'">
<title>{title}</title><style>{style}</style></head><body><h1>{title}</h1><p class="about">{subtitle}</p>
{body}</body></html>
"""


def page(title: str, subtitle: str, body: str) -> str:
    """A page of HTML with a body that is HTML already."""
    text = _PAGE.format(title=escape(title), subtitle=escape(subtitle), body=body, style=_STYLE)
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
    first = run.launches[0].start
    last = run.launches[-1].start
    world = f"{_count(last.ranks, 'rank')} on {_count(last.nodes, 'node')}"
    subtitle = f"Began {first.began} · {world} · {_seconds(run.seconds)} · drawn from {run.path.name}"
    versions = ", ".join(f"{name} {version}" for name, version in last.versions.items())
    settings = f"<details><summary>Settings</summary><pre>{escape(last.settings)}\n\n{escape(versions)}</pre></details>"
    sections = [_end(run), _tiles(run), _time(run.stats), _plots(run), *_tables(run), settings]
    return page(f"{run.name}: data of a training run", subtitle, f"<main>{''.join(sections)}</main>")


# What a reader sees first


def _end(run: Run) -> str:
    launch = run.launches[-1]
    end = launch.end
    start = launch.start
    kind = "fair" if run.stats.wait_share >= INPUT_BOUND else "good"
    title = "Training has finished"
    lines = [_delivered(run)]
    if start.measured_ranks < start.ranks:
        lines.append(f"Measured in the first of {start.ranks} processes.")
    if end is None:
        kind = "fair"
        title = "Still training, or killed"
        lines.append(
            f"The log has no end. Its last record was written {_seconds(launch.latest.at_s)} after the launch began."
        )
    else:
        lines += [end.ledger, "Latest launch: " * (len(run.launches) > 1 and end.verdict != "") + end.verdict]
        lines.append("" if end.is_whole else "What the other ranks measured last is missing.")
        if end.how != "finished":
            kind = "bad"
            title = "Training stopped"
            lines.insert(0, end.how)
    text = "".join(f"<p>{escape(line)}</p>" for line in lines if line)
    return f'<section class="end {kind}"><h2>{title}</h2>{text}</section>'


def _delivered(run: Run) -> str:
    begin = run.launches[0].start.place
    end = run.launches[-1].latest.place
    if run.lost is None or begin == end:
        return ""
    counts = f"{run.lost:,} lost, {run.repeated:,} repeated."
    if begin[1] or end[1]:
        return f"Trained from {_place(begin)}, to {_place(end)}: {counts}"
    epochs = f"epochs {begin[0]}-{end[0] - 1}" if end[0] > begin[0] + 1 else f"epoch {begin[0]}"
    return f"Trained on {epochs}: {counts}"


def _tiles(run: Run) -> str:
    stats = run.stats
    counted = run.stats.counters
    opened = counted["shards_here"] + counted["shards_fetched"]
    shown = {
        f"of the time spent waiting: {stats.waited}": percent(stats.wait_share),
        "samples per second": _amount(stats.samples_per_s),
        "samples trained on": f"{stats.num_samples:,}",
        "tokens": f"{stats.num_tokens:,}" if stats.num_tokens else "",
        "downloaded": readable(counted["fetched_bytes"]) if counted["fetched_bytes"] else "",
        f"of {_count(opened, 'opened shard')} in the cache already": f"{stats.cache_hit:.0%}" if opened else "",
        "requests sent again": f"{counted['retries']:,.0f}" if counted["retries"] else "",
        "bad samples": f"{counted['bad_samples']:,.0f}" if counted["bad_samples"] else "",
    }
    tiles = (f"<div><b>{value}</b><span>{label}</span></div>" for label, value in shown.items() if value)
    return f'<section class="tiles">{"".join(tiles)}</section>'


def _waits(stats: LoaderStats, total: LoaderStats) -> dict[str, float]:
    """The seconds of each kind of waiting, of which those are added up that are small in the whole run."""
    waits = {_FIRST: stats.first_wait_s}
    waits |= {name: stats.waits[name] for name in PARTS if total.waits[name] >= _SMALL * total.elapsed_s}
    return {**waits, _OTHER: max(0.0, stats.wait_s - sum(waits.values()))}


def _time(stats: LoaderStats) -> str:
    """All the time as one bar."""
    parts = {"training": stats.training_s, **_waits(stats, stats), **stats.pauses}
    bar = ""
    legend = {}
    for name, seconds in parts.items():
        share = seconds / max(1e-9, stats.elapsed_s)
        color = _COLORS[name]
        label = name if name == "training" else PAUSE_LABELS.get(name, f"waiting: {name}")
        if share >= _LEAST_SHARE:
            bar += f'<i style="flex:{share:.6f};background:{color}"></i>'
            legend[f"{label} {percent(share)}"] = color
    besides = f"<p class=note>Validation took {_seconds(stats.validation_s)} besides.</p>" if stats.validation_s else ""
    return f'<section><h2>Where the time went</h2><div class="bar">{bar}</div>{_legend(legend)}{besides}</section>'


def _legend(colors: Mapping[str, str]) -> str:
    items = (f'<span><i style="background:{color}"></i>{escape(name)}</span>' for name, color in colors.items())
    return f'<div class="legend">{"".join(items)}</div>'


# Plots


class _Point(NamedTuple):
    """Rows that share a pixel, added up."""

    end_s: float
    last: Row
    stats: LoaderStats
    drawn: Counter[str]


def _points(run: Run) -> list[_Point]:
    """What the plots show, over one time axis: the time between two launches is left out."""
    rows: list[tuple[float, Row]] = []
    for begin_s, launch in zip(_begins_s(run), run.launches, strict=False):
        rows += [(begin_s + row.at_s, row) for row in launch.rows if "num_batches" in row.stats]  # else it has no rate
    points: list[_Point] = []
    pixel_s = max(_LEAST_POINT_S, run.seconds / _MOST_POINTS)
    for _, group in groupby(rows, lambda timed: timed[0] // pixel_s):
        together = list(group)
        numbers = Counter[str]()
        drawn = Counter[str]()
        for _, row in together:
            numbers.update(row.stats)
            drawn.update(row.drawn)
        points.append(_Point(*together[-1], LoaderStats.of_numbers(numbers), drawn))
    return points


def _begins_s(run: Run) -> list[float]:
    """When each launch began on the time axis, and the end."""
    return list(accumulate((launch.latest.at_s for launch in run.launches), initial=0.0))


def _plots(run: Run) -> str:
    """All plots that have something to show."""
    points = _points(run)
    if len(points) < 2:
        return ""
    drawn = [_plot(run, points, *plot) for plot in _series(run.stats, points) if any(map(any, plot[1].values()))]
    return f'<div class="plots">{"".join(drawn)}</div>'


def _series(total: LoaderStats, points: Sequence[_Point]) -> Iterator[_Plot]:
    parts = [point.stats for point in points]
    yield "Samples per second", {"samples": [part.samples_per_s for part in parts]}, _amount, False
    shares: dict[str, list[float]] = {}
    for name, seconds in _waits(total, total).items():
        if seconds >= _LEAST_SHARE * total.elapsed_s:
            shares[name] = [_waits(part, total)[name] / part.elapsed_s for part in parts]
    yield "Share of the time spent waiting for data", shares, _share, True
    names = [name for name, _ in sum((point.drawn for point in points), Counter()).most_common()]
    same = os.path.commonprefix([name.rstrip("/") for name in names]).rfind("/") + 1  # noqa: RUF071
    mixture = {name[same:]: [point.drawn[name] / max(1, point.drawn.total()) for point in points] for name in names}
    yield "Mixture of the streams", mixture, _share, True
    yield "Epochs trained on", {"epochs": [point.last.epochs for point in points]}, _amount, False
    yield "Downloads", {"downloads": [1e6 * part.download_mb_s for part in parts]}, _speed, False
    troubles = {
        name.replace("_", " "): [part.counters[name] for part in parts] for name in _TROUBLES if total.counters[name]
    }
    yield "Failures and evictions", troubles, _amount, False


def _plot(
    run: Run,
    points: Sequence[_Point],
    title: str,
    series: Mapping[str, Sequence[float]],
    text: Callable[[float], str],
    is_stacked: bool,
) -> str:
    """A plot of lines, or of areas on each other: values hold from the point before to their own."""
    colors = {name: _COLORS.get(name, f"var(--c{index % len(_COLORS)})") for index, name in enumerate(series)}
    edges = [0.0, *(1000 * point.end_s / run.seconds for point in points)]
    values = np.array(list(series.values()))
    lines = np.cumsum(values, axis=0) if is_stacked else values
    ticks = _ticks(float(lines.max()))
    heights = 100 - 100 * lines / ticks[-1]
    paths = ""
    hovers = ""
    for color, line in reversed(list(zip(colors.values(), heights, strict=True))):  # an area covers those above it
        steps = "".join(f"V{height:.2f}H{edge:.1f}" for height, edge in zip(line, edges[1:], strict=True))
        kind = f'class="area" style="fill:{color}"' if is_stacked else f'style="stroke:{color}"'
        paths += f'<path {kind} d="M0 {100 if is_stacked else line[0]:.2f}{steps}{"V100Z" if is_stacked else ""}"/>'
    for begin, end, point, column in zip(edges, edges[1:], points, values.T, strict=False):
        tip = f"{_seconds(point.end_s)} · epoch {point.last.epochs:.2f} · step {point.last.step:,}"
        tip += "".join(f"\n{name} {text(value)}" for name, value in zip(series, column, strict=True))
        hovers += f'<rect x="{begin:.1f}" width="{end - begin:.1f}" height="100"><title>{escape(tip)}</title></rect>'
    xs = "".join(f'<span style="left:{100 * at}%">{_seconds(at * run.seconds)}</span>' for at in (0, 0.5, 1))
    grid = ""
    ys = ""
    resumes = ""
    for tick in ticks:
        grid += f"M0 {100 - 100 * tick / ticks[-1]:.1f}H1000"
        ys += f'<span style="bottom:{100 * tick / ticks[-1]:.1f}%">{text(tick)}</span>'
    for at_s in _begins_s(run)[1:-1]:
        resumes += f'<span class="label" style="left:{100 * at_s / run.seconds:.2f}%">resumed</span>'
    return (
        f"<section><h2>{title}</h2>{_legend(colors) if len(series) > 1 else ''}"
        f'<div class="frame"><div class="ys">{ys}</div><div class="box">'
        f'<svg viewBox="0 0 1000 100" preserveAspectRatio="none" role="img" aria-label="{title}">'
        f'<path class="grid" d="{grid}"/>{paths}{hovers}</svg>{resumes}</div>'
        f'<div class="xs">{xs}</div></div></section>'
    )


def _ticks(top: float) -> list[float]:
    """Zero, a round value that is at least `top`, and the value between."""
    unit = 10.0 ** math.floor(math.log10(top)) / 2
    highest = unit * math.ceil(top / unit * (1 - 1e-9))
    return [0.0, highest / 2, highest]


# Texts and tables


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _speed(value: float) -> str:
    return f"{readable(value).replace('.0 ', ' ')}/s" if value else "0"


def _share(value: float) -> str:
    return f"{100 * value:.3g}%"


def _seconds(seconds: float) -> str:
    units = ((86400, "d"), (3600, "h"), (60, "min"))
    unit, name = next((unit for unit in units if seconds >= 2 * unit[0]), (1, "s"))
    return f"{_amount(round(seconds / unit, 1))} {name}"


def _count(count: float, noun: str) -> str:
    return f"{count:,.0f} {noun}{'' if count == 1 else 's'}"


def _place(place: Place) -> str:
    return f"epoch {place[0]}, sample {place[1]:,}"


def _tables(run: Run) -> Iterator[str]:
    launches = []
    messages = []
    bad = []
    for index, launch in enumerate(run.launches, 1):
        start = launch.start
        latest = launch.latest
        launches.append(
            {
                "began": start.began,
                "took": _seconds(latest.at_s),
                "from": _place(start.place),
                "to": _place(latest.place),
                "ranks": start.ranks,
                "nodes": start.nodes,
                "waited": percent(launch.stats.wait_share),
                "lost": latest.lost,
                "repeated": latest.repeated,
                "ended": launch.how,
            }
        )
        for message in launch.messages:
            row = {"launch": index, "after": _seconds(message.at_s), "step": message.step, "message": message.text}
            messages += [row] if launch.end is None or message.text != launch.end.verdict else []  # shown above
        bad += [sample.values for sample in launch.bad]
    yield _table("Launches", launches if len(launches) > 1 else [])
    yield _table("Messages", messages)
    yield _table(f"Bad samples: {len(bad):,} of about {run.stats.counters['bad_samples']:,.0f}", bad)


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    body = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
    for row in rows:
        cells = "".join(f"<td>{escape('-' if row.get(name) is None else str(row[name]))}</td>" for name in rows[0])
        body += f"</tr><tr>{cells}"
    return f'<section><h2>{title}</h2><div class="scrolls"><table><tr>{body}</tr></table></div></section>'


# Samples


def write_sample_page(
    path: Path, title: str, subtitle: str, samples: Mapping[int, Mapping[str, Any]], as_text: Callable[[Any], str]
) -> None:
    """Write samples by their ids as a page, with their images, sounds and texts; a former one is replaced as a whole.

    Args:
        path: Where to.
        title, subtitle: The heading of the page, and the line below it.
        samples: The samples.
        as_text: Says what a value is that is no text.
    """
    cards = "\n".join(_card(sample_id, sample, as_text) for sample_id, sample in samples.items())
    width = 220 if "<img" in cards else 420
    text = page(title, subtitle, f'<div class="cards" style="--card: {width}px">\n{cards}\n</div>')
    make_folder(path.absolute().parent, _MODES)
    publish_bytes(text.encode(), path.absolute(), _MODES, durable=False)


def _card(sample_id: int, sample: Mapping[str, Any], as_text: Callable[[Any], str]) -> str:
    media = ""
    rows = ""
    for name, value in sample.items():
        label = escape(name)
        text = value[:_CHARACTERS_ON_PAGE] if isinstance(value, str) else as_text(value)
        try:
            for image in _images_in(value):
                media += f'<img loading="lazy" alt="{label} of sample {sample_id}" src="{_thumbnail(image)}">'
        except Exception as error:  # noqa: BLE001 - Pillow raises anything for a damaged file
            text += f" (cannot be decoded: {' '.join(str(error).split())})"
        if sound := _sound(value):
            media += f'<audio controls preload="none" src="{sound}" aria-label="{label}"></audio>'
        rows += f"<dt>{label}</dt><dd>{escape(text)}</dd>"
    return f"<article><h2>sample {sample_id:,}</h2>{media}<dl>{rows}</dl></article>"


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
    if not isinstance(data, bytes) or len(data) > _MOST_SOUND_BYTES or "sample_rate" not in media_facts(value):
        return ""
    return next((_embedded(f"audio/{kind}", data) for start, kind in _SOUNDS.items() if data.startswith(start)), "")
