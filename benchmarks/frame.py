"""The frame of all benchmarks: cases in fresh processes, in turn, beside peers and beside another checkout.

A program makes data and has cases. A case sets up, starts a `Clock`, and returns what the clock measured::

    def ours(job: Job) -> Result:
        loader = StreamingDataLoader(StreamingDataset(local=job.folder / "mds"), batch_size=256)
        clock = Clock()
        return clock.stop(sum(len(batch["tokens"]) for batch in loader))

    if __name__ == "__main__":
        main(__doc__, [Group("rows", {"ours": ours, "mosaic": mosaic}, prepare)], rows=(65_536, 512))

Every round runs each case once, every second round in reverse order. CPU-seconds are those of the process and of all
that it started: this is what a loader takes from the training. Ratios are taken within a round; the table has medians.
A case whose name has a peer's name in it runs in the Python that ``--mosaic-python`` (or another peer's option) or
``LIGHTNING_STREAM_MOSAIC_PYTHON`` names, or in this one if the peer is installed here. With ``--against CHECKOUT``,
each case of this package also runs with the package of that checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import paced_store

# The word in a case's name: the environment that it runs in, and the module that this must have.
PEERS = {
    "mosaic": ("mosaic", "streaming"),
    "litdata": ("litdata", "litdata"),
    "composer": ("composer", "composer"),
    "trl": ("packers", "trl"),
    "grain": ("packers", "grain"),
    "lancedb": ("packers", "lancedb"),
}
CHECKOUT = Path(__file__).resolve().parent.parent
MEASURED = ("samples", "cpu_s", "wall_s", "peak_mib", "per_cpu_s", "per_s")
Result = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What a case gets: the folder that `prepare` filled, an empty one of its own, and the sizes of the data."""

    folder: Path
    scratch: Path
    sizes: SimpleNamespace


@dataclass(frozen=True)
class Group:
    """Cases that are compared with the first one of them.

    Attributes:
        title: Stands above the table.
        cases: What each case runs, by name. Those of this package begin with "ours".
        prepare: Writes the data, once.
        pace: The folder is also a bucket of an S3 server, at ``AWS_ENDPOINT_URL``, that is as slow as this.
        tls: The server has a certificate.
    """

    title: str
    cases: Mapping[str, Callable[[Job], Result]]
    prepare: Callable[[Job], None] | None = None
    pace: paced_store.Pace | None = None
    tls: bool = False


@dataclass(frozen=True)
class Run:
    """A case in one Python."""

    case: str
    python: str
    package: Path | None = None

    @property
    def label(self) -> str:
        """The case, and whether it runs with the package of another checkout."""
        return self.case if self.package is None else f"{self.case} (against)"


class Clock:
    """CPU and wall seconds since it was made."""

    def __init__(self) -> None:
        self._cpu_s = cpu_s()
        self._began = time.perf_counter()

    @property
    def wall_s(self) -> float:
        """Seconds so far."""
        return time.perf_counter() - self._began

    def stop(self, samples: int = 0, **notes: Any) -> Result:
        """What was measured; notes are further columns of the table."""
        wall_s = self.wall_s
        cpu = max(cpu_s() - self._cpu_s, 1e-9)
        speeds = {"per_cpu_s": samples / cpu, "per_s": samples / wall_s}
        return {"samples": samples, "cpu_s": cpu, "wall_s": wall_s, "peak_mib": peak_mib(), **speeds, **notes}


