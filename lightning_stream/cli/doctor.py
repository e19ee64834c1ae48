"""``doctor``: what of this machine may hinder a training run, and how fast it reads a dataset."""

from __future__ import annotations

import argparse
import os
import platform
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from importlib import metadata
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple

import lightning_stream
from lightning_stream.cache.folder import CacheFolder, cache_root
from lightning_stream.cli.arguments import FoundDataset, add_reading, add_store_options, datasets_of, imported
from lightning_stream.cli.output import ExitCode, Output
from lightning_stream.errors import CacheError, LightningStreamError, redact
from lightning_stream.formats.encodings.images import load_images
from lightning_stream.order.chain import readable
from lightning_stream.processes import cgroup_limit, num_cores
from lightning_stream.shared_files import scratch_folder

EXAMPLES = """exit codes: 0 if nothing is wrong, 1 if something is

examples:
  lightning-stream doctor
  lightning-stream doctor s3://bucket/train
  lightning-stream doctor s3://bucket/train --read --batch-size 256 --transform my_package.images:augment
"""
_PACKAGES = (
    "torch", "numpy", "lightning", "mosaicml", "torchvision", "simplejpeg", "pillow", "zstandard", "brotli", "boto3",
    "google-cloud-storage", "azure-storage-blob", "pyarrow", "pyspark", "deltalake", "hydra-core",
)  # fmt: skip
# What launchers set, and what the stores read; values of the latter are never printed.
_LAUNCHER = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT",
    "SLURM_PROCID", "SLURM_NTASKS", "SLURM_NNODES", "OMP_NUM_THREADS", "LIGHTNING_STREAM_CACHE",
)  # fmt: skip
_CREDENTIALS = (
    "AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "S3_ENDPOINT_URL", "GOOGLE_APPLICATION_CREDENTIALS",
    "AZURE_STORAGE_CONNECTION_STRING", "DATABRICKS_TOKEN", "HF_TOKEN",
)  # fmt: skip
_FEW_FILES, _SMALL_SHM, _LITTLE_DISK = 4096, 1 << 30, 10 << 30
_IMAGES = ("jpeg", "png", "pil", "webp")
_TIMED_BYTES, _TIMED_SHARDS = 8 << 20, 3


