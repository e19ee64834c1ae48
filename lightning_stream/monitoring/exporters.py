"""What a loader measures, for Prometheus: it is read when Prometheus collects it, so it costs no batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from weakref import ref

from lightning_stream.distributed import detect_world
from lightning_stream.errors import missing_extra
from lightning_stream.monitoring.measured import PARTS
from lightning_stream.monitoring.stats import LoaderStats

if TYPE_CHECKING:
    from prometheus_client.registry import Collector, CollectorRegistry


class HasStats(Protocol):
    """A loader, or what follows the loaders of a trainer."""

    def stats(self) -> LoaderStats:
        """What was measured so far."""


class _Metric(NamedTuple):
    """A metric: its values by the label ``part``, or one under ``""`` without that label."""

    name: str
    description: str
    unit: str
    values: Mapping[str, float]
    kind: str = "counter"


_COUNTS = {  # by metric: the field of `LoaderStats`, or the counter, that has it
    "batches": ("num_batches", "Batches that were handed out."),
    "batches_ready": ("num_ready", "Batches that were ready when they were requested."),
    "samples": ("num_samples", "Samples that were handed out, padding excluded."),
    "tokens": ("num_tokens", "Tokens of packed rows."),
    "requests": ("requests", "Requests to the store."),
    "retries": ("retries", "Requests to the store that failed and were sent again."),
    "throttled": ("throttled", "Answers of the store that asked for fewer requests."),
    "shards_fetched": ("shards_fetched", "Shards that were fetched."),
    "shards_cached": ("shards_here", "Shards that were in the cache already."),
    "evictions": ("evictions", "Shards that were deleted to make space."),
    "bad_samples": ("bad_samples", "Samples that could not be read."),
}


def _metrics(stats: LoaderStats) -> Iterator[_Metric]:
    waits = {part: stats.waits[part] + stats.first_waits[part] for part in PARTS}
    late = stats.pauses["other_ranks"]  # only found out when ranks compare: a part of what was training until then
    step = {**stats.pauses, "training": stats.training_s + late, "validation": stats.validation_s}
    del step["other_ranks"]
    yield _Metric("wait", "Time that training waited for data.", "seconds", waits)
    yield _Metric("step", "Time in which training did not wait for data.", "seconds", step)
    yield _Metric("other_ranks", "Time of training in which other ranks were late.", "seconds", {"": late})
    yield _Metric("epoch", "Part of the epoch that is done.", "ratio", {"": stats.epoch_fraction}, "gauge")
    yield _Metric("fetched", "Bytes that came from the store.", "bytes", {"": stats.counters["fetched_bytes"]})
    measured = {**vars(stats), **stats.counters}
    for name, (source, description) in _COUNTS.items():
        yield _Metric(name, description, "", {"": float(measured[source])})


def export_prometheus(
    source: HasStats | Mapping[str, HasStats],
    registry: CollectorRegistry | None = None,
    labels: Mapping[str, str] | None = None,
) -> Collector:
    """Let Prometheus collect what a loader measures, e.g. ``lightning_stream_wait_seconds_total{part="fetching"}``.

    Args:
        source: A `StreamingDataLoader`; or, for all training loaders of a trainer, a `StreamingDataModule` or
            `StreamingCallback`. A mapping exports several, with its keys as the label ``loader``. They are not kept
            alive: without them, nothing is collected.
        registry: Where to register, once; None for the default of `prometheus_client`.
        labels: Of each value; None for the rank.

    Returns:
        The collector, for ``registry.unregister``.

    Raises:
        MissingExtraError: `prometheus_client` is not installed.
        TypeError: A source has no `stats`.
        ValueError: The registry has these metrics already.

    Example::

        prometheus_client.start_http_server(8000)
        export_prometheus({"train": loader, "val": val_loader})
    """
    try:
        from prometheus_client import REGISTRY, Metric
        from prometheus_client.registry import Collector
    except ModuleNotFoundError as error:
        raise missing_extra("prometheus-client", "prometheus", "export_prometheus") from error
    named = source if isinstance(source, Mapping) else {"": source}
    for measured in named.values():
        if not hasattr(measured, "stats"):
            kind = type(measured).__name__
            raise TypeError(f"export_prometheus takes what has stats(), as a StreamingDataLoader; found {kind}.")
    references = {name: ref(measured) for name, measured in named.items()}

    def family(metric: _Metric) -> Metric:
        return Metric(f"lightning_stream_{metric.name}", metric.description, metric.kind, metric.unit)

    class LoaderCollector(Collector):  # type: ignore[misc,unused-ignore]
        """Reads the stats of the loaders."""

        def describe(self) -> Iterator[Any]:
            return map(family, _metrics(LoaderStats()))

        def collect(self) -> Iterator[Any]:
            families: dict[str, Metric] = {}
            common = {"rank": detect_world(None).rank} if labels is None else labels
            for name, reference in references.items():
                if (measured := reference()) is None:
                    continue
                pairs = {**common, "loader": name}.items()
                loader_labels = {label: str(value) for label, value in pairs if value != ""}
                for metric in _metrics(measured.stats()):
                    exported = families.setdefault(metric.name, family(metric))
                    sample = f"{exported.name}_total" if metric.kind == "counter" else exported.name
                    for part, value in metric.values.items():
                        exported.add_sample(sample, loader_labels | ({"part": part} if part else {}), value)
            yield from families.values()

    collector = LoaderCollector()
    (registry or REGISTRY).register(collector)
    return collector
