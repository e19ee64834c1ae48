"""Verdicts beside real causes: is the cause named, does the remedy help, and as much as the verdict says?

Each loop has one fault: slow code, a slow store, a setting. It runs in a process of its own, and again with what its
verdict proposes: the setting that it names, or the change by hand that it asks for. The step is a wait, as that of a
device is, or computes. Run this on a machine that does nothing else::

    python benchmarks/verdicts.py --only "transform|store"
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np
from frame import CHECKOUT

sys.path.append(str(CHECKOUT / "tests"))
from servers.fault_proxy import FaultProxy, Plan
from servers.web import WebServer

from lightning_stream import MDSWriter, StreamingDataLoader, StreamingDataset
from lightning_stream.monitoring.verdict import verdict_of

SLACK = 0.3  # a gain is within so much of what the verdict says
HELD = 0.95  # a remedy that makes a loop slower than this has done harm: clocks are not exact
Values = dict[str, Any]


@dataclass(frozen=True)
class Loop:
    """One fault.

    Attributes:
        causes: The causes that are right to name.
        data: What `write` writes.
        dataset, loader: Arguments; functions by their names in `FUNCTIONS`.
        step_s, computes: How long a step takes, and whether it computes meanwhile.
        pause, pause_s: What training pauses for after each tenth step, and how long.
        store: How the store behaves; None: the data is a local folder.
        epochs, steps: How long the loop is.
        beside: Busy processes on the same machine.
        by_hand: What changes where the verdict names no setting.
    """

    causes: str
    data: str = "rows"
    dataset: Values = field(default_factory=dict)
    loader: Values = field(default_factory=dict)
    step_s: float = 0.01
    computes: bool = False
    pause: str = ""
    pause_s: float = 0.0
    store: Values | None = None
    epochs: int = 1
    steps: int = 100
    beside: int = 0
    by_hand: Values = field(default_factory=dict)


def spend(seconds: float) -> None:
    """Compute for so long."""
    end = perf_counter() + seconds
    while perf_counter() < end:
        pass


def work(rounds: int) -> int:
    """Compute in Python, so many rounds: preempted work takes longer."""
    total = 0
    for k in range(rounds):
        total += k * k
    return total


def slow(sample: Any) -> Any:
    return [work(50_000), sample][1]


def slow_in_threads(sample: Any, rng: Any) -> Any:  # noqa: ARG001 - it draws nothing
    return slow(sample)


def cheap(sample: Any) -> Any:
    return [work(5_000), sample][1]


def sleeping(sample: Any) -> Any:
    return [sleep(0.003), sample][1]


def slow_collate(samples: list[Any]) -> Any:
    return [work(500_000), np.stack([sample["x"] for sample in samples])][1]


def cheap_collate(samples: list[Any]) -> Any:
    return [work(50_000), np.stack([sample["x"] for sample in samples])][1]


def pixels(sample: Any) -> Any:
    return {"x": np.asarray(sample["x"])}


def floats(samples: list[Any]) -> Any:
    return np.stack([sample["x"] for sample in samples]).astype(np.float32)


def with_threads(sample: Any) -> Any:
    threads = [threading.Thread(target=work, args=(50_000,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    work(50_000)
    for thread in threads:
        thread.join()
    return sample


_ALL = (slow, slow_in_threads, cheap, sleeping, slow_collate, cheap_collate, pixels, floats, with_threads)
FUNCTIONS = {function.__name__: function for function in _ALL}


def write(data: str, folder: Path) -> Path:
    """Write the rows of one kind, once."""
    if folder.exists():
        return folder
    rng = np.random.default_rng(0)
    columns = {"x": "ndarray:uint8:1024"}
    num_samples = 4096
    options = {"size_limit": 1 << 16}
    make: Callable[[], Values] = lambda: {"x": rng.integers(0, 255, 1024, np.uint8)}  # noqa: E731
    if data == "large shards":
        options["size_limit"] = 1 << 20
    elif data == "images":
        columns = {"x": "ndarray:uint8:1000000"}
        num_samples = 192
        options = {"size_limit": 1 << 24}
        make = lambda: {"x": np.full(1_000_000, rng.integers(0, 255), np.uint8)}  # noqa: E731
    elif data == "photos":
        from PIL import Image

        columns = {"x": "jpeg"}
        num_samples = 160
        options = {"size_limit": 1 << 24}
        noise = [rng.integers(0, 255, (50, 75, 3), np.uint8) for _ in range(8)]
        photos = [Image.fromarray(pixels).resize((1500, 1000)) for pixels in noise]
        make = lambda: {"x": photos[rng.integers(8)]}  # noqa: E731
    elif data in ("bz2", "plain"):
        columns = {"x": "bytes"}
        num_samples = 2048
        options = {"size_limit": 1 << 20}
        options |= {"compression": "bz2"} if data == "bz2" else {}
        make = lambda: {"x": rng.integers(0, 16, 1 << 15, np.uint8).tobytes()}  # noqa: E731
    elif data == "json":
        columns = {"x": "json"}
        num_samples = 2048
        options = {"size_limit": 1 << 22}
        make = lambda: {"x": list(range(10_000))}  # noqa: E731
    with MDSWriter(out=folder, columns=columns, **options) as writer:
        for _ in range(num_samples):
            writer.write(make())
    return folder


PERSISTENT = {"persistent_workers": True}
SHORT = {"predownload": 16}
LOOPS = {
    "slow transform": Loop("transform", dataset={"transform": "slow"}),
    "slow transform, one worker": Loop("transform", dataset={"transform": "slow"}, loader={"num_workers": 1}),
    "slow transform, two workers": Loop(
        "transform cores", dataset={"transform": "slow"}, loader={"num_workers": 2}, by_hand={"transform": "cheap"}
    ),
    "slow transform, eight workers": Loop(
        "transform cores", dataset={"transform": "slow"}, loader={"num_workers": 8}, by_hand={"transform": "cheap"}
    ),
    "slow transform, step computes": Loop("transform", dataset={"transform": "slow"}, computes=True),
    "transform sleeps": Loop("transform", dataset={"transform": "sleeping"}),
    "transform sleeps, one worker": Loop("transform", dataset={"transform": "sleeping"}, loader={"num_workers": 1}),
    "slow transform in threads": Loop(
        "gil", dataset={"transform": "slow_in_threads"}, loader={"num_workers": 2, "workers": "threads"}
    ),
    "transform starts threads": Loop(
        "gil", dataset={"transform": "with_threads"}, steps=40, by_hand={"transform": "slow"}
    ),
    "busy machine": Loop(
        "cores", dataset={"transform": "slow"}, loader={"num_workers": 2}, beside=4, by_hand={"beside": 0}
    ),
    "slow collate": Loop("collate", loader={"collate_fn": "slow_collate"}),
    "slow collate, one worker": Loop("collate", loader={"collate_fn": "slow_collate", "num_workers": 1}),
    "huge photos": Loop("transform", "photos", {"transform": "pixels"}, {"batch_size": 8}, epochs=3),
    "huge photos, one worker": Loop(
        "transform", "photos", {"transform": "pixels"}, {"batch_size": 8, "num_workers": 1}, epochs=3
    ),
    "costly JSON": Loop("decoding", "json", loader={"batch_size": 8}),
    "one sample a batch": Loop(
        "planning transport reading decoding collate none",
        loader={"batch_size": 1, "num_workers": 1},
        step_s=0.0001,
        steps=3000,
    ),
    "images as float32": Loop(
        "collate transport",
        "images",
        loader={"batch_size": 16, "num_workers": 1, "collate_fn": "floats"},
        step_s=0.002,
        steps=12,
        epochs=5,
    ),
    "latency of the store": Loop("store_latency", store={"latency_s": 0.25}, by_hand={"data": "large shards"}),
    "latency, one worker": Loop(
        "store_latency", store={"latency_s": 0.25}, loader={"num_workers": 1}, by_hand={"data": "large shards"}
    ),
    "slow connections": Loop("bandwidth", store={"bytes_per_s": 200_000}),
    "slow connections, one worker": Loop("bandwidth", store={"bytes_per_s": 200_000}, loader={"num_workers": 1}),
    "refused requests": Loop(
        "throttled", store={"probability": {"error": 0.4}}, dataset=SHORT, by_hand={"data": "large shards"}
    ),
    "refused requests, two workers": Loop(
        "throttled", store={"probability": {"error": 0.4}}, loader={"num_workers": 2}, by_hand={"data": "large shards"}
    ),
    "broken connections": Loop(
        "store_errors", store={"probability": {"reset": 0.4}}, dataset=SHORT, by_hand={"store": {}}
    ),
    "short look-ahead": Loop("look_ahead", store={"latency_s": 0.1}, dataset=SHORT),
    "small cache": Loop(
        "small_cache",
        store={"latency_s": 0.3},
        dataset={"cache_limit": 1_000_000, "num_canonical_nodes": 1, "window": 2},
        step_s=0.003,
        steps=256,
        epochs=3,
    ),
    "slow decompression": Loop("decompression", "bz2", store={}, step_s=0.002, by_hand={"data": "plain"}),
    "slow decompression, two workers": Loop(
        "decompression cores", "bz2", store={}, step_s=0.002, loader={"num_workers": 2}, by_hand={"data": "plain"}
    ),
    "workers start each epoch": Loop(
        "epoch_start",
        dataset={"epoch_size": 128},
        loader={"num_workers": 2, "multiprocessing_context": "forkserver"},
        epochs=8,
    ),
    "frequent checkpoints": Loop("checkpoint", pause="checkpoint", pause_s=0.1, by_hand={"pause_s": 0.01}),
    "long validations": Loop("validation", pause="validation", pause_s=0.2, by_hand={"pause_s": 0.02}),
    "garbage collection": Loop("garbage_collection", pause="gc", by_hand={"pause": ""}),
    "a start that is slow": Loop(
        "cold_start", store={"latency_s": 0.3, "once": True}, dataset={"predownload": 4096}, step_s=0.05
    ),
    "healthy": Loop("none cold_start", loader={"num_workers": 1}, steps=200),
}


def run_loop(loop: Loop, place: str, cache: Path) -> Values:
    """Train, in a process that was started for it."""
    gc.freeze()
    dataset = _with_functions(loop.dataset)
    loader = _with_functions(loop.loader)
    batch_size = loader.pop("batch_size", 16)
    where = {"remote": place, "local": cache} if loop.store is not None else {"local": place}
    batches = StreamingDataLoader(StreamingDataset(**where, shuffle=True, **dataset), batch_size, **loader)
    heavy = [[[] for _ in range(1000)] for _ in range(500)] if loop.pause == "gc" else []
    began = perf_counter()
    count = 0
    with contextlib.closing(batches):
        for _ in range(loop.epochs):
            for step, _ in zip(range(loop.steps), batches, strict=False):
                (spend if loop.computes else sleep)(loop.step_s)
                count += 1
                if step % 10 == 9:
                    _pause(loop, batches)
        seconds = perf_counter() - began
        stats = batches.stats()
    assert len(heavy) in (0, 500)  # they live as long as the loop
    verdict = verdict_of(stats)
    return {"per_s": count / seconds, "text": str(verdict), "table": str(stats), **asdict(verdict)}


def _with_functions(settings: Values) -> Values:
    return {name: FUNCTIONS.get(value, value) if isinstance(value, str) else value for name, value in settings.items()}


def _pause(loop: Loop, batches: Any) -> None:
    if loop.pause == "gc":
        gc.collect()
    elif loop.pause:
        with batches.aside(loop.pause):
            sleep(loop.pause_s)


@contextlib.contextmanager
def _served(loop: Loop, folder: Path) -> Iterator[str]:
    if loop.store is None:
        yield str(folder)
        return
    with WebServer() as web:
        web.objects.update({f"/data/{path.name}": path.read_bytes() for path in folder.iterdir()})
        with FaultProxy(web.url, Plan(**loop.store)) as proxy:
            yield f"{proxy.url}/data"


def _once(loop: Loop, folder: Path) -> Values:
    """Run a loop in a process of its own."""
    with _served(loop, write(loop.data, folder / loop.data)) as place, tempfile.TemporaryDirectory(dir=folder) as cache:
        command = [sys.executable, __file__, "--loop", json.dumps(asdict(loop)), place, f"{cache}/cache"]
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loop.beside)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        finally:
            for process in busy:
                process.kill()
                process.wait()
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    result: Values = json.loads(done.stdout.splitlines()[-1])
    return result


def changed(loop: Loop, setting: str | None, value: Any) -> Loop | None:
    """The loop after its remedy; None where there is none."""
    settings = asdict(loop)
    if setting is not None:
        place = "dataset" if setting in ("predownload", "cache_limit", "window") else "loader"
        settings[place] = {**settings[place], setting: value}
        if setting == "num_workers" and value == 0:
            settings["loader"].pop("workers", None)
    elif loop.by_hand:
        for name, change in loop.by_hand.items():
            part = "dataset" if name == "transform" else "loader" if name == "collate_fn" else None
            if part:
                settings[part] = {**settings[part], name: change}
            else:
                settings[name] = change
    else:
        return None
    return Loop(**settings)


def judge(loop: Loop, first: Mapping[str, Any], second: Mapping[str, Any] | None) -> Values:
    """What was right: the cause, and the gain."""
    said = re.search(r"about ([\d.]+) times", first["text"])
    promised = float(said[1]) if said else 1.0
    gain = second["per_s"] / first["per_s"] if second else 1.0
    named = first["cause"] in loop.causes.split()
    keeps = abs(gain - promised) <= SLACK * promised if said else gain >= HELD
    return {"cause": first["cause"], "named": named, "promised": said and promised, "gain": gain, "keeps": keeps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only loops that this regular expression finds")
    parser.add_argument("--json", type=Path, help="write all that was measured to this file")
    parser.add_argument("--verbose", action="store_true", help="print the verdicts")
    parser.add_argument("--loop", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.loop:
        settings, place, cache = args.loop
        print(f"\n{json.dumps(run_loop(Loop(**json.loads(settings)), place, Path(cache)))}")
        return
    report = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, loop in LOOPS.items():
            if not re.search(args.only, name):
                continue
            first = _once(loop, Path(folder))
            after = changed(loop, first["setting"], first["value"])
            second = None if after is None else _once(after, Path(folder))
            report[name] = {**judge(loop, first, second), "first": first, "second": second}
            _print(name, report[name], args.verbose)
    good = sum(judged["named"] and judged["keeps"] for judged in report.values())
    print(f"\n{good} of {len(report)}: the cause is named, and its remedy does as it says")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


def _print(name: str, judged: Values, verbose: bool) -> None:
    promised = "" if judged["promised"] is None else f"{judged['promised']:.1f} x"
    marks = f"{'right' if judged['named'] else 'WRONG':<6}{'held' if judged['keeps'] else 'NOT HELD':<9}"
    print(f"{name:<34}{judged['cause']:<19}{marks}said {promised:<7}was {judged['gain']:.2f} x", flush=True)
    if verbose:
        print(f"    {judged['first']['text']}\n{judged['first']['table']}")
        if judged["second"]:
            print(f"    then: {judged['second']['text']}")


if __name__ == "__main__":
    main()