def cpu_s() -> float:
    """Of this process, of its children that ended, and of all processes that came of it and run."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    return total + sum(map(_ticks, _descendants(os.getpid()))) / os.sysconf("SC_CLK_TCK")


def _descendants(pid: int) -> Iterator[int]:
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread ended
            for child in map(int, path.read_text().split()):
                yield child
                yield from _descendants(child)


def _ticks(pid: int) -> int:
    with contextlib.suppress(OSError):  # the process ended
        stat = Path(f"/proc/{pid}/stat").read_text()
        return sum(map(int, stat.rsplit(")", 1)[1].split()[11:15]))
    return 0


def peak_mib() -> float:
    """The most memory that this process, or the largest child that ended, had at once."""
    here = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return max(int(here[1]) if here else 0, children) / 1024


def main(doc: str, groups: Sequence[Group], **sizes: tuple[int, int]) -> None:
    """Run a program: all groups, or in a process that was started for it, one case.

    Args:
        doc: What the program's help says.
        groups: What is measured.
        sizes: Options of the program: the usual number, and the one of ``--smoke``.
    """
    if sys.argv[1:2] == ["--case"]:
        sys.stdout.write(f"\n{json.dumps(_case(groups, *json.loads(sys.argv[2])))}\n")
        return
    args = _parser(doc, groups, sizes).parse_args()
    chosen = {name: getattr(args, name) or usual[args.smoke] for name, usual in sizes.items()}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        report = dict(_tables(groups, args, Job(Path(folder), Path(folder), SimpleNamespace(**chosen))))
    if args.json:
        args.json.write_text(json.dumps({"python": sys.version, "cpus": os.cpu_count(), "sizes": chosen, **report}))
    failed = [label for rounds in report.values() for label in rounds if not all(rounds[label])]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def _case(groups: Sequence[Group], title: str, case: str, folder: str, scratch: str, sizes: dict[str, int]) -> Result:
    (group,) = [group for group in groups if group.title == title]
    return group.cases[case](Job(Path(folder), Path(scratch), SimpleNamespace(**sizes)))


def _tables(
    groups: Sequence[Group], args: argparse.Namespace, job: Job
) -> Iterator[tuple[str, dict[str, list[Result]]]]:
    prepared = set()
    for group in groups:
        runs = _runs(group, args) if args.group in group.title else []
        if not runs:
            continue
        if group.prepare and group.prepare not in prepared:
            group.prepare(job)
            prepared.add(group.prepare)
        rounds = _measure(group, runs, job, args)
        sys.stdout.write(f"\n{group.title}\n{_table(runs, rounds)}\n")
        sys.stdout.flush()
        yield group.title, rounds


def _parser(doc: str, groups: Sequence[Group], sizes: Mapping[str, tuple[int, int]]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--group", default="", help="only groups with this text in the title")
    parser.add_argument("--only", default="", help="only cases with this text in the name")
    parser.add_argument("--against", type=Path, help="another checkout, whose package runs the same cases in turn")
    parser.add_argument("--json", type=Path, help="write all that was measured to this file")
    parser.add_argument("--folder", type=Path, help="where the data is written, and removed again")
    parser.add_argument("--smoke", action="store_true", help="tiny data, one round, in this process, without peers")
    for name, (usual, _) in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"{usual:,} without it")
    peers = {_peer(case) for group in groups for case in group.cases} - {None}
    for name in sorted({PEERS[peer][0] for peer in peers if peer}):
        variable = f"LIGHTNING_STREAM_{name.upper()}_PYTHON"
        parser.add_argument(f"--{name}-python", default=os.environ.get(variable), help=f"or {variable}")
    return parser


def _peer(case: str) -> str | None:
    return next((word for word in re.findall(r"\w+", case) if word in PEERS), None)


def _runs(group: Group, args: argparse.Namespace) -> list[Run]:
    runs = []
    for case in group.cases:
        peer = _peer(case)
        if args.only not in case or (peer and args.smoke):
            continue
        python = sys.executable
        if peer:
            environment, module = PEERS[peer]
            python = getattr(args, f"{environment}_python") or (find_spec(module) and python)
        if not python:
            sys.stdout.write(f"{case}: left out; --{environment}-python names a Python with {module}\n")
            continue
        runs.append(Run(case, python))
        if args.against and case.startswith("ours"):
            runs.append(Run(case, python, args.against.resolve()))
    return runs


def _measure(group: Group, runs: list[Run], job: Job, args: argparse.Namespace) -> dict[str, list[Result]]:
    if group.tls:
        paced_store.make_certificate(job.folder)
    rounds: dict[str, list[Result]] = {run.label: [] for run in runs}
    server = paced_store.serve(job.folder, group.pace, tls=group.tls) if group.pace else contextlib.nullcontext("")
    with server as endpoint:
        for number in range(1 if args.smoke else args.rounds):
            for run in reversed(runs) if number % 2 else runs:
                rounds[run.label].append(_once(group, run, job, endpoint, args.smoke))
    return rounds


def _once(group: Group, run: Run, job: Job, endpoint: str, here: bool) -> Result:
    with tempfile.TemporaryDirectory(dir=job.folder) as scratch:
        run_job = Job(job.folder, Path(scratch), job.sizes)
        environment = _environment(run, run_job, endpoint, group.tls)
        counts(endpoint)
        if here and not run.package:
            result = _here(group.cases[run.case], run_job, environment)
        else:
            result = _in_process(group, run, run_job, environment)
        return result and {**result, **counts(endpoint)}


def _environment(run: Run, job: Job, endpoint: str, tls: bool) -> dict[str, str]:
    paths = [str(run.package or CHECKOUT), str(CHECKOUT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    environment = {
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONDONTWRITEBYTECODE": "",  # what is imported is compiled once, as where it is installed
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TMPDIR": str(job.scratch),
    }
    if endpoint:
        names = ("S3_ENDPOINT_URL", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
        environment |= dict.fromkeys(names, endpoint) | dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1")
        environment |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_ALLOW_HTTP": "true"}
        environment |= {"AWS_DEFAULT_REGION": "us-east-1"}
    if tls:
        environment["AWS_CA_BUNDLE"] = str(job.folder / paced_store.CERTIFICATE)
    return environment


def _here(case: Callable[[Job], Result], job: Job, environment: Mapping[str, str]) -> Result:
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        return case(job)
    finally:
        os.environ.clear()
        os.environ.update(before)


def _in_process(group: Group, run: Run, job: Job, environment: Mapping[str, str]) -> Result:
    call = [group.title, run.case, str(job.folder), str(job.scratch), vars(job.sizes)]
    command = [run.python, sys.argv[0], "--case", json.dumps(call)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)
    if done.returncode:
        sys.stderr.write(f"{run.label} failed:\n{done.stderr[-2000:]}\n")
        return {}
    result: Result = json.loads(done.stdout.splitlines()[-1])
    return result


def counts(endpoint: str) -> dict[str, float]:
    """Requests and megabytes that the server answered since it was asked last."""
    if not endpoint:
        return {}
    context = ssl._create_unverified_context() if endpoint.startswith("https") else None  # noqa: SLF001
    with urllib.request.urlopen(f"{endpoint}/_counts", context=context) as answer:
        numbers = json.load(answer)
    return {"gets": numbers["gets"], "MB sent": numbers["bytes"] / 1e6}


def _table(runs: list[Run], rounds: Mapping[str, list[Result]]) -> str:
    results = {label: [result for result in listed if result] for label, listed in rounds.items()}
    measured = [result for listed in results.values() for result in listed]
    notes = dict.fromkeys(key for result in measured for key in result if key not in MEASURED)
    rows = [["", "per CPU-s", "per s", "peak MiB", "CPU x", "wall x", *notes]]
    for run in runs:
        listed, base = results[run.label], results[run.case if run.package else runs[0].label]
        values = [_median(listed, key) for key in ("per_cpu_s", "per_s", "peak_mib")]
        values += [_ratio(base, listed, key) for key in ("per_cpu_s", "per_s")]
        values += [_median(listed, key) for key in notes]
        rows.append([run.label, *map(_cell, values)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = (f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True))
        lines.append(f"{first:{widths[0]}}  " + "  ".join(cells))
    return "\n".join([*lines, "x: the first case, or of a row (against) the row above it, over this one"])


def _median(results: list[Result], key: str) -> Any:
    values = [result[key] for result in results if key in result]
    if not values or isinstance(values[0], str):
        return next(iter(values), None)
    return statistics.median(values)


def _ratio(base: list[Result], results: list[Result], key: str) -> float | None:
    pairs = zip(base, results, strict=False)
    ratios = [first[key] / other[key] for first, other in pairs if other[key]]
    return statistics.median(ratios) if ratios else None


def _cell(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
