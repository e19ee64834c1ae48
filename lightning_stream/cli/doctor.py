"""``doctor``: what of this machine may hinder a training run, and how fast it reads a dataset."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple

import lightning_stream
from lightning_stream.cache.folder import CacheFolder, cache_root
from lightning_stream.cli.arguments import OpenDataset, add_flags, add_source, datasets_of, imported
from lightning_stream.cli.output import ExitCode, Facts, Output
from lightning_stream.errors import CacheError, LightningStreamError, redact
from lightning_stream.formats.encodings.images import load_images
from lightning_stream.processes import memory_limit, num_cores
from lightning_stream.questions.describe import readable
from lightning_stream.shared_files import scratch_folder

EXAMPLES = """exit codes: 0 if nothing is wrong, 1 if something is

examples:
  lightning-stream doctor
  lightning-stream doctor s3://bucket/train
  lightning-stream doctor s3://bucket/train --read --batch-size 256 --transform my_package.images:augment
"""
# What launchers set, and what the stores read; values of the latter are never printed.
_LAUNCHER = re.compile("(LOCAL_)?(RANK|WORLD_SIZE)|NODE_RANK|MASTER_.*|SLURM_(PROCID|N.*)|OMP_.*|LIGHTNING_STREAM_.*")
_CREDENTIALS = re.compile("AWS_.*|S3_.*|GOOGLE_.*|GCS_.*|AZURE_.*|DATABRICKS_.*|HF_TOKEN")
_FEW_FILES = 4096
_SMALL_SHM = 1 << 30
_LITTLE_DISK = 10 << 30
_MEASURABLE = 0.1  # the part of the downloads that is more than latency, from which on a rate is known
_IMAGES = ("jpeg", "png", "pil", "webp")


class Finding(NamedTuple):
    """What was found about one thing; with a remedy, if it is wrong (``is_wrong``) or may become so."""

    what: str
    found: str
    remedy: str = ""
    is_wrong: bool = False


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of ``doctor``."""
    add_source(parser, nargs="?")
    add_flags(parser, {
        "--read": "measure how fast a loader reads the dataset, what limits it, and the rates that `plan` takes",
        "--batch-size N": "of --read (default: 64)",
        "--num-workers I": "of --read (default: num_workers='auto')",
        "--transform MODULE:FUNCTION": "of --read: the transform of the training run",
        "--seconds F": "of --read: at most so long, and one epoch of a store (default: 10)",
    })  # fmt: skip
    parser.set_defaults(batch_size=64, seconds=10.0)


def run(options: Namespace, out: Output) -> int:
    """Print what was found, and a remedy below each problem; then how fast a dataset is read."""
    if options.read and options.remote is None:
        raise ValueError("--read measures reading a dataset: pass PATH|URL")
    transform = None if options.transform is None else imported(options.transform, "--transform")
    datasets: list[OpenDataset] = []
    findings = []
    for finding in chain(_of_machine(), _of_datasets(options, datasets)):
        findings.append(finding)
        sign = "wrong" if finding.is_wrong else "note" if finding.remedy else "ok"
        out.line(f"{sign:5}  {finding.what:16} {finding.found}")
        out.lines(f"{'':22}{finding.remedy}" if finding.remedy else "")
    num_wrong = sum(finding.is_wrong for finding in findings)
    num_remedies = sum(bool(finding.remedy) for finding in findings)
    out.data = {"findings": [finding._asdict() for finding in findings]}
    out.line(f"{num_wrong} wrong, {num_remedies - num_wrong} to note")
    if options.read and not num_wrong:
        out.data["reading"] = [_read(dataset, transform, options, out) for dataset in datasets]
    return ExitCode.NO if num_wrong else ExitCode.OK


def _of_machine() -> Iterator[Finding]:
    yield Finding("lightning_stream", f"{lightning_stream.__version__}, Python {platform.python_version()}")
    yield Finding("system", f"{platform.system()} {platform.release()}, {platform.machine()}")
    yield Finding("processors", f"{num_cores()} of {os.cpu_count()} may be used")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Finding("memory", readable(int(min(total, memory_limit()))))
    free = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else _SMALL_SHM
    remedy = "Batches of workers pass through it: give the container more, e.g. docker run --shm-size=8g."
    yield Finding("shared memory", f"{readable(free)} free in /dev/shm", remedy if free < _SMALL_SHM else "")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_few = hard != resource.RLIM_INFINITY and hard < _FEW_FILES
    remedy = f"A process maps each shard that it reads: raise the hard limit to {_FEW_FILES:,} (ulimit -Hn)."
    yield Finding("open files", f"{soft:,}, at most {hard:,}", remedy if is_few else "")
    yield _cache_folder()
    yield _devices()
    yield _launcher()
    names = [name for name in sorted(os.environ) if _CREDENTIALS.fullmatch(name)]
    yield Finding("store variables", ", ".join(names) or "none is set")


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
    names = [torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())]
    return Finding("devices", f"torch {torch.__version__}: {', '.join(names) or 'no GPU that it can use'}")


