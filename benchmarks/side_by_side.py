"""Runs one measurement in several environments, interleaved, and prints the medians as a table.

A benchmark is a file with functions named after contenders. Each is run in a process of its own, in the Python that has
the contender: this one, or those that the environment names:

    LIGHTNING_STREAM_MOSAIC_PYTHON=/path/to/python  LIGHTNING_STREAM_LITDATA_PYTHON=/path/to/python

A contender returns how many samples it handled and begins counting itself, by `Clock`. Times are CPU-seconds of the
process and its children, and wall seconds. Ratios, of the first
contender over each, are medians of those within one round.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PYTHONS = {"mosaic": "LIGHTNING_STREAM_MOSAIC_PYTHON", "litdata": "LIGHTNING_STREAM_LITDATA_PYTHON"}


class Clock:
    """CPU and wall seconds since it was made, children included."""

    def __init__(self) -> None:
        self._cpu, self._wall = self._now(), time.perf_counter()

    @staticmethod
    def _now() -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(one.ru_utime + one.ru_stime for one in used)

    def stop(self, samples: int, **notes: object) -> dict:
        return {"samples": samples, "cpu": self._now() - self._cpu, "wall": time.perf_counter() - self._wall, **notes}


def main(file: str, contenders: dict, prepare, title: str = "") -> None:
    """Run a benchmark file: as the parent of all contenders, or as one of them.

    A file may call it several times, for groups of contenders with names of their own.

    Args:
        file: The benchmark's own path.
        contenders: Function by name; "mosaic..." and "litdata..." run in their own environments.
        prepare: Called once with the data folder by the parent, to write what is read.
        title: Printed above the table.
    """
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--contender")
    parser.add_argument("--only", nargs="*")
    args = parser.parse_args()
    if args.contender:
        if args.contender in contenders:
            sys.stdout.write(json.dumps(contenders[args.contender](args.folder)) + "\n")
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        prepare(folder)
        names = [name for name in args.only or contenders if name in contenders]
        chosen = {name: python for name in names if (python := _python(name))}
        rounds = [
            {name: _run(file, name, python, folder) for name, python in chosen.items()} for _ in range(args.rounds)
        ]
    sys.stdout.write(title + "\n" if title and chosen else "")
    _print(rounds)


def _python(contender: str) -> str | None:
    variable = next((v for name, v in PYTHONS.items() if contender.startswith(name)), None)
    if variable is None:
        return sys.executable
    if not os.environ.get(variable):
        sys.stdout.write(f"{contender}: left out, {variable} is not set\n")
    return os.environ.get(variable)


def _run(file: str, contender: str, python: str, folder: Path) -> dict:
    command = [python, file, "--contender", contender, "--folder", str(folder)]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONDONTWRITEBYTECODE": "",  # what is imported on the way is compiled once, as where it is installed
        "PYTHONPATH": os.pathsep.join([str(Path(file).parent), os.environ.get("PYTHONPATH", "")]),
    }
    result = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if result.returncode:
        sys.stderr.write(f"{contender} failed:\n{result.stderr[-2000:]}\n")
        return {"samples": 0, "cpu": float("nan"), "wall": float("nan")}
    return json.loads(result.stdout.splitlines()[-1])


def _print(rounds: list[dict]) -> None:
    if not rounds[0]:
        return
    first = next(iter(rounds[0]))
    lines = [f"{'':26}{'per CPU-s':>12}{'per s':>12}{'ratio CPU':>11}{'ratio wall':>11}  notes"]
    for name in rounds[0]:
        speed = {key: statistics.median(r[name]["samples"] / r[name][key] for r in rounds) for key in ("cpu", "wall")}
        ratio = {
            key: statistics.median(
                (r[first]["samples"] / r[first][key]) / (r[name]["samples"] / r[name][key] or 1e-9) for r in rounds
            )
            for key in ("cpu", "wall")
        }
        notes = {key: value for key, value in rounds[0][name].items() if key not in ("samples", "cpu", "wall")}
        row = f"{name:26}{speed['cpu']:12,.0f}{speed['wall']:12,.0f}{ratio['cpu']:10.2f}x{ratio['wall']:10.2f}x"
        lines.append(f"{row}  {notes or ''}")
    sys.stdout.write("\n".join(lines) + f"\nratios: {first} over the contender, medians of {len(rounds)} rounds\n")
