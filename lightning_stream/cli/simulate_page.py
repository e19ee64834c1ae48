"""The pages of ``simulate``: a report in a file, and a local page whose sliders change the settings."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_stream.errors import LightningStreamError
from lightning_stream.formats.sizes import parse_bytes
from lightning_stream.order.config import MOSAIC_ALGORITHMS
from lightning_stream.pages import Section, drawn_page, fields
from lightning_stream.pages.server import Drawn, serve
from lightning_stream.shared_files import Modes, make_folder, publish_bytes
from lightning_stream.simulation import CLOUDS, Link

_MB, _GB = 1e6, 1e9
_AS_GIVEN = "as given"
_MODES = Modes(0o644, 0o755)


@dataclass(frozen=True)
class _Field:
    """A number of the page: what it is called, its range, and what it means if it is empty, if it may be."""

    name: str
    label: str
    least: float
    most: float
    is_whole: bool = True
    empty: str | None = None

    def value(self, text: str) -> float | None:
        """The value that a user entered; ValueError for another than the field takes."""
        if not text and self.empty is not None:
            return None
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        least = self.least if self.is_whole else 0
        if not least <= number <= self.most or (self.is_whole and number % 1):
            kind = "a whole number" if self.is_whole else "a number"
            raise ValueError(f"{self.label}: enter {kind} from {least:g} to {self.most:,.0f}; found {text!r}")
        return int(number) if self.is_whole else number


_FIELDS = (
    _Field("nodes", "Nodes", 1, 1000),
    _Field("devices", "Devices of a node", 1, 64),
    _Field("batch", "Samples of a step on each device", 1, 1e5),
    _Field("num_workers", "Workers of each device", 0, 64),
    _Field("step_ms", "Training step, ms", 0.1, 1e5, is_whole=False),
    _Field("sample_ms", "Making a sample, ms", 0.001, 1e4, is_whole=False),
    _Field("latency_ms", "Latency of the store, ms", 0.1, 1e4, is_whole=False),
    _Field("connection_mb", "Each connection, MB/s", 0.1, 1e5, is_whole=False),
    _Field("node_mb", "All connections of a node, MB/s", 1, 1e6, is_whole=False, empty="no limit"),
    _Field("predownload", "Samples downloaded ahead", 1, 1e6, empty="auto"),
    _Field("cache_gb", "Cache of a node, GB", 0.01, 1e6, is_whole=False, empty="no limit"),
    _Field("window", "Window of the shuffle, shards", 1, 1e5, empty="auto"),
)
_CHOICES = {
    "shuffle_algo": ("Shuffle", (_AS_GIVEN, "window", *MOSAIC_ALGORITHMS)),
    "price": ("Prices", (_AS_GIVEN, *CLOUDS)),
}


def add_pages(parser: argparse.ArgumentParser) -> None:
    """Let ``simulate`` write and serve pages."""
    found = parser.add_argument_group("pages")
    found.add_argument("--report", type=_html, metavar="FILE", help="write a page with plots, FILE.html")
    text = "show a page on this machine whose sliders change the settings, until Ctrl-C (default: a free port)"
    found.add_argument("--serve", nargs="?", const=0, type=_port, metavar="PORT", help=text)


def _html(text: str) -> Path:
    if not text.endswith(".html"):
        raise argparse.ArgumentTypeError(f"takes a file that ends with .html; found {text!r}")
    return Path(text)


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"takes a port from 0 to 65535; found {text!r}")
    return int(text)


def write_report(path: Path, title: str, drawn: Drawn) -> None:
    """Write what was simulated into a file."""
    make_folder(path.absolute().parent, _MODES)
    publish_bytes(drawn_page(title, "", *drawn).encode(), path.absolute(), _MODES, durable=False)


def serve_page(
    title: str,
    options: argparse.Namespace,
    link: Link,
    draw: Callable[[argparse.Namespace, bool], Drawn],
    say: Callable[[str], object],
) -> None:
    """Serve a page until Ctrl-C; `draw` simulates changed options, and may omit what takes long."""
    start = argparse.Namespace(**{**vars(options), "link": link, "probe": None})

    def answer(given: Mapping[str, str], is_quick: bool) -> Drawn:
        try:
            return draw(changed(start, given) if given else start, is_quick)
        except LightningStreamError as error:
            raise ValueError(str(error)) from error

    serve(title, _fields_of(start), answer, port=options.serve, say=say)


def _replicas(options: argparse.Namespace) -> int:
    return max(1, int(options.nodes * options.devices // options.replication))


def _values_of(options: argparse.Namespace) -> dict[str, float | None]:
    """The values of the fields under some options."""
    link, limit = options.link, options.cache_limit
    found: dict[str, float | None] = {
        "latency_ms": 1000 * link.latency_s,
        "connection_mb": link.connection_bytes_per_s / _MB,
        "node_mb": None if link.node_bytes_per_s is None else link.node_bytes_per_s / _MB,
        "cache_gb": None if limit is None else parse_bytes(limit, "cache_limit") / _GB,
    }
    if options.global_batch_size is not None:
        found["batch"] = options.global_batch_size // _replicas(options)
    return {**{one.name: getattr(options, one.name, None) for one in _FIELDS}, **found}


def _fields_of(options: argparse.Namespace) -> Section:
    values = _values_of(options)
    listed: list[dict[str, Any]] = [
        {"name": one.name, "label": one.label, "value": values[one.name], "least": one.least, "most": one.most,
         "whole": one.is_whole, "log": one.least > 0, "empty": one.empty}
        for one in _FIELDS
        if one.name != "batch" or options.global_batch_size is not None
    ]  # fmt: skip
    for name, (label, choices) in _CHOICES.items():
        listed.append({"name": name, "label": label, "value": _AS_GIVEN, "choices": choices})
    return fields(listed)


def changed(options: argparse.Namespace, given: Mapping[str, str]) -> argparse.Namespace:
    """The options with the values that a user entered. Raises ValueError for one that a field does not take."""
    values = _values_of(options) | {one.name: one.value(given[one.name]) for one in _FIELDS if one.name in given}
    found = argparse.Namespace(**{**vars(options), **{name: values[name] for name in values if name in options}})
    node = values["node_mb"]
    found.link = replace(
        options.link,
        latency_s=(values["latency_ms"] or 0) / 1000,
        connection_bytes_per_s=(values["connection_mb"] or 0) * _MB,
        node_bytes_per_s=None if node is None else node * _MB,
    )
    found.cache_limit = None if values["cache_gb"] is None else round(values["cache_gb"] * _GB)
    if options.global_batch_size is not None:
        found.global_batch_size = int(values["batch"] or 1) * _replicas(found)
    for name, (_, choices) in _CHOICES.items():
        if (chosen := given.get(name, _AS_GIVEN)) not in choices:
            raise ValueError(f"{name} is one of {', '.join(choices)}; found {chosen!r}")
        if chosen != _AS_GIVEN:
            setattr(found, name, CLOUDS[chosen] if name == "price" else chosen)
    return found
