"""The chain from streams to this rank's batches, described stage by stage: settings, counts and a digest of each.

A stage is made by one function, from values that exist anyway. The functions here need the order alone.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from lightning_stream.order.batches import Tail
from lightning_stream.order.config import PUBLIC_NAMES as PUBLIC_NAMES
from lightning_stream.order.config import OrderConfig, Switch
from lightning_stream.order.draw import StreamWeights, weights_digest
from lightning_stream.order.packing import RowPacking
from lightning_stream.order.position import SnapshotSummary
from lightning_stream.order.rows import PackedRows
from lightning_stream.order.run import RunOrder
from lightning_stream.order.schedule import Schedule

_BUCKET_NAMES = {"window": "bucket_window", "batch_size": "batch_multiple"}
_WORTH_COUNTING = 2**20  # documents whose rows are counted without being asked for: a third of a second
_COLUMNS = 98
_NAME = 9
_DIGITS = 12
_PARTS = 8
_ROOM = _COLUMNS - _NAME - _DIGITS - 2
_UNITS = ("bytes", "kB", "MB", "GB", "TB")
_PLURAL = re.compile(r"(?<=ch)es\b|s\b")


@dataclass(frozen=True)
class Stage:
    """A stage of the chain.

    Attributes:
        name: One word.
        settings: By the names that `StreamingDataset` and `StreamingDataLoader` have for them, or had before these were
            parts of other arguments.
        counts: What it counts, by plural nouns. Names that end in ``bytes`` are shown in units, and one that ends in
            ``_percent`` belongs to the count before it.
        digest: Hexadecimal digits that differ for any other data or settings; None where nothing has a digest.
        note: What is not known here, and what shows it.
        parts: What it consists of, e.g. streams or rules.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    counts: Mapping[str, Any] = field(default_factory=dict)
    digest: str | None = None
    note: str = ""
    parts: tuple[Stage, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The stage as plain values, without what is empty; functions and other settings as text."""
        settings = {name: value if _is_plain(value) else _text(value) for name, value in self.settings.items()}
        entries = {**vars(self), "settings": settings, "parts": [part.to_json() for part in self.parts]}
        return {name: value for name, value in entries.items() if value}

    def lines(self) -> list[str]:
        """The stage on a screen, at most 98 columns wide."""
        lines = _block(self._texts, self.digest) if self._texts or not self.parts else []
        for part in self.parts[:_PARTS]:
            text = "; ".join(part._texts)  # noqa: SLF001 - of this class
            lines += _block([f"{part.name}: {text}" if text else part.name], part.digest)
        if (more := len(self.parts) - _PARTS) > 0:
            lines.append(f"... and {more:,} more")
        return [f"{name:<{_NAME}} {line}".rstrip() for name, line in zip_longest([self.name], lines, fillvalue="")]

    @property
    def _texts(self) -> list[str]:
        settings = ", ".join(f"{name}={_text(value)}" for name, value in self.settings.items())
        return [text for text in (counted(self.counts), settings, self.note) if text]


@dataclass(frozen=True)
class Chain:
    """How samples become the batches of a rank, stage by stage; its `str` is one screen.

    Example::

        chain = dataset.describe()
        print(chain)
        chain["streams"].counts["samples"]
    """

    stages: tuple[Stage, ...]

    def __getitem__(self, name: str) -> Stage:
        """The stage of this name. Raises KeyError if the chain has none."""
        stage = next((stage for stage in self.stages if stage.name == name), None)
        if stage is None:
            raise KeyError(f"the chain has no stage {name!r}; it has {', '.join(stage.name for stage in self.stages)}")
        return stage

    def __iter__(self) -> Iterator[Stage]:
        return iter(self.stages)

    def __str__(self) -> str:
        return "\n".join(line for stage in self.stages for line in stage.lines())

    def to_json(self) -> list[dict[str, Any]]:
        """The stages as plain values."""
        return [stage.to_json() for stage in self.stages]


def stages_of_order(
    config: OrderConfig, run: RunOrder | None = None, *, epoch: int = 0, count_rows: bool | None = None
) -> list[Stage]:
    """The stages from the draw to the packing, as far as they are used; their counts only with the run.

    ``count_rows`` plans all rows of the epoch; None does so if that takes less than a second.
    """
    stages = [_draw(config, run)]
    if config.schedule is not None:
        stages.append(_schedule(config.schedule))
    stages.append(_shuffle(config, run))
    if config.switches:
        stages.append(_switches(config.switches))
    if config.forgotten is not None:
        known = run and run.forgotten
        counts = {"samples": len(known.ids)} if known else {}
        stages.append(Stage("forget", {}, counts, config.forgotten, "they are replaced by others of their streams"))
    if config.packing is not None:
        stages.append(_packed(config.packing, run, epoch, count_rows))
    if config.buckets is not None:
        hidden = "batch_size" if config.buckets.batch_tokens is None else ""
        stages.append(_of_lengths("buckets", config.buckets, {**_BUCKET_NAMES, hidden: ""}))
    return stages


def counts_rows(run: RunOrder, wanted: bool | None) -> bool:
    """Whether a description plans all rows of an epoch: as wanted, or else if there are few."""
    return run.num_samples <= _WORTH_COUNTING if wanted is None else wanted


def summarized(summary: SnapshotSummary) -> Stage:
    """The streams, as far as a state knows them."""
    counts = {"samples": summary.num_samples, "shards": summary.num_shards}
    return Stage("streams", {"version": " ".join(summary.versions)} if summary.versions else {}, counts, summary.digest)


def stage_of_batches(
    config: OrderConfig, batch_size: int, tail: Tail, *, num_batches: int | None = None, note: str = "", **settings: int
) -> Stage:
    """The global batches: of ``batch_size`` samples or rows each, or of a budget of tokens."""
    counts = {} if num_batches is None else {"batches": num_batches}
    if config.buckets is not None and config.buckets.batch_tokens is not None:
        counts["tokens per global batch at most"] = config.buckets.batch_tokens
    else:
        counts[f"{'samples' if config.packing is None else 'rows'} per global batch"] = batch_size
    return Stage("batches", {"tail": tail, **settings}, counts, note=note)


def weights_in(weights: StreamWeights) -> dict[str, Any]:
    """The weights of a stream that are set."""
    return _shown(weights, *vars(weights))


def _shown(settings: Any, *names: str) -> dict[str, Any]:
    """Settings by the names that users have for them, without those that are None."""
    values = {PUBLIC_NAMES.get(name, name): getattr(settings, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _of_lengths(name: str, settings: Any, public: Mapping[str, str]) -> Stage:
    """Settings that depend on the lengths of the samples, by their public names; those named "" are not shown."""
    values = {public.get(name, name): value for name, value in _shown(settings, *vars(settings)).items()}
    digest = values.pop("lengths")
    values.pop("", None)
    return Stage(name, values, digest=digest)


def _draw(config: OrderConfig, run: RunOrder | None) -> Stage:
    settings = _shown(config, "sampling_method", "sampling_granularity", "epoch_size")
    if run is None:
        return Stage("draw", settings)
    return Stage("draw", settings, {"samples per epoch": run.num_samples}, weights_digest(run.weights))


def _schedule(schedule: Schedule) -> Stage:
    counts = {"points": len(schedule.points), "changes": len(schedule.changes)}
    parts = [Stage(f"from {at:,}", dict(weights)) for at, weights in schedule.points]
    for change in schedule.changes:
        skipped = {f"{name} skipped": count for name, count in change.skip.items()}
        parts.append(Stage(f"changed at sample {change.at:,}", dict(change.weights or {}), skipped))
    shown = {name: count for name, count in counts.items() if count}
    return Stage("schedule", _shown(schedule, "unit", "interpolation", "exhausted"), shown, parts=tuple(parts))


def _shuffle(config: OrderConfig, run: RunOrder | None) -> Stage:
    mosaic = config.mosaic
    names = ["algorithm", "seed"] if config.shuffle else ["shuffle"]
    names.append("canonical_nodes")
    if config.shuffle and mosaic is None:
        names += ["window"] if config.quick_start else ["window", "quick_start"]
    settings = _shown(config, *names)
    counts = {}
    if mosaic is not None:
        settings |= _shown(mosaic, "partition", "shuffle_block_size")
    elif run is not None:
        counts = {"active shards": run.active_shards()}
    return Stage("shuffle", settings | _shown(config, "batching_method", "device_block"), counts, config.digest)


def _switches(switches: Sequence[Switch]) -> Stage:
    parts = [
        Stage(
            f"from step {switch.step:,}",
            {"version": " ".join(switch.versions)},
            note=f"epoch {switch.epoch}, sample {switch.position:,}",
            digest=switch.digest,
        )
        for switch in switches
    ]
    return Stage("versions", counts={"switches": len(switches)}, parts=tuple(parts))


def _packed(pack: RowPacking, run: RunOrder | None, epoch: int, count_rows: bool | None) -> Stage:
    stage = _of_lengths("pack", pack, {})
    if run is None:
        return stage
    if not counts_rows(run, count_rows):
        note = "describe(count_rows=True) plans the epoch and counts its rows and padding"
        return replace(stage, counts={"documents per epoch": run.num_samples}, note=note)
    order = run.epoch(epoch).order
    assert isinstance(order, PackedRows)
    totals = order.totals()
    counts: dict[str, Any] = {"rows": totals.num_rows, "tokens": totals.num_tokens, "padding tokens": totals.padding}
    counts["padding_percent"] = 100 * totals.padding / max(1, totals.num_rows * pack.row_length)
    if totals.num_long:
        counts |= {"long documents": totals.num_long, "tokens lost": totals.lost_tokens}
    return replace(stage, counts=counts, note=f"in epoch {epoch}")


# The screen


def readable(num_bytes: float) -> str:
    """A number of bytes as text, e.g. ``"12.3 MB"``."""
    unit = 0
    while num_bytes >= 1000 and unit < len(_UNITS) - 1:
        num_bytes = num_bytes / 1000
        unit = unit + 1
    return f"{num_bytes:.{min(unit, 1)}f} {_UNITS[unit]}"


def duration(seconds: float) -> str:
    """Seconds as text with a fitting unit, e.g. ``"26 min"``."""
    if seconds < 1:
        return f"{max(1, round(1000 * seconds))} ms"
    for limit, unit, divisor in ((120, "s", 1), (7200, "min", 60), (172_800, "hours", 3600)):
        if seconds < limit:
            return f"{seconds / divisor:.3g} {unit}"
    return f"{seconds / 86400:,.1f} days"


def _block(texts: Sequence[str], digest: str | None) -> list[str]:
    """Texts in as few lines as keep each whole, if it is no longer than a line; the digest ends the first line."""
    lines: list[str] = []
    for text in texts:
        if lines and len(lines[-1]) + 2 + len(text) <= _ROOM:
            lines[-1] += f"; {text}"
        else:
            lines += textwrap.wrap(text, _ROOM, break_on_hyphens=False)
    first, *others = lines or [""]
    return [f"{first:<{_ROOM}} {(digest or '')[:_DIGITS]}", *others]


def counted(counts: Mapping[str, Any]) -> str:
    """The counts of a stage as text, e.g. ``"892 samples, 15 shards, 61.8 MB"``."""
    text = ""
    for name, value in counts.items():
        if name.endswith("_percent"):
            text += f" ({value:.2f} %)"
            continue
        if name.endswith("bytes"):
            shown = f"{readable(value)} {name.removesuffix('bytes')}".rstrip()
        else:
            amount = f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"
            shown = f"{amount} {_PLURAL.sub('', name, 1) if amount == '1' else name}"
        text += f", {shown}" if text else shown
    return text


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        more = [f"... {len(value):,} in all"] if len(value) > _PARTS else []
        return f"({', '.join([*map(_text, value[:_PARTS]), *more])})"
    return str(getattr(value, "__name__", type(value).__name__)) if callable(value) else str(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, int | float | str | None)
