"""Proof: a training run that is resumed on other numbers of devices has the samples and losses of an unbroken one.

    python -m recipes.proofs.device_counts                                    # a small GPT, devices 1 -> 2 -> 4 -> 1
    python -m recipes.proofs.device_counts --devices 1 2 --workers 0 1 -- experiment=gpt_shakespeare

Each run is `train.py` with Lightning's own launcher. It is stopped at an even share of the steps, and the next one
resumes from the checkpoint it left. The exit code is 1 if an optimizer step has other samples, or if a loss differs by
more than --tolerance. Choose a model without dropout and batch normalization, which depend on the number of devices;
then losses differ only because floating-point sums are added in another order.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer

from recipes.report import plot_curves

ROOT = Path(__file__).resolve().parents[2]
TEXT = (
    "+data=text", "data.synthetic_count=200", "data.seq_len=64", "data.size_limit=16kb", "model.d_model=64",
    "model.n_layers=2", "model.sample_tokens=0", "trainer.max_epochs=2",
)  # fmt: skip


class StepRecord(Callback):
    """Writes the sample ids and the loss of each optimizer step as a JSON line, in a file per rank.

    Args:
        dirpath: Folder of the files ``rank-<n>.jsonl`` and of the checkpoint ``stopped.ckpt``.
        stop_after: The optimizer step after which the run saves that checkpoint and stops; None to let it end.
    """

    def __init__(self, dirpath: str, stop_after: int | None = None) -> None:
        self._folder, self._stop_after = Path(dirpath), stop_after
        self._ids: list[int] = []
        self._loss = 0.0
        self._last_step = 0

    def on_train_start(self, trainer: Trainer, _module: LightningModule) -> None:
        self._last_step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, _module: LightningModule, outputs: Any, *_: Any) -> None:
        batch = trainer.train_dataloader.last_batch  # type: ignore[union-attr]
        self._ids += batch.ids[~batch.filler].tolist()
        self._loss += float(outputs["loss"])  # of several micro-batches, this is each one's part
        step = trainer.global_step
        if step == self._last_step:
            return
        line = {"step": step, "epoch": batch.epoch, "ids": self._ids, "loss": self._loss, "ranks": trainer.world_size}
        with (self._folder / f"rank-{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._ids, self._loss, self._last_step = [], 0.0, step
        if step == self._stop_after:
            trainer.save_checkpoint(self._folder / "stopped.ckpt")
            trainer.should_stop = True


class Step(NamedTuple):
    """One optimizer step over all ranks: its epoch, its sorted sample ids without padding, and its mean loss."""

    epoch: int
    ids: tuple[int, ...]
    loss: float


Record = Mapping[int, Step]
"""Optimizer steps by number, from 1."""


class Comparison(NamedTuple):
    """A chain of resumed runs compared with the unbroken run.

    Attributes:
        missing, repeated, wrong: Optimizer steps that no run trained, that several did, or that had other samples.
        lost, extra: Samples that were trained on less often, or more often, than in the unbroken run.
        largest: The largest difference of a loss.
    """

    missing: list[int]
    repeated: list[int]
    wrong: list[int]
    lost: int
    extra: int
    largest: float

    @property
    def is_exact(self) -> bool:
        return not (self.missing or self.repeated or self.wrong or self.lost or self.extra)

    def __str__(self) -> str:
        return (
            f"Samples lost: {self.lost}, repeated: {self.extra}; steps missing: {len(self.missing)}, repeated: "
            f"{len(self.repeated)}, with other samples: {len(self.wrong)}. Largest loss difference: {self.largest:.1e}."
        )


def read_record(folder: Path) -> Record:
    """Join what the ranks of a run wrote.

    Raises:
        ValueError: A rank's line is missing.
    """
    lines: dict[int, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            lines.setdefault(line["step"], []).append(line)
    record = {}
    for step, found in sorted(lines.items()):
        if len(found) != found[0]["ranks"]:
            raise ValueError(f"step {step} in {folder} has {len(found)} of {found[0]['ranks']} ranks' lines.")
        ids = sorted(one for line in found for one in line["ids"])
        record[step] = Step(found[0]["epoch"], tuple(ids), sum(line["loss"] for line in found) / len(found))
    return record


def compare(whole: Record, chain: Sequence[Record]) -> Comparison:
    """Compare a chain of resumed runs with the unbroken one."""
    steps = [(number, step) for record in chain for number, step in record.items()]
    times = Counter(number for number, _ in steps)
    expected = Counter((step.epoch, one) for step in whole.values() for one in step.ids)
    trained = Counter((step.epoch, one) for _, step in steps for one in step.ids)
    return Comparison(
        missing=sorted(whole.keys() - times.keys()),
        repeated=sorted(number for number, count in times.items() if count > 1),
        wrong=sorted({n for n, step in steps if n not in whole or step.ids != whole[n].ids}),
        lost=(expected - trained).total(),
        extra=(trained - expected).total(),
        largest=max((abs(step.loss - whole[n].loss) for n, step in steps if n in whole), default=0.0),
    )


def run(folder: Path, name: str, overrides: Sequence[str], devices: int, workers: int, *more: str) -> Record:
    """Launch `train.py` once; return its record. Its output goes to ``output.txt`` beside the record."""
    record = folder / "records" / name
    shutil.rmtree(record, ignore_errors=True)
    record.mkdir(parents=True)
    command = [
        sys.executable, str(ROOT / "train.py"), *overrides, "hardware=cpu", f"hardware.devices={devices}",
        "num_threads=1", f"root='{folder}'", f"name={name}", f"data.num_workers={workers}", "overwrite=true",
        "trainer.enable_progress_bar=false", "+callbacks.record._target_=recipes.proofs.device_counts.StepRecord",
        f"+callbacks.record.dirpath='{record}'", *more,
    ]  # fmt: skip
    output = record / "output.txt"
    with output.open("w") as file:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=env, stdout=file, stderr=file, check=False)
    if done.returncode:
        raise SystemExit(f"train.py failed with exit code {done.returncode}:\n{output.read_text()[-3000:]}")
    found = read_record(record)
    print(f"{name}: {devices} device(s), {workers} worker(s), steps {min(found)}-{max(found)}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 1], help="devices of each run of the chain")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 0, 2], help="workers of each run's devices")
    parser.add_argument("--out", type=Path, default=Path("runs/device_counts"))
    parser.add_argument("--tolerance", type=float, default=1e-2, help="largest allowed difference of a loss")
    parser.add_argument("overrides", nargs="*", help="after --: overrides of train.py, in place of the small GPT's")
    options = parser.parse_args()
    if len(options.devices) != len(options.workers):
        parser.error(f"--devices and --workers must be as long; found {len(options.devices)}, {len(options.workers)}")
    folder = options.out.absolute()
    overrides = options.overrides or TEXT
    whole = run(folder, "whole", overrides, options.devices[0], options.workers[0])
    chain: dict[str, Record] = {}
    resume: list[str] = []
    for number, (devices, workers) in enumerate(zip(options.devices, options.workers, strict=True), 1):
        name = f"part-{number}"
        stop_after = len(whole) * number // len(options.devices)
        stop = [f"+callbacks.record.stop_after={stop_after}"] if number < len(options.devices) else []
        chain[f"{name}, {devices} device(s)"] = run(folder, name, overrides, devices, workers, *stop, *resume)
        resume = [f"ckpt_path='{folder / 'records' / name / 'stopped.ckpt'}'"]
    found = compare(whole, [*chain.values()])
    print(f"{found} Allowed: {options.tolerance:.0e}.")
    curves = {
        name: {n: step.loss for n, step in record.items()} for name, record in ({"unbroken": whole} | chain).items()
    }
    plot_curves(curves, folder / "device_counts.png", f"Devices {' → '.join(map(str, options.devices))}")
    print(f"Picture: {folder / 'device_counts.png'}")
    return 0 if found.is_exact and found.largest <= options.tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