def _launcher() -> Finding:
    shown = [f"{name}={value}" for name, value in sorted(os.environ.items()) if _LAUNCHER.fullmatch(name)]
    rank = os.environ.get("RANK", "0")
    size = os.environ.get("WORLD_SIZE", "1")
    is_wrong = not (rank.isdigit() and size.isdigit() and int(rank) < int(size))
    remedy = "RANK and WORLD_SIZE are numbers, RANK below WORLD_SIZE: start with torchrun or srun, or unset both."
    return Finding("launcher", ", ".join(shown) or "one process", remedy if is_wrong else "", is_wrong)


def _of_datasets(options: Namespace, datasets: list[OpenDataset]) -> Iterator[Finding]:
    """Read the index of every dataset there, which is added to the list, and time it."""
    if options.remote is None:
        return
    begin = time.perf_counter()
    try:
        datasets += datasets_of(options)
    except (LightningStreamError, ValueError, OSError) as error:
        yield Finding("dataset", redact(options.remote), str(error), is_wrong=True)
    took_s = time.perf_counter() - begin
    for dataset in datasets:
        size = f"{dataset.index.num_samples:,} samples"
        yield Finding("dataset", f"{dataset.store.url}: {size}, found in {took_s:.2f} s")


def _loaded(sample: Any) -> Any:
    """A sample whose images are decoded, as a transform does."""
    for name, value in sample.items():
        load_images(name, value)
    return sample


def _read(dataset: OpenDataset, transform: Any, options: Namespace, out: Output) -> Facts:
    """Read batches for a while, and print where the time went, what limits it, and the rates for a plan."""
    from lightning_stream.dataset import StreamingDataset
    from lightning_stream.loader import StreamingDataLoader
    from lightning_stream.monitoring.verdict import verdict_of

    if transform is None and any(kind.startswith(_IMAGES) for kind in dataset.index.columns.values()):
        transform = _loaded
    workers: Any = "auto" if options.num_workers is None else options.num_workers
    with scratch_folder() as folder:
        data = StreamingDataset(streams=[dataset.stream(folder)], shuffle=True, transform=transform)
        loader = StreamingDataLoader(data, options.batch_size, num_workers=workers, persistent_workers=workers != 0)
        end = time.perf_counter() + options.seconds
        for _ in chain.from_iterable(repeat(loader)) if dataset.is_local else loader:  # the cache has a second epoch
            if time.perf_counter() > end:
                break
        stats = loader.stats()
    counted = stats.counters
    rates = {"sample_s": stats.computing_s / max(1, stats.num_samples)}
    flags = f"--sample-ms {1000 * rates['sample_s']:.3g}"
    if counted["shards_fetched"]:
        num_mb = counted["shards_fetched"] * float(dataset.index.raw_bytes.mean()) / 1e6
        rates["unpack_s_per_mb"] = (counted["verify_s"] + counted["decompress_s"]) / num_mb
        rates["latency_s"] = counted["first_byte_s"] / max(1, counted["requests"])
        flags += f" --unpack-ms {1000 * rates['unpack_s_per_mb']:.3g} --link latency={1000 * rates['latency_s']:.3g}ms"
        receiving_s = counted["download_s"] - rates["latency_s"] * counted["shards_fetched"]
        if receiving_s > _MEASURABLE * counted["download_s"]:
            rates["connection_bytes_per_s"] = counted["fetched_bytes"] / receiving_s
            flags += f",connection={max(1, rates['connection_bytes_per_s'] / 1e6):.0f}mb"
    out.line(f"{dataset.store.url}, read with num_workers={stats.settings.num_workers}:")
    out.lines(f"{stats}\nfor plan: {flags}")
    speed = {"samples_per_s": stats.samples_per_s, "download_mb_s": stats.download_mb_s}
    return {"url": dataset.store.url, **speed, "rates": rates, "verdict": asdict(verdict_of(stats))}
