"""Proof: a training run that is resumed on other numbers of devices has the samples and losses of an unbroken one.

    python -m recipes.proofs.device_counts                                    # a small GPT, devices 1 -> 2 -> 4 -> 1
    python -m recipes.proofs.device_counts --devices 1 2 --workers 0 1 -- experiment=gpt_shakespeare

Each run is `train.py` with Lightning's own launcher. It is stopped at an even share of the steps, and the next one
resumes from the checkpoint it left. The exit code is 1 if an optimizer step has other samples, or if a loss differs by
more than --tolerance. Choose a model without dropout and batch normalization, which depend on the number of devices;
then losses differ only because floating-point sums are added in another order.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch import Callback
from matplotlib.figure import Figure

from recipes.report import loss_curve

ROOT = Path(__file__).resolve().parents[2]
TEXT = (
    "+data=text", "data.synthetic_count=200", "data.seq_len=64", "data.size_limit=16kb", "model.d_model=64",
    "model.n_layers=2", "model.sample_tokens=0", "trainer.max_epochs=2",
)  # fmt: skip


class StopAfter(Callback):
    """Saves the checkpoint ``stopped.ckpt`` in the run's folder after an optimizer step, and stops."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step and not trainer.should_stop:
            trainer.save_checkpoint(f"{trainer.default_root_dir}/stopped.ckpt")
            trainer.should_stop = True


class Step(NamedTuple):
    """One optimizer step over all ranks; `ids` are its sorted samples without padding."""

    number: int
    epoch: int
    ids: tuple[int, ...]
    loss: float


def read_steps(folder: Path) -> list[Step]:
    """The steps of a run, from its SampleLog and its CSV log, which counts steps from 0."""
    losses = loss_curve(folder)
    files = [path.read_text().splitlines() for path in sorted((folder / "samples").glob("rank-*.jsonl"))]
    steps = []
    for ranks in zip(*files, strict=True):
        lines = [json.loads(line) for line in ranks]
        ids = tuple(sorted(one for line in lines for one in line["ids"]))
        steps.append(Step(lines[0]["step"], lines[0]["epoch"], ids, losses[lines[0]["step"] - 1]))
    return steps


def compare(whole: Sequence[Step], chain: Sequence[Step]) -> tuple[str, float]:
    """What differs between a chain of resumed runs and the unbroken one, or ""; the largest difference of a loss."""
    expected, trained = (Counter((step.epoch, one) for step in steps for one in step.ids) for steps in (whole, chain))
    lost, repeated = (expected - trained).total(), (trained - expected).total()
    by_number = {step.number: step for step in whole}
    wrong = [step.number for step in chain if step[:3] != by_number.get(step.number, step)[:3]]
    is_exact = [step[:3] for step in chain] == [step[:3] for step in whole]
    found = f"Samples lost: {lost}, repeated: {repeated}; steps with other samples: {wrong}."
    differences = [abs(step.loss - by_number[step.number].loss) for step in chain if step.number in by_number]
    return "" if is_exact else found, max(differences, default=0.0)


def run(folder: Path, name: str, overrides: Sequence[str], devices: int, workers: int, *more: str) -> list[Step]:
    """Launch `train.py` once; return its steps. Its output goes to ``output.txt`` in the run's folder."""
    shutil.rmtree(folder / name, ignore_errors=True)
    (folder / name).mkdir(parents=True)
    command = [
        sys.executable, str(ROOT / "train.py"), *overrides, "hardware=cpu", f"hardware.devices={devices}",
        "num_threads=1", f"root='{folder}'", f"name={name}", f"data.num_workers={workers}", "callbacks=sample_log",
        "trainer.enable_progress_bar=false", "trainer.log_every_n_steps=1", *more,
    ]  # fmt: skip
    output = folder / name / "output.txt"
    with output.open("w") as file:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=env, stdout=file, stderr=file, check=False)
    if done.returncode:
        raise SystemExit(f"train.py failed with exit code {done.returncode}:\n{output.read_text()[-3000:]}")
    found = read_steps(folder / name)
    print(f"{name}: {devices} device(s), {workers} worker(s), steps {found[0].number}-{found[-1].number}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 1], help="devices of each run of the chain")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 0, 2], help="workers of each run's devices")
    parser.add_argument("--out", type=Path, default=Path("runs/device_counts"))
    parser.add_argument("--tolerance", type=float, default=1e-2, help="largest allowed difference of a loss")
    parser.add_argument("overrides", nargs="*", help="after --: overrides of train.py, in place of the small GPT's")
    options = parser.parse_args()
    folder, overrides = options.out.absolute(), options.overrides or TEXT
    whole = run(folder, "whole", overrides, options.devices[0], options.workers[0])
    curves, resume = {"unbroken": whole}, list[str]()
    for number, (devices, workers) in enumerate(zip(options.devices, options.workers, strict=True), 1):
        name, last = f"part-{number}", len(whole) * number // len(options.devices)
        stop = f"+callbacks.stop_after={{_target_: recipes.proofs.device_counts.StopAfter, step: {last}}}"
        curves[f"{name}, {devices} device(s)"] = run(folder, name, overrides, devices, workers, stop, *resume)
        resume = [f"ckpt_path='{folder / name / 'stopped.ckpt'}'"]
    wrong, largest = compare(whole, [step for name, steps in curves.items() if name != "unbroken" for step in steps])
    print(wrong or f"All {len(whole)} steps have the same samples, each once.")
    print(f"Largest loss difference: {largest:.1e}. Allowed: {options.tolerance:.0e}.")
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="optimizer step", ylabel="training loss")
    for label, steps in curves.items():
        axes.plot([step.number for step in steps], [step.loss for step in steps], label=label, alpha=0.8)
    axes.legend()
    figure.savefig(folder / "device_counts.png", dpi=110)
    print(f"Picture: {folder / 'device_counts.png'}")
    return 1 if wrong or largest > options.tolerance else 0


if __name__ == "__main__":
    sys.exit(main())
