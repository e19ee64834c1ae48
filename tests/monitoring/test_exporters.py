"""Prometheus collects what a loader measures, over a real endpoint."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
from support.metered_loading import BATCH, loader_over, served, spend, write_metered

from lightning_stream import (
    StreamingDataLoader,
    StreamingDataset,
    export_prometheus,
)
from lightning_stream.errors import MissingExtraError
from lightning_stream.trainers import monitor as trainers_monitor
from lightning_stream.trainers.monitor import DataMonitor

TOTALS = {
    "lightning_stream_batches_total": lambda stats: stats.num_batches,
    "lightning_stream_samples_total": lambda stats: stats.num_samples,
    "lightning_stream_fetched_bytes_total": lambda stats: stats.counters["fetched_bytes"],
    "lightning_stream_shards_fetched_total": lambda stats: stats.counters["shards_fetched"],
    "lightning_stream_requests_total": lambda stats: stats.counters["requests"],
    "lightning_stream_epoch_ratio": lambda stats: stats.epoch_fraction,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_metered(tmp_path_factory.mktemp("exported") / "data", 256)


@pytest.fixture
def loader(data: Path, tmp_path: Path) -> StreamingDataLoader:
    """A loader that has read an epoch from a store, in a worker."""
    with served(data) as web:
        loader = loader_over(f"{web.url}/data", tmp_path, 1)
        for _ in loader:
            pass
    return loader


def scraped(port: int) -> dict[str, float]:
    """The values at an endpoint, by name and labels."""
    with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = [line for line in answer.read().decode().splitlines() if line.startswith("lightning_stream_")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_prometheus_scrapes_the_stats(loader: StreamingDataLoader) -> None:
    prometheus: Any = pytest.importorskip("prometheus_client", reason="pip install prometheus-client")
    registry = prometheus.CollectorRegistry()
    collector = export_prometheus(loader, registry)
    server, thread = prometheus.start_http_server(0, "127.0.0.1", registry)
    try:
        found, stats = scraped(server.server_port), loader.stats()
        for name, value in TOTALS.items():
            assert found[f'{name}{{rank="0"}}'] == value(stats) > 0
        waits = {
            name: value for name, value in found.items() if name.startswith("lightning_stream_wait_seconds_total{")
        }
        assert sum(waits.values()) == pytest.approx(stats.wait_s)
        assert 'lightning_stream_wait_seconds_total{part="fetching",rank="0"}' in waits
        steps = sum(value for name, value in found.items() if name.startswith("lightning_stream_step_seconds_total{"))
        assert steps == pytest.approx(stats.compute_s + stats.validation_s)
        next(iter(loader))
        next_batch = scraped(server.server_port)['lightning_stream_batches_total{rank="0"}']
        assert next_batch == stats.num_batches + 1
        registry.unregister(collector)
        assert scraped(server.server_port) == {}
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)


def test_two_loaders_are_exported_together(data: Path, tmp_path: Path, loader: StreamingDataLoader) -> None:
    prometheus: Any = pytest.importorskip("prometheus_client", reason="pip install prometheus-client")
    registry = prometheus.CollectorRegistry()
    other = loader_over(data, tmp_path / "other")
    export_prometheus({"train": loader, "val": other}, registry, {"job": "7"})
    text = prometheus.generate_latest(registry).decode()
    assert 'lightning_stream_batches_total{job="7",loader="train"} 16.0' in text
    assert 'lightning_stream_batches_total{job="7",loader="val"} 0.0' in text
    assert text.count("# TYPE lightning_stream_batches_total counter") == 1
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        export_prometheus(loader, registry)
    del other
    gc.collect()
    assert 'loader="val"' not in prometheus.generate_latest(registry).decode()


def test_labels_may_be_numbers(loader: StreamingDataLoader) -> None:
    """Prometheus would get no value of the whole process: text of another type is an error when it collects."""
    prometheus: Any = pytest.importorskip("prometheus_client", reason="pip install prometheus-client")
    registry = prometheus.CollectorRegistry()
    loaders: Any = {0: loader}
    labels: Any = {"rank": 3}
    export_prometheus(loaders, registry, labels)
    assert 'lightning_stream_batches_total{loader="0",rank="3"}' in prometheus.generate_latest(registry).decode()


def test_what_measures_nothing_is_refused_when_it_is_exported(data: Path) -> None:
    prometheus: Any = pytest.importorskip("prometheus_client", reason="pip install prometheus-client")
    with pytest.raises(TypeError, match=r"takes what has stats.*found StreamingDataset"):
        export_prometheus(StreamingDataset(str(data)), prometheus.CollectorRegistry())  # type: ignore[arg-type]


def test_counters_only_rise(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prometheus takes a value that falls for a restart, and counts all of it once more."""
    prometheus: Any = pytest.importorskip("prometheus_client", reason="pip install prometheus-client")
    monkeypatch.setattr(trainers_monitor, "gathered_numbers", lambda own: np.stack([own, 0 * own]))  # another rank
    registry, monitor = prometheus.CollectorRegistry(), DataMonitor(print, watch_after_s=None)
    loader = StreamingDataLoader(StreamingDataset(local=data), BATCH)
    monitor.attach(loader)
    export_prometheus(monitor, registry)
    values: dict[str, float] = {}
    for number, _ in enumerate(loader):
        spend(0.002)
        if number % 4 == 1:
            with loader.aside("checkpoint"):
                spend(0.02)
        if number % 4 == 3:
            monitor.metrics(number)
        for family in registry.collect():
            for one in family.samples:
                key = f"{one.name}{one.labels}"
                assert one.value >= values.get(key, 0.0) - 1e-9, key
                values[key] = one.value
    late = values["lightning_stream_other_ranks_seconds_total{'rank': '0'}"]
    training = values["lightning_stream_step_seconds_total{'rank': '0', 'part': 'training'}"]
    assert 0 < late <= training
    monitor.detach()


def test_what_prometheus_asks_for_while_a_trainer_changes_its_loader(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = DataMonitor(print, watch_after_s=None)
    first, second = (StreamingDataLoader(StreamingDataset(local=data), BATCH) for _ in range(2))
    num_batches = len(list(first))
    monitor.attach(first)
    list(first)
    asked: list[int] = []

    def ask(*_: object) -> Any:
        monkeypatch.undo()
        asked.append(monitor.stats().num_batches)
        return second.stats()

    monkeypatch.setattr(type(first.meter), "noted", property(lambda _: None, ask), raising=False)
    monitor.detach()
    monkeypatch.setattr(second, "stats", ask)
    monitor.attach(second)
    assert asked == [num_batches, num_batches]
    assert monitor.stats().num_batches == num_batches
    monitor.detach()


def test_what_is_not_installed_is_named(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingExtraError, match=r"lightning-stream\[prometheus\]"):
        export_prometheus(loader_over(data, tmp_path))
