"""A page shows what its log says, all its numbers agree, and no text of the data becomes HTML."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

import pytest
from support.run_logs import MadeLaunch

from lightning_stream.pages import page, run_page, write_run_page
from lightning_stream.run_log import PAGE_NAME, read_run

EVIL = "</script><img src=x onerror=alert(1)><!--"
WAITS = {"wait_s": 0.1, "first_waits.starting": [0.1] + 19 * [0.0], "waits.fetching": [0.0] + 19 * [0.1]}


def drawn(*launches: MadeLaunch, folder: Path) -> str:
    for launch in launches:
        path = launch.write(folder / "run")
    return run_page(read_run(path))


def titles(html: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", html)


def plots(html: str) -> dict[str, list[dict[str, str]]]:
    """By title, the values that each point of a plot shows below the pointer."""
    found = {}
    for section in html.split("<section>")[1:]:
        points = re.findall(r"<rect[^>]*><title>(.*?)</title>", section, re.DOTALL)
        values = [dict(line.rsplit(" ", 1) for line in point.split("\n")[1:]) for point in points]
        if values:
            found[titles(section)[0]] = values
    return found


def test_a_page_names_no_other_address(tmp_path: Path) -> None:
    for html in (page("", "", "<p>text</p>"), drawn(MadeLaunch(), folder=tmp_path)):
        assert "http" not in html.replace('http-equiv="', "")
        assert "default-src 'none'" in html


def test_no_text_of_the_data_becomes_html(tmp_path: Path) -> None:
    launch = MadeLaunch(drawn={EVIL: 1.0, "b": 2.0}, how=EVIL, message=EVIL, verdict=EVIL, settings=EVIL)
    html = drawn(launch, folder=tmp_path / EVIL.replace("/", "_"))
    assert "<img" not in html
    assert "<script" not in html
    assert EVIL in [unescape(name) for name in plots(html)["Mixture of the streams"][0]]


def test_the_numbers_of_a_page_agree(tmp_path: Path) -> None:
    html = drawn(MadeLaunch(WAITS), folder=tmp_path)
    assert "<b>10%</b><span>of the time spent waiting: 2.00 s for data, 0.10 s of it for first batches</span>" in html
    assert "training 90%</span>" in html
    assert "waiting: first batches 0.5%</span>" in html
    assert "waiting: fetching 9%</span>" in html or "waiting: fetching 10%</span>" in html
    rates, waits, epochs = plots(html).values()
    assert waits == [{"first batches": "10%", "fetching": "0%"}] + 19 * [{"first batches": "0%", "fetching": "10%"}]
    assert rates == 20 * [{"samples": "10"}]
    assert [epochs[number]["epochs"] for number in (0, 9, 19)] == ["0.1", "1", "2"]


def test_plots_without_anything_to_show_are_left_out(tmp_path: Path) -> None:
    assert titles(drawn(MadeLaunch(), folder=tmp_path)) == [
        "Training has finished", "Where the time went", "Samples per second", "Epochs trained on",
    ]  # fmt: skip
    everything = {**WAITS, "counters.fetched_bytes": 1e6, "counters.retries": 1, "counters.shards_fetched": 1}
    html = drawn(MadeLaunch(everything, {"s3://b/web": 7.0, "s3://b/code": 3.0}), folder=tmp_path)
    assert titles(html)[2:] == [
        "Samples per second", "Share of the time spent waiting for data", "Mixture of the streams",
        "Epochs trained on", "Downloads", "Failures and evictions",
    ]  # fmt: skip
    assert plots(html)["Mixture of the streams"] == 20 * [{"web": "70%", "code": "30%"}]
    assert list(plots(html)["Mixture of the streams"][0]) == ["web", "code"]  # the largest first
    assert "downloads 1 MB/s</title>" in html


def test_small_parts_of_the_waiting_are_shown_together(tmp_path: Path) -> None:
    small = {"wait_s": 0.11, "waits.fetching": 0.1, "waits.reading": 0.005, "waits.sending": 0.005}
    waits = plots(drawn(MadeLaunch(small), folder=tmp_path))["Share of the time spent waiting for data"]
    assert list(waits[0]) == ["fetching", "other stages"]


def test_a_position_never_falls_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    html = drawn(MadeLaunch(), folder=tmp_path)
    (path,) = re.findall(r'<path style="[^"]*" d="([^"]*)"', html.partition("Epochs trained on")[2])
    heights = [float(height) for height in re.findall(r"V([\d.]+)H", path)]
    assert len(heights) == 20
    assert heights == sorted(heights, reverse=True)  # from the top


def test_a_resumed_run_is_one_page_that_marks_its_launches(tmp_path: Path) -> None:
    late = "Input-bound 10%: late."
    second = MadeLaunch(WAITS, first=20, ranks=2, verdict=late, message=late)
    html = drawn(MadeLaunch(how="KeyboardInterrupt"), second, folder=tmp_path)
    assert "<h2>Messages</h2>" not in html  # the verdict is shown already
    assert "Latest launch: Input-bound 10%: late." in html
    assert "<b>5%</b>" in html
    assert "<td>0.0%</td>" in html
    assert "<td>10%</td>" in html
    assert html.count('<span class="label" style="left:50.00%">resumed</span>') == 3
    assert "Trained on epochs 0-3: 0 lost, 0 repeated" in html


def test_a_run_without_an_end_or_a_row_has_a_page(tmp_path: Path) -> None:
    assert "Still training, or killed" in drawn(MadeLaunch(how=None), folder=tmp_path)
    assert titles(drawn(MadeLaunch(rows=0), folder=tmp_path))[0] == "Training has finished"


def test_a_page_is_written_beside_its_log_or_where_it_is_wanted(tmp_path: Path) -> None:
    log = MadeLaunch().write(tmp_path / "run")
    assert write_run_page(tmp_path / "run") == tmp_path / "run" / PAGE_NAME
    other = log.rename(log.with_name("data_log-3.jsonl"))
    assert write_run_page(other) == other.with_name("data_report-3.html")
    assert (
        write_run_page(other, tmp_path / "mine.html").read_text() == other.with_name("data_report-3.html").read_text()
    )


@pytest.mark.parametrize("rows", [1, 3000])
def test_a_long_run_has_no_more_points_than_a_screen(tmp_path: Path, rows: int) -> None:
    html = drawn(MadeLaunch(rows=rows), folder=tmp_path)
    assert html.count("<rect") <= 2 * 300
    assert f"<b>{10 * rows:,}</b><span>samples trained on</span>" in html
