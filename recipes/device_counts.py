"""Start on one device, go on with two, four and one: the same samples at every step, the same loss curve.

python recipes/device_counts.py                                        flowers, devices 1 -> 2 -> 4 -> 1
python recipes/device_counts.py --devices 4 1 2 --workers 0 2 1
python recipes/device_counts.py --out runs/mine -- data.drawn_count=2000 trainer.max_epochs=8
python recipes/device_counts.py -- experiment=<one of configs/experiment>

Each run is `train.py` with Lightning's own launcher, stopped at an even part of the steps and continued from the
checkpoint it left. Ends with code 1 where a step was made of other samples, or a loss is further off than --tolerance.

The network has no batch normalisation, whose statistics are each device's own and so differ with their number; and no
dropout, whose draws do. Then only the order of floating-point sums is another: at the first step in another world the
loss is equal to the last digit or two, and from then on training itself magnifies what little the weights differ by.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_stream.recipes.loss_curve import Link, Record, compare, read_record, table
from lightning_stream.recipes.loss_curve_plot import draw_curves

ROOT = Path(__file__).resolve().parent.parent
FLOWERS = (
    "data=flowers", "data.drawn_count=240", "data.image_size=48", "data.size_limit=64kb", "trainer.max_epochs=5",
    "model.network=squeezenet1_1", "+model.network_options.dropout=0.0", "model.learning_rate=0.0005",
)  # fmt: skip
COMMON = ("scale=cpu", "trainer.enable_progress_bar=false", "num_threads=1")


def run(out: Path, name: str, chosen: Sequence[str], devices: int, workers: int, *more: str) -> None:
    """One launch of `train.py`; what it says goes into a file beside its record."""
    record = out / "records" / name
    shutil.rmtree(record, ignore_errors=True)  # another chain's, of more ranks
    record.mkdir(parents=True)
    overrides = [
        *chosen, *COMMON, f"root='{out}'", f"name={name.split('-')[0]}", f"trainer.devices={devices}",
        f"data.num_workers={workers}",
        "+callbacks.record._target_=lightning_stream.recipes.loss_curve.StepRecord",
        f"+callbacks.record.dirpath='{record}'", *more,
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    said = record / "said.txt"
    with said.open("w") as file:
        done = subprocess.run(
            [sys.executable, str(ROOT / "train.py"), *overrides], env=env, stdout=file, stderr=file, check=False
        )
    if done.returncode:
        raise SystemExit(f"train.py ended with code {done.returncode}:\n{said.read_text()[-3000:]}")


def run_chain(out: Path, chosen: Sequence[str], devices: Sequence[int], workers: Sequence[int]) -> list[Link]:
    """The uninterrupted run's steps, cut evenly; each part in a world of its own."""
    total = len(read_record(out / "records" / "whole"))
    chain: list[Link] = []
    go_on: list[str] = []
    for number, (device_count, worker_count) in enumerate(zip(devices, workers, strict=True), 1):
        name = f"chain-{number}"
        stop = total * number // len(devices)
        stops = [f"+callbacks.record.stop_after={stop}"] if number < len(devices) else []
        run(out, name, chosen, device_count, worker_count, *stops, *go_on)
        chain.append(Link(device_count, worker_count, read_record(out / "records" / name)))
        print(f"{chain[-1].name}: up to step {max(chain[-1].record)} of {total}", flush=True)
        go_on = [f"ckpt_path='{out / 'records' / name / 'stopped.ckpt'}'"]
    return chain


def report(out: Path, title: str, whole: Record, chain: Sequence[Link], tolerance: float) -> bool:
    """Say and draw how the chain compares; whether it is what it should be."""
    found = compare(whole, chain)
    largest = max(found.differences.values(), default=0.0)
    counted = (
        f"Samples lost: {found.lost}, repeated: {found.extra}; steps missing: {len(found.missing)}, "
        f"done twice: {len(found.repeated)}, of other samples: {len(found.wrong)}."
    )
    lines = [
        table(whole, chain),
        "",
        counted,
        f"Largest difference of a loss: {largest:.1e}; allowed: {tolerance:.0e}.",
    ]
    (out / "device_counts.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    print(f"Picture: {draw_curves(out / 'device_counts.png', title, whole, chain)}")
    return found.exact and largest <= tolerance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 1], help="of each run of the chain")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 0, 2], help="of each run's devices")
    parser.add_argument("--out", type=Path, default=Path("runs/device_counts"))
    parser.add_argument("--tolerance", type=float, default=1e-2, help="how far a loss may be off")
    parser.add_argument("settings", nargs="*", help="after --: settings of train.py, instead of the flowers' own")
    given = parser.parse_args()
    if len(given.devices) != len(given.workers):
        parser.error(f"each run has devices and workers; found {len(given.devices)} and {len(given.workers)}")
    out = given.out.absolute()
    chooses = any(one.lstrip("+").startswith(("data=", "experiment=")) for one in given.settings)
    chosen = given.settings if chooses else [*FLOWERS, *given.settings]
    run(out, "whole", chosen, given.devices[0], given.workers[0])
    whole = read_record(out / "records" / "whole")
    print(f"Never stopped: {len(whole)} steps on {given.devices[0]} device(s)", flush=True)
    chain = run_chain(out, chosen, given.devices, given.workers)
    title = "Devices " + " → ".join(str(one) for one in given.devices)
    raise SystemExit(0 if report(out, title, whole, chain, given.tolerance) else 1)


if __name__ == "__main__":
    main()
