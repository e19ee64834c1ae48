"""The pages in a real browser: they open, they fit a phone, plots can be zoomed, and nothing leaves the machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from support.browser import opened

from lightning_stream.pages import chart, drawn_page, fields, figures, table, text
from lightning_stream.pages.server import Drawn, PageServer

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


def answer(given: Mapping[str, str], is_quick: bool) -> Drawn:
    nodes = float(given.get("nodes", 3))
    if nodes > 500:
        raise ValueError(f"nodes is at most 500; found {EVIL}")
    sections = [chart("Line", "x", {"y": "y"})]
    columns = {"x": [1.0, 2.0], "y": [10.0, nodes]}
    if is_quick:
        return sections, columns
    return [*sections, chart("Curve", "n", {"c": "c"})], {**columns, "n": [1.0, 2.0], "c": [10.0, nodes]}


@pytest.fixture
def address() -> Iterator[str]:
    nodes = {"name": "nodes", "label": "Nodes", "value": 3, "least": 1, "most": 1000, "log": True}
    order = {"name": "order", "label": "Order", "value": "a", "choices": ["a", "b"]}
    with PageServer(0, "Test", fields([nodes, order]), answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server.url
        server.shutdown()
        thread.join()


def test_a_slider_moves_and_the_plots_change(address: str) -> None:
    with opened(address) as found:
        line, curve = (found.page.locator(f'svg[aria-label="{name}"] path') for name in ("Line", "Curve"))
        before = line.get_attribute("d"), curve.get_attribute("d")
        slider = found.page.locator("input[type=range]")
        slider.focus()
        box = slider.bounding_box()
        found.page.mouse.move(box["x"] + 5, box["y"] + box["height"] / 2)
        found.page.mouse.down()
        found.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=5)
        found.page.wait_for_function(
            "before => document.querySelector('svg path').getAttribute('d') !== before", arg=before[0]
        )
        assert curve.get_attribute("d") == before[1]  # the quick answer, while the slider moves, lacks it
        found.page.mouse.up()
        changed = "before => document.querySelectorAll('svg path')[1].getAttribute('d') !== before"
        found.page.wait_for_function(changed, arg=before[1])
        assert float(found.page.locator("input[type=number]").input_value()) > 3
        assert all(request.startswith(address) for request in found.requests)
        assert {request.removeprefix(address).partition("?")[0] for request in found.requests} == {
            "",
            "quick",
            "values",
        }
        assert found.errors == []


def test_a_value_that_a_rule_refuses_shows_the_rule_and_keeps_the_plots(address: str) -> None:
    with opened(address) as found:
        number, problem = found.page.locator("input[type=number]"), found.page.get_by_role("alert")
        number.fill("600")
        problem.wait_for()
        assert problem.inner_text() == f"nodes is at most 500; found {EVIL}"
        assert found.page.locator("svg").count() == 2
        number.fill("5")
        problem.wait_for(state="hidden")
        assert found.page.locator("img").count() == 0


def test_the_page_with_fields_fits_a_phone(address: str) -> None:
    with opened(address, 390) as found:
        assert (found.overflow, found.errors) == (0, [])