class Finding(NamedTuple):
    """What was found about one thing; with a remedy, if it is wrong (``is_wrong``) or may become so."""

    what: str
    found: str
    remedy: str = ""
    is_wrong: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``doctor``."""
    parser.add_argument("remote", metavar="PATH|URL", nargs="?", help="a dataset to read from")
    text = "measure how fast a loader reads the dataset, what limits it, and the rates that `plan` takes"
    parser.add_argument("--read", action="store_true", help=text)
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="of --read (default: 64)")
    parser.add_argument("--num-workers", type=int, metavar="N", help="of --read (default: as num_workers='auto')")
    parser.add_argument("--transform", metavar="MODULE:FUNCTION", help="of --read: the transform of the training run")
    text = "of --read: at most so long, and at most one epoch (default: 10)"
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S", help=text)
    add_reading(parser)
    add_store_options(parser)


def run(options: argparse.Namespace, out: Output) -> int:
    """Print what was found, and a remedy below each problem; then how fast a dataset is read."""
    if options.read and (options.remote is None or options.batch_size < 1 or options.seconds <= 0):
        raise ValueError("--read reads a dataset: pass PATH|URL, a --batch-size of at least 1, and --seconds above 0")
    transform = None if options.transform is None else imported(options.transform, "--transform")
    datasets: list[FoundDataset] = []
    findings = []
    for finding in (*_of_machine(), *_of_datasets(options, datasets)):
        findings.append(finding)
        sign = "wrong" if finding.is_wrong else "note" if finding.remedy else "ok"
        out.line(f"{sign:5}  {finding.what:16} {finding.found}")
        if finding.remedy:
            out.line(f"{'':24}{finding.remedy}")
    num_wrong = sum(finding.is_wrong for finding in findings)
    num_notes = sum(bool(finding.remedy) for finding in findings) - num_wrong
    out.data = {"findings": [finding._asdict() for finding in findings]}
    out.line(f"{num_wrong} wrong, {num_notes} to note")
    if options.read and not num_wrong:
        out.data["reading"] = [_read(dataset, transform, options, out) for dataset in datasets]
    return ExitCode.NO if num_wrong else ExitCode.OK


def _of_machine() -> Iterator[Finding]:
    yield Finding("lightning_stream", f"{lightning_stream.__version__}, Python {platform.python_version()}")
    yield Finding("system", f"{platform.system()} {platform.release()}, {platform.machine()}")
    yield Finding("packages", ", ".join(_versions()) or "none")
    allowed, cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(), num_cores()
    remedy = "" if cores == allowed else f"Use at most {cores} workers per machine."
    yield Finding("processors", f"{cores} of {os.cpu_count()} may be used", remedy)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = cgroup_limit("memory.max") or "max"
    is_limited = limit != "max" and int(limit) < total
    yield Finding("memory", f"{readable(int(limit))} of {readable(total)}" if is_limited else readable(total))
    yield _shared_memory()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_few = hard != resource.RLIM_INFINITY and hard < _FEW_FILES
    remedy = f"A process maps each shard that it reads: raise the hard limit to {_FEW_FILES:,} (ulimit -Hn)."
    yield Finding("open files", f"{soft:,}, at most {hard:,}", remedy if is_few else "")
    yield _cache_folder()
    yield _devices()
    yield _launcher(os.environ)
    names = [name for name in _CREDENTIALS if os.environ.get(name)]
    yield Finding("credentials", f"set: {', '.join(names)}" if names else "no variable of a store is set")


def _versions() -> Iterator[str]:
    for name in _PACKAGES:
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:  # noqa: PERF203 - there are sixteen
            continue


def _shared_memory() -> Finding:
    if not Path("/dev/shm").is_dir():
        return Finding("shared memory", "there is no /dev/shm: workers send batches through pipes")
    free = shutil.disk_usage("/dev/shm").free
    remedy = "Batches of workers pass through it: give the container more, e.g. docker run --shm-size=8g."
    return Finding("shared memory", f"{readable(free)} free in /dev/shm", remedy if free < _SMALL_SHM else "")


def _cache_folder() -> Finding:
    root = cache_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root, prefix=".doctor-") as folder:
            CacheFolder(Path(folder)).prepare()  # it probes the locks
    except (CacheError, OSError) as error:
        return Finding("cache", str(root), f"{error} Or set LIGHTNING_STREAM_CACHE to another folder.", is_wrong=True)
    free = shutil.disk_usage(root).free
    remedy = "Pass cache_limit=, or put it on a larger disk by LIGHTNING_STREAM_CACHE."
    return Finding("cache", f"{root}, {readable(free)} free; locks work", remedy if free < _LITTLE_DISK else "")


def _devices() -> Finding:
    try:
        import torch
    except ImportError:
        return Finding("devices", "torch is not installed", "pip install torch", is_wrong=True)
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return Finding("devices", ", ".join(names) or "no GPU that torch can use")


def _launcher(variables: Mapping[str, str]) -> Finding:
    given = {name: variables[name] for name in _LAUNCHER if variables.get(name)}
    shown = ", ".join(f"{name}={value}" for name, value in given.items()) or "no variable is set: one process"
    rank, size = given.get("RANK"), given.get("WORLD_SIZE")
    is_right = rank is size is None or (
        rank is not None and size is not None and rank.isdigit() and size.isdigit() and int(rank) < int(size)
    )
    remedy = "RANK and WORLD_SIZE are numbers, RANK below WORLD_SIZE: start with torchrun or srun, or unset both."
    return Finding("launcher", shown, "" if is_right else remedy, is_wrong=not is_right)


def _of_datasets(options: argparse.Namespace, datasets: list[FoundDataset]) -> Iterator[Finding]:
    """Read the index of every dataset there, which is added to the list, and some MB of a shard, and time them."""
    if options.remote is None:
        return
    begin = time.perf_counter()
    try:
        datasets += datasets_of(options)
        took = f" in {time.perf_counter() - begin:.2f} s" if len(datasets) == 1 else ""
        for dataset in datasets:
            about = f"{dataset.store.url}: index of {dataset.index.num_shards:,} shards{took}"
            if not dataset.is_local and dataset.index.num_shards:
                first_s, rate = _link(dataset)
                about += f"; first byte after {1000 * first_s:.0f} ms, {readable(int(rate))}/s on one connection"
            yield Finding("store", about)
    except (LightningStreamError, ValueError, OSError) as error:
        yield Finding("store", redact(options.remote), str(error), is_wrong=True)


def _link(dataset: FoundDataset) -> tuple[float, float]:
    """Read some MB of some shards on one connection: seconds to the first byte, and bytes per second after it."""
    latencies, rates = [], []
    for shard in range(min(_TIMED_SHARDS, dataset.index.num_shards)):
        (raw, compressed), *_ = dataset.index.entry(shard).files
        file = compressed or raw
        name = file.basename if file.origin is None else file.origin.name
        end = _TIMED_BYTES if file.origin else min(file.num_bytes, _TIMED_BYTES)
        begin, first_s, num_bytes = time.perf_counter(), 0.0, 0
        with dataset.store.open(name, 0, end) as body:
            for chunk in body:
                first_s = first_s or time.perf_counter() - begin
                num_bytes += len(chunk)
        latencies.append(first_s)
        rates.append(num_bytes / max(1e-9, time.perf_counter() - begin - first_s))
    return statistics.median(latencies), statistics.median(rates)


def _loaded(sample: Any) -> Any:
    """A sample whose images are decoded, as a transform does."""
    for name, value in sample.items() if isinstance(sample, dict) else ():
        load_images(name, value)
    return sample


def _read(
    dataset: FoundDataset, transform: Callable[[Any], Any] | None, options: argparse.Namespace, out: Output
) -> dict[str, Any]:
    """Read batches for a while, and print where the time went, what limits it, and the rates for a plan."""
    from lightning_stream import StreamingDataLoader, StreamingDataset
    from lightning_stream.loading.verdict import verdict_of

    with scratch_folder() as folder:
        stream = dataset.stream(folder, options.store_options)
        has_images = any(kind.startswith(_IMAGES) for kind in dataset.index.columns.values())
        data = StreamingDataset(
            streams=[stream], shuffle=True, transform=transform or (_loaded if has_images else None)
        )
        workers: Any = "auto" if options.num_workers is None else options.num_workers
        loader = StreamingDataLoader(data, options.batch_size, num_workers=workers, persistent_workers=workers != 0)
        end = time.perf_counter() + options.seconds
        for _ in chain.from_iterable(repeat(loader)) if dataset.is_local else loader:  # the cache has a second epoch
            if time.perf_counter() > end:
                break
        stats = loader.stats()
    counted = stats.counters
    num_mb = counted["shards_fetched"] * float(dataset.index.raw_bytes.mean()) / 1e6
    making_s = sum(stats.work.values()) - stats.work["fetching"]
    rates = {"sample_s": making_s / max(1, stats.num_samples)}
    if not dataset.is_local:
        rates["latency_s"], rates["connection_bytes_per_s"] = _link(dataset)
        rates["unpack_s_per_mb"] = (counted["verify_s"] + counted["decompress_s"]) / max(1e-9, num_mb)
    out.line(f"{dataset.store.url}, read with num_workers={stats.settings.num_workers}:")
    out.lines(str(stats))
    out.line(f"  for plan: {_flags(rates)}")
    speed = {"samples_per_s": stats.samples_per_s, "download_mb_s": stats.download_mb_s}
    return {"url": dataset.store.url, **speed, "rates": rates, "verdict": asdict(verdict_of(stats))}


def _flags(rates: Mapping[str, float]) -> str:
    """The rates as flags of ``plan``."""
    flags = f"--sample-ms {1000 * rates['sample_s']:.3g}"
    if "latency_s" in rates:
        latency, connection = 1000 * rates["latency_s"], rates["connection_bytes_per_s"] / 1e6
        flags += f" --unpack-ms {1000 * rates['unpack_s_per_mb']:.3g}"
        flags += f" --link latency={latency:.3g}ms,connection={connection:.0f}mb"
    return flags
