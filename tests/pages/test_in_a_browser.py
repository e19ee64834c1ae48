"""The page of a run in a real browser: it opens, it fits a phone, the pointer shows values, and it asks for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.browser import opened
from support.run_logs import MadeLaunch

from lightning_stream.pages import write_run_page

EVIL = "</script><img src=x onerror=alert(1)>"
SIZES = [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]
NUMBERS = {
    "wait_s": 0.1, "waits.fetching": 0.1, "counters.fetched_bytes": 1e6, "counters.shards_fetched": 1,
    "counters.retries": 1,
}  # fmt: skip


@pytest.fixture
def address(tmp_path: Path) -> str:
    drawn = {EVIL: 1.0, "s3://bucket/" + "long-name" * 9: 2.0}
    first = MadeLaunch(NUMBERS, drawn, how=f"OSError: {EVIL}", message="y" * 300, settings="z" * 500)
    first.write(tmp_path)
    MadeLaunch(NUMBERS, drawn, first=20, ranks=2, settings="z" * 500, verdict="Input-bound 10%: " + "w" * 90).write(
        tmp_path
    )
    return write_run_page(tmp_path).as_uri()


@pytest.mark.parametrize(("width", "scheme"), SIZES)
def test_a_page_opens_without_errors_and_without_scrolling_sideways(address: str, width: int, scheme: str) -> None:
    with opened(address, width, scheme) as found:
        assert found.page.locator("svg").count() == 6
        assert found.page.locator("img").count() == 0
        found.page.locator("summary").click()
        assert found.page.locator("pre").is_visible()
        assert (found.overflow, found.errors, found.requests) == (0, [], [address])


def test_plots_leave_no_hole_on_a_wide_page(address: str) -> None:
    with opened(address) as found:
        boxes = [one.bounding_box() for one in found.page.locator(".plots > section").all()]
        right = max(box["x"] + box["width"] for box in boxes)
        rows = {box["y"] for box in boxes}
        ends = {max(box["x"] + box["width"] for box in boxes if box["y"] == y) for y in rows}
        assert ends == {right}


def test_the_values_below_the_pointer_are_shown(address: str) -> None:
    with opened(address) as found:
        plot = found.page.locator(".box").first
        plot.scroll_into_view_if_needed()
        box = plot.bounding_box()
        for part, expected in ((0.01, "1 s · epoch 0.10 · step 1"), (0.99, "40 s · epoch 4.00 · step 40")):
            found.page.mouse.move(box["x"] + part * box["width"], box["y"] + 50)
            assert found.page.locator("rect:hover title").text_content() == f"{expected}\nsamples 10"
        assert (found.overflow, found.errors) == (0, [])
