"""``doctor``: what of this machine may hinder a training run, and what to do about it."""

from __future__ import annotations

import argparse
import os
import platform
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import lightning_stream
from lightning_stream.cache.folder import CacheFolder, cache_root
from lightning_stream.cli.arguments import FoundDataset, add_store_options, datasets_at
from lightning_stream.cli.output import ExitCode, Output
from lightning_stream.errors import CacheError, LightningStreamError, redact
from lightning_stream.order.chain import readable
from lightning_stream.processes import cgroup_limit

HELP = "check this machine: packages, processors, memory, cache folder, variables, a store"
EXAMPLES = """exit codes: 0 if nothing is wrong, 1 if something is

examples:
  lightning-stream doctor
  lightning-stream doctor s3://bucket/train
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
_READ_BYTES = 8 << 20  # of a shard


class Finding(NamedTuple):
    """What was found about one thing; with a remedy, if it is wrong (``is_wrong``) or may become so."""

    what: str
    found: str
    remedy: str = ""
    is_wrong: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``doctor``."""
    parser.add_argument("remote", metavar="PATH|URL", nargs="?", help="a dataset to read from")
    add_store_options(parser)


def run(options: argparse.Namespace, out: Output) -> int:
    """Print what was found, and a remedy below each problem."""
    findings = []
    for finding in _findings(options):
        findings.append(finding)
        sign = "wrong" if finding.is_wrong else "note" if finding.remedy else "ok"
        out.line(f"{sign:5}  {finding.what:16} {finding.found}")
        if finding.remedy:
            out.line(f"{'':24}{finding.remedy}")
    wrong, notes = (sum(1 for one in findings if bool(one.remedy) and one.is_wrong is kind) for kind in (True, False))
    out.data = {"findings": [one._asdict() for one in findings]}
    out.line(f"{wrong} wrong, {notes} to note")
    return ExitCode.NO if wrong else ExitCode.OK


def _findings(options: argparse.Namespace) -> Iterator[Finding]:
    yield Finding("lightning_stream", f"{lightning_stream.__version__}, Python {platform.python_version()}")
    yield Finding("system", f"{platform.system()} {platform.release()}, {platform.machine()}")
    yield Finding("packages", ", ".join(f"{name} {version}" for name, version in _versions().items()) or "none")
    yield _processors()
    yield _memory()
    yield _shared_memory()
    yield _open_files()
    yield _cache_folder()
    yield _devices()
    yield _launcher(os.environ)
    given = [name for name in _CREDENTIALS if os.environ.get(name)]
    yield Finding("credentials", f"set: {', '.join(given)}" if given else "no variable of a store is set")
    if options.remote is not None:
        yield from _stores(options)


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # noqa: PERF203 - there are sixteen
            continue
    return found


def _processors() -> Finding:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = (cgroup_limit("cpu.max") or "max 1").partition(" ")
    share = allowed if quota == "max" else int(quota) / int(period)
    found = f"{allowed} of {os.cpu_count()} may be used"
    if share < allowed:
        return Finding(
            "processors", f"{found}; a quota allows {share:g}", f"Use at most {max(1, int(share))} workers per machine."
        )
    return Finding("processors", found)


def _memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = cgroup_limit("memory.max")
    if limit and limit != "max" and int(limit) < total:
        return Finding("memory", f"{readable(int(limit))}, a limit below the machine's {readable(total)}")
    return Finding("memory", readable(total))


def _shared_memory() -> Finding:
    if not Path("/dev/shm").is_dir():
        return Finding("shared memory", "there is no /dev/shm: workers send batches through pipes")
    free = shutil.disk_usage("/dev/shm").free
    remedy = "Batches of workers pass through it: give the container more, e.g. docker run --shm-size=8g."
    return Finding("shared memory", f"{readable(free)} free in /dev/shm", remedy if free < _SMALL_SHM else "")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_few = hard != resource.RLIM_INFINITY and hard < _FEW_FILES
    remedy = f"A process maps each shard that it reads: raise the hard limit to {_FEW_FILES:,} (ulimit -Hn)."
    return Finding("open files", f"{soft:,}, at most {hard:,}", remedy if is_few else "")


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
    counts = {name: given[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE") if name in given}
    wrong = [f"{name}={value}" for name, value in counts.items() if not value.isdigit()]
    if wrong:
        return Finding("launcher", shown, f"{', '.join(wrong)} must be a number: start with torchrun or srun.", True)
    if {"RANK", "WORLD_SIZE"} <= counts.keys() and int(counts["RANK"]) >= int(counts["WORLD_SIZE"]):
        return Finding("launcher", shown, "RANK must be below WORLD_SIZE: start with torchrun or srun.", True)
    if len({"RANK", "WORLD_SIZE"} & counts.keys()) == 1:
        return Finding("launcher", shown, "RANK and WORLD_SIZE belong together: set both, or none.", True)
    return Finding("launcher", shown)


def _stores(options: argparse.Namespace) -> Iterator[Finding]:
    """Read the index of every dataset there, and some MB of a shard, and time them."""
    try:
        begin = time.perf_counter()
        found = datasets_at(options.remote, options.store_options)
    except (LightningStreamError, ValueError, OSError) as error:
        yield Finding("store", redact(options.remote), str(error), is_wrong=True)
        return
    took = f" in {time.perf_counter() - begin:.2f} s" if len(found) == 1 else ""
    yield from (_store(dataset, took) for dataset in found)


def _store(dataset: FoundDataset, took: str) -> Finding:
    about = f"{dataset.store.url}: index of {dataset.index.num_shards:,} shards{took}"
    try:
        if not dataset.index.num_shards:
            return Finding("store", about)
        first_s, bytes_per_s = _timed_read(dataset)
        rate = readable(int(bytes_per_s))
        return Finding("store", f"{about}; first byte after {1000 * first_s:.0f} ms, {rate}/s on one connection")
    except (LightningStreamError, ValueError, OSError) as error:
        return Finding("store", about, str(error), is_wrong=True)


def _timed_read(dataset: FoundDataset) -> tuple[float, float]:
    """Read some MB of the first shard, without the cache: seconds to the first byte, and bytes per second."""
    (raw, compressed), *_ = dataset.index.entry(0).files
    file = compressed or raw
    name = file.basename if file.origin is None else file.origin.name
    end = min(file.num_bytes, _READ_BYTES) if file.origin is None else _READ_BYTES
    began, first_s, num_bytes = time.perf_counter(), 0.0, 0
    with dataset.store.open(name, 0, end) as body:
        for chunk in body:
            first_s = first_s or time.perf_counter() - began
            num_bytes += len(chunk)
    return first_s, num_bytes / (time.perf_counter() - began)
