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
A case whose name begins with a peer's name runs in the Python that ``--mosaic-python`` (or ``--litdata-python``) names,
or in this one if the peer is installed here. With ``--against CHECKOUT``, each case of this package also runs with the
package of that checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import paced_store

# What a case's name begins with, and the module that it needs.
PEERS = {"mosaic": "streaming", "litdata": "litdata", "torchdata": "torchdata", "trl": "trl", "axolotl": "axolotl"}
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
    """

    title: str
    cases: Mapping[str, Callable[[Job], Result]]
    prepare: Callable[[Job], None] | None = None
    pace: paced_store.Pace | None = None


@dataclass(frozen=True)
class Run:
    """A case in one Python, with the package of one checkout."""

    label: str
    case: str
    python: str
    package: Path = CHECKOUT


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
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + _ticks_below(os.getpid()) / os.sysconf("SC_CLK_TCK")


def _ticks_below(pid: int) -> int:
    total = 0
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, _read(path).split()):
            fields = _read(Path(f"/proc/{child}/stat")).rpartition(")")[2].split()
            total += sum(map(int, fields[11:15])) + _ticks_below(child)
    return total


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):  # the thread or process ended
        return path.read_text()
    return ""


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
        title, folder, scratch, case_sizes = json.loads(sys.argv[3])
        cases = {group.title: group.cases for group in groups}[title]
        result = cases[sys.argv[2]](Job(Path(folder), Path(scratch), SimpleNamespace(**case_sizes)))
        print(f"\n{json.dumps(result)}")
        return
    args = _parser(doc, sizes).parse_args()
    chosen = {name: getattr(args, name) or usual[args.smoke] for name, usual in sizes.items()}
    report = {}
    for group in groups:
        runs = _runs(group, args)
        if runs:
            rounds = _measure(group, runs, SimpleNamespace(**chosen), args)
            print(f"\n{group.title}\n{_table(runs, rounds)}", flush=True)
            report[group.title] = rounds
    if args.json:
        args.json.write_text(json.dumps({"python": sys.version, "cpus": os.cpu_count(), "sizes": chosen, **report}))
    failed = [label for rounds in report.values() for label in rounds if not all(rounds[label])]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def _parser(doc: str, sizes: Mapping[str, tuple[int, int]]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="only what this regular expression finds in 'GROUP: CASE'")
    parser.add_argument("--against", type=Path, help="another checkout, whose package runs the same cases in turn")
    parser.add_argument("--json", type=Path, help="write all that was measured to this file")
    parser.add_argument("--smoke", action="store_true", help="tiny data, one round, in this process, without peers")
    for name, (usual, _) in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"{usual:,} without it")
    for peer, module in PEERS.items():
        parser.add_argument(f"--{peer}-python", default=sys.executable, help=f"a Python with {module}")
    return parser


def _runs(group: Group, args: argparse.Namespace) -> list[Run]:
    runs = []
    for case in group.cases:
        peer = re.split(r"\W", case)[0]
        if not re.search(args.only, f"{group.title}: {case}") or (peer in PEERS and args.smoke):
            continue
        python = getattr(args, f"{peer}_python", sys.executable)
        if python == sys.executable and peer in PEERS and not find_spec(PEERS[peer]):
            print(f"{case}: left out; --{peer}-python names a Python with {PEERS[peer]}")
            continue
        runs.append(Run(case, case, python))
        if args.against and peer == "ours":
            runs.append(Run(f"{case} (against)", case, python, args.against.resolve()))
    return runs


def _measure(
    group: Group, runs: list[Run], sizes: SimpleNamespace, args: argparse.Namespace
) -> dict[str, list[Result]]:
    rounds: dict[str, list[Result]] = {run.label: [] for run in runs}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        job = Job(Path(folder), Path(folder), sizes)
        if group.prepare:
            group.prepare(job)
        server = paced_store.serve(job.folder, group.pace) if group.pace else contextlib.nullcontext(("", [0, 0]))
        with server as (endpoint, counts):
            for k in range(1 if args.smoke else args.rounds):
                for run in reversed(runs) if k % 2 else runs:
                    counts[:] = [0, 0]
                    result = _once(group, run, job, endpoint, args.smoke)
                    sent = {"gets": counts[0], "MB sent": counts[1] / 1e6} if endpoint else {}
                    rounds[run.label].append(result and {**result, **sent})
    return rounds


def _once(group: Group, run: Run, job: Job, endpoint: str, here: bool) -> Result:
    # With --smoke, threads of a case may still write to it.
    with tempfile.TemporaryDirectory(dir=job.folder, ignore_cleanup_errors=True) as scratch:
        environment = _environment(run, job.folder, scratch, endpoint)
        if not here:
            return _in_process(run, environment, group.title, str(job.folder), scratch, vars(job.sizes))
        with patch.dict(os.environ, environment):
            return group.cases[run.case](replace(job, scratch=Path(scratch)))


def _environment(run: Run, folder: Path, scratch: str, endpoint: str) -> dict[str, str]:
    environment = {
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONDONTWRITEBYTECODE": "",  # what is imported is compiled once, as where it is installed
        "PYTHONPATH": str(run.package),
        "TMPDIR": scratch,
    }
    if endpoint:
        names = ("S3_ENDPOINT_URL", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
        environment |= dict.fromkeys(names, endpoint) | dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1")
        environment |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
        environment |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true"}
    if endpoint.startswith("https"):
        environment["AWS_CA_BUNDLE"] = str(folder / paced_store.CERTIFICATE)
    return environment


def _in_process(run: Run, environment: Mapping[str, str], *call: Any) -> Result:
    program = str(Path(sys.argv[0]).resolve())
    command = [run.python, program, "--case", run.case, json.dumps(call)]
    # Spark's workers import what is in the folder in which they were started before what PYTHONPATH names.
    where = {"env": {**os.environ, **environment}, "cwd": run.package}
    done = subprocess.run(command, capture_output=True, text=True, check=False, **where)
    if done.returncode:
        print(f"{run.label} failed:\n{done.stderr[-2000:]}", file=sys.stderr)
        return {}
    result: Result = json.loads(done.stdout.splitlines()[-1])
    return result


def _table(runs: list[Run], rounds: Mapping[str, list[Result]]) -> str:
    measured = [result for results in rounds.values() for result in results]
    notes = dict.fromkeys(key for result in measured for key in result if key not in MEASURED)
    rows = [["", "per CPU-s", "per s", "peak MiB", "CPU x", "wall x", *notes]]
    indent = max(len(run.label) for run in runs)
    for run in runs:
        results = rounds[run.label]
        base = rounds[runs[0].label if run.label == run.case else run.case]
        values = [_median(results, key) for key in ("per_cpu_s", "per_s", "peak_mib")]
        values += [_ratio(base, results, key) for key in ("per_cpu_s", "per_s")]
        values += [_median(results, key) for key in notes]
        rows.append([run.label.ljust(indent), *map(_cell, values)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
    return "\n".join([*lines, "x: the first case, or of a row (against) the row above it, over this one"])


def _median(results: list[Result], key: str) -> Any:
    values = [result[key] for result in results if key in result]
    if not values or isinstance(values[0], str):
        return next(iter(values), None)
    return statistics.median(values)


def _ratio(base: list[Result], results: list[Result], key: str) -> float | None:
    pairs = zip(base, results, strict=True)
    return _median([{key: first[key] / other[key]} for first, other in pairs if first and other.get(key)], key)


def _cell(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
