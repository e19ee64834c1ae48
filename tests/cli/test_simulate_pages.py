"""``simulate --report`` and ``simulate --serve``: pages with plots of what was simulated."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.browser import opened

from lightning_stream.cli import build_parser, main
from lightning_stream.cli.simulate_page import changed
from lightning_stream.pages import embedded
from lightning_stream.simulation import CLOUDS, Link

Answer = Callable[..., tuple[int, Any]]
DATA = ["--shards", "200", "--shard-bytes", "16mb", "--global-batch-size", "256"]
SLOW = [
    "--devices",
    "8",
    "--step-ms",
    "20",
    "--link",
    "latency=50ms,connection=5mb,node=50mb",
    "--price",
    "s3-internet",
]


def test_a_report_shows_what_the_command_prints(tmp_path: Path, answer: Answer) -> None:
    page = tmp_path / "new" / "simulated.html"
    code, about = answer("simulate", *DATA, *SLOW, "--report", str(page))
    assert code == 0
    values, (found,) = embedded(page.read_text()), about["datasets"]
    assert values["columns"]["num_nodes"] == [one["num_nodes"] for one in found["curve"]]
    for name in ("samples_per_s", "wait_share", "download_bytes", "price_usd", "first_batch_s"):
        assert values["columns"][name] == [one[name] for one in found["curve"]]
    assert values["columns"]["timeline_ready"] == found["simulated"]["timeline"]["ready"]
    assert values["sections"][0]["text"] == found["simulated"]["finding"]
    titles = [one["title"] for one in values["sections"] if one["kind"] == "chart"]
    assert len(titles) == len(set(titles)) == 8
    with opened(page.as_uri(), 390, "dark") as shown:
        assert (shown.overflow, shown.errors, shown.requests) == (0, [], [page.as_uri()])
        assert shown.page.locator("svg").count() == 8


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--report", "a.htm"], "takes a file that ends with .html; found 'a.htm'"),
        (["--serve", "70000"], "takes a port from 0 to 65535; found '70000'"),
        (["--serve", "x"], "takes a port from 0 to 65535; found 'x'"),
        (["--serve"], "omit --json"),
    ],
)
def test_wrong_flags_are_refused(flags: list[str], message: str, answer: Answer) -> None:
    code, about = answer("simulate", *DATA, *flags)
    assert code == 2
    assert message in about["error"]


def test_pages_show_one_dataset(shards: Path, answer: Answer) -> None:
    code, about = answer("simulate", str(shards), "--global-batch-size", "4", "--report", "never.html")
    assert code == 2
    assert "show one dataset" in about["error"]


@pytest.fixture
def options() -> argparse.Namespace:
    given = build_parser().parse_args(["simulate", *DATA, "--devices", "8", "--cache-limit", "10gb"])
    given.link = Link()
    return given


def test_fields_change_the_options_that_they_name(options: argparse.Namespace) -> None:
    given = {"nodes": "4", "latency_ms": "250", "node_mb": "", "cache_gb": "", "predownload": "64", "price": "r2"}
    found = changed(options, given)
    assert (found.nodes, found.global_batch_size, found.predownload) == (4, 4 * 256, 64)
    assert (found.link.latency_s, found.link.connection_bytes_per_s, found.link.node_bytes_per_s) == (0.25, 60e6, None)
    assert (found.cache_limit, found.price) == (None, CLOUDS["r2"])
    assert (options.nodes, options.global_batch_size, options.cache_limit) == (1, 256, "10gb")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nodes", "0"), ("nodes", "1.5"), ("nodes", ""), ("nodes", "nan"), ("nodes", "1e9"), ("nodes", "<b>"),
        ("latency_ms", "-1"), ("latency_ms", "inf"), ("cache_gb", "-1"), ("shuffle_algo", "best"), ("price", "x"),
    ],
)  # fmt: skip
def test_a_value_that_a_field_does_not_take_is_refused(options: argparse.Namespace, name: str, text: str) -> None:
    with pytest.raises(ValueError, match=r"found '"):
        changed(options, {name: text})


@contextmanager
def served(*flags: str) -> Iterator[str]:
    """The address of a page that another process serves until Ctrl-C."""
    command = [sys.executable, "-m", "lightning_stream", "simulate", *DATA, *flags, "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[0]
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=60) == ("", "")
            assert process.returncode == 0
        finally:
            process.kill()


def test_a_slider_of_the_served_page_changes_its_plots_and_nothing_leaves_the_machine() -> None:
    with served(*SLOW) as address, opened(address) as found:
        assert address.startswith("http://127.0.0.1:")
        paths = found.page.locator("svg path")
        before = [paths.nth(k).get_attribute("d") for k in range(paths.count())]
        finding = found.page.locator("section p").nth(1).inner_text()
        slider = found.page.get_by_label("Each connection, MB/s").last
        slider.focus()
        slider.press("End")
        found.page.wait_for_function("before => !document.body.innerText.includes(before)", arg=finding)
        drawn = "[...document.querySelectorAll('svg path')].map((one) => one.getAttribute('d')).join()"
        found.page.wait_for_function(f"before => {drawn} !== before", arg=",".join(map(str, before)))
        assert all(request.startswith(address) for request in found.requests)
        assert found.errors == []
        found.page.get_by_label("Nodes").first.fill("0")
        found.page.get_by_role("alert").wait_for()
        assert "enter a whole number from 1 to 1,000; found '0'" in found.page.get_by_role("alert").inner_text()


def test_a_cache_that_is_too_small_is_explained_in_the_page(tmp_path: Path) -> None:
    page = tmp_path / "a.html"
    assert main(["simulate", *DATA, "--cache-limit", "20mb", "--report", str(page)]) == 0
    sections = embedded(page.read_text())["sections"]
    assert "The loader would refuse" in sections[0]["text"]
    assert [one["title"] for one in sections] == ["What limits it", "Settings"]
