"""`page`: a page of HTML that needs no other file and no network, with plots to zoom into, for wide and narrow screens.

Python states what the page shows, as plain values: ``page.js`` draws it from the JSON in the page. So no text of a
dataset is ever part of the HTML. The plots are drawn by code of our own, since a run leaves its report without being
asked: plotly would need an extra package, add 4.6 MB to every page, and knows no dark mode.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from math import isfinite
from typing import Any

Section = dict[str, Any]
_EMBEDDED = re.compile(r'<script type="application/json" id="page">(.*?)</script>', re.DOTALL)
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; media-src data:;
 style-src 'unsafe-inline'; script-src 'sha256-{digest}'">
<title>{title}</title><style>
{style}</style></head><body><h1>{title}</h1><p class="about">{about}</p>
{body}</body></html>
"""
_DRAWN = """<main id="main"></main><noscript>This page draws its plots with JavaScript.</noscript>
<script type="application/json" id="page">{data}</script><script>{script}</script>
"""


def page(title: str, about: str, body: str, script: str = "") -> str:
    """A page of HTML with a body that is HTML already."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    title, about = html.escape(title), html.escape(about)
    text = _PAGE.format(title=title, about=about, body=body, digest=digest, style=_file("page.css"))
    return text.encode(errors="replace").decode()  # half a character, which JSON and names of files may hold


def drawn_page(
    title: str, about: str, sections: Sequence[Section], columns: Mapping[str, Sequence[float | None]], **more: Any
) -> str:
    """A page that ``page.js`` draws.

    Args:
        title: Its title.
        about: A sentence below the title.
        sections: What it shows, see `chart`, `table`, `figures` and `text`.
        columns: The numbers of the plots, by the names that `chart` uses.
        more: Other plain values that `embedded` finds in the page.

    Example::

        rows = {"seconds": [1, 2, 3], "samples": [10, 20, 30]}
        drawn_page("A run", "", [chart("Samples", "seconds", {"samples": "samples"})], rows)
    """
    # "<" would end the element where a text holds "</script>".
    data = values_of(sections, columns, **more).replace("<", "\\u003c")
    script = _file("page.js")
    return page(title, about, _DRAWN.format(data=data, script=script), script)


def values_of(sections: Sequence[Section], columns: Mapping[str, Sequence[float | None]], **more: Any) -> str:
    """What ``page.js`` draws, as JSON, which has no infinite numbers."""
    finite = {
        name: [one if one is None or isfinite(one) else None for one in column] for name, column in columns.items()
    }
    return json.dumps({"sections": sections, "columns": finite, **more}, allow_nan=False)


def embedded(text: str) -> dict[str, Any]:
    """The values in a page that `drawn_page` made; ValueError if it made none like this."""
    found = _EMBEDDED.search(text)
    values = json.loads(found[1]) if found else None
    if not isinstance(values, dict):
        raise ValueError("this is no page that holds its values")
    return values


def chart(title: str, x: str, series: Mapping[str, str | tuple[str, str]], **options: Any) -> dict[str, Any]:
    """A plot.

    Args:
        title: What it shows, with the unit.
        x: The column of the horizontal axis.
        series: By their names, the columns to draw; of two columns, the first divided by the second.
        options: ``x_unit`` and ``y_unit``: ``"count"`` (default), ``"share"``, ``"seconds"``, ``"bytes"``,
            ``"bytes/s"`` or ``"dollars"``. ``stacked``. ``intervals``: each value holds from the row before to its own.
            ``log``: the horizontal axis is logarithmic. ``top``: the least upper end of the vertical axis.
            ``marks``: pairs of a place on the horizontal axis and a text. ``note``: a sentence.
    """
    listed = [{"name": name, "of": [of] if isinstance(of, str) else list(of)} for name, of in series.items()]
    return {"kind": "chart", "title": title, "x": x, "series": listed, **options}


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[Any]]) -> dict[str, Any]:
    """A table."""
    return {"kind": "table", "title": title, "head": head, "rows": [list(row) for row in rows]}


def figures(values: Mapping[str, str]) -> dict[str, Any]:
    """Numbers to read first, by what they are."""
    return {"kind": "figures", "items": [[value, label] for label, value in values.items()]}


def text(title: str, lines: str, *, code: bool = False) -> dict[str, Any]:
    """A text below a title; of fixed width with `code`."""
    return {"kind": "code" if code else "text", "title": title, "text": lines}


@cache
def _file(name: str) -> str:
    return (resources.files(__name__) / name).read_text(encoding="utf-8")
