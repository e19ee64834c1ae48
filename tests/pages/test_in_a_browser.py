"""The pages in a real browser: they open, they fit a phone, plots can be zoomed, and nothing leaves the machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.browser import opened

from lightning_stream.pages import chart, drawn_page, figures, table, text

EVIL = "</script><img src=x onerror=alert(1)>"
SIZES = [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]
ROWS = {"end": [1.0, 2.0, 3.0, 4.0], "samples": [10, 0, 30, 40], "seconds": [1, 0, 2, 1], "nodes": [1, 10, 100, 1000]}


@pytest.fixture
def static(tmp_path: Path) -> str:
    sections = [
        figures({"samples": "80", EVIL: "a" * 80}),
        chart("Samples", "end", {"samples": ("samples", "seconds")}, intervals=True, x_unit="seconds"),
        chart("Shares", "end", {EVIL: "samples", "others": "seconds"}, stacked=True, marks=[[2.0, "resumed"]]),
        chart("Nodes", "nodes", {"samples": "samples"}, log=True, y_unit="dollars"),
        table("Table", ["one", "other"], [["x" * 200, EVIL]] * 3),
        text("Settings", "y" * 500, code=True),
    ]
    path = tmp_path / "page.html"
    path.write_text(drawn_page(EVIL, EVIL, sections, ROWS), encoding="utf-8")
    return path.as_uri()


@pytest.mark.parametrize(("width", "scheme"), SIZES)
def test_a_page_opens_without_errors_and_without_scrolling_sideways(static: str, width: int, scheme: str) -> None:
    with opened(static, width, scheme) as found:
        assert found.page.locator("svg").count() == 3
        assert found.page.locator("img").count() == 0
        assert (found.overflow, found.errors, found.requests) == (0, [], [static])


def test_the_values_below_the_pointer_are_shown_and_a_drag_zooms_all_plots_of_the_axis(static: str) -> None:
    with opened(static) as found:
        plots, tips = found.page.locator("svg"), found.page.locator(".tip")
        box = plots.nth(0).bounding_box()
        before = [plots.nth(k).inner_html() for k in range(3)]
        found.page.mouse.move(box["x"] + 0.65 * box["width"], box["y"] + 50)
        assert "samples: 15" in tips.nth(0).inner_text()
        found.page.mouse.down()
        found.page.mouse.move(box["x"] + box["width"] - 20, box["y"] + 50, steps=4)
        found.page.mouse.up()
        zoomed = [plots.nth(k).inner_html() for k in range(3)]
        assert [one == other for one, other in zip(before, zoomed, strict=True)] == [False, False, True]
        found.page.locator(".reset:visible").nth(1).click()
        assert found.page.locator(".reset:visible").count() == 0
        assert found.errors == []


def test_a_series_can_be_hidden_and_a_single_one_needs_no_legend(static: str) -> None:
    with opened(static) as found:
        assert [found.page.locator(".legend").nth(k).is_visible() for k in range(3)] == [False, True, False]
        found.page.get_by_role("button", name="others").click()
        assert found.page.locator('path[data-name="others"]').count() == 0
        assert found.page.locator("svg").nth(1).locator("path").count() == 1
