"""Proof: a training run that is resumed on other numbers of devices has the samples and losses of an unbroken one.

    python -m recipes.proofs.device_counts                               # gpt on text, devices 1 -> 2 -> 4 -> 1
    python -m recipes.proofs.device_counts --devices 1 2 --workers 0 1
    python -m recipes.proofs.device_counts -- +data=flowers model.arch=squeezenet1_1 '+model.model_kwargs.dropout=0.0'

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
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer

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
        self._folder = Path(dirpath)
        self._stop_after = stop_after
        self._ids: list[int] = []
        self._loss = 0.0
        self._step_before = 0

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Remember the number of finished steps."""
        self._step_before = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, _module: LightningModule, outputs: Any, *_: Any) -> None:
        """Add this micro-batch; write the step when it is complete."""
        batch = trainer.train_dataloader.last_batch  # type: ignore[union-attr]
        self._ids += batch.ids[~batch.filler].tolist()
        self._loss += float(outputs["loss"])
        step = trainer.global_step
        if step == self._step_before:
            return
        line = {"step": step, "epoch": batch.epoch, "ids": self._ids, "loss": self._loss, "ranks": trainer.world_size}
        with (self._folder / f"rank-{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._ids, self._loss = [], 0.0
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


class Link(NamedTuple):
    """One run of a chain of resumed runs."""

    devices: int
    workers: int
    record: Record


class Comparison(NamedTuple):
    """A chain of resumed runs compared with the unbroken run.

    Attributes:
        missing, repeated, wrong: Optimizer steps that no run trained, that several did, or that had other samples.
        lost, extra: Samples that were trained on less often, or more often, than in the unbroken run.
        differences: By step, the absolute difference of the losses.
    """

    missing: list[int]
    repeated: list[int]
    wrong: list[int]
    lost: int
    extra: int
    differences: dict[int, float]

    @property
    def is_exact(self) -> bool:
        """Whether each step had exactly its samples."""
        return not (self.missing or self.repeated or self.wrong or self.lost or self.extra)


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


def compare(whole: Record, chain: Sequence[Link]) -> Comparison:
    """Compare a chain of resumed runs with the unbroken one."""
    found: dict[int, list[Step]] = {}
    for link in chain:
        for number, step in link.record.items():
            found.setdefault(number, []).append(step)
    expected = Counter((step.epoch, one) for step in whole.values() for one in step.ids)
    trained = Counter((step.epoch, one) for steps in found.values() for step in steps for one in step.ids)
    return Comparison(
        sorted(whole.keys() - found.keys()),
        sorted(number for number, steps in found.items() if len(steps) > 1),
        sorted(n for n, steps in found.items() if n not in whole or any(step.ids != whole[n].ids for step in steps)),
        (expected - trained).total(),
        (trained - expected).total(),
        {n: max(abs(step.loss - whole[n].loss) for step in found[n]) for n in sorted(found) if n in whole},
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
    return read_record(record)


def run_chain(folder: Path, overrides: Sequence[str], devices: Sequence[int], workers: Sequence[int]) -> list[Link]:
    """Repeat the unbroken run in parts of equal length, each resumed on its own number of devices and workers."""
    total = len(read_record(folder / "records" / "whole"))
    chain: list[Link] = []
    resume: list[str] = []
    for number, (device_count, worker_count) in enumerate(zip(devices, workers, strict=True), 1):
        is_last = number == len(devices)
        stop = [] if is_last else [f"+callbacks.record.stop_after={total * number // len(devices)}"]
        record = run(folder, f"part-{number}", overrides, device_count, worker_count, *stop, *resume)
        chain.append(Link(device_count, worker_count, record))
        print(
            f"{device_count} devices, {worker_count} workers: steps {min(record)}-{max(record)} of {total}", flush=True
        )
        resume = [f"ckpt_path='{folder / 'records' / f'part-{number}' / 'stopped.ckpt'}'"]
    return chain


def draw(path: Path, whole: Record, chain: Sequence[Link]) -> None:
    """Plot both loss curves, and their difference below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), dpi=130, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    above.plot([*whole], [step.loss for step in whole.values()], color="0.75", linewidth=5, label="unbroken run")
    for number, link in enumerate(chain):
        losses = [step.loss for step in link.record.values()]
        above.plot([*link.record], losses, f"C{number}", linewidth=1.4, label=f"{link.devices} device(s)")
        apart = [max(abs(step.loss - whole[n].loss), 1e-9) for n, step in link.record.items() if n in whole]
        below.plot([n for n in link.record if n in whole], apart, f"C{number}.-", linewidth=0.8)
    for before, _ in pairwise(chain):
        for axes in (above, below):
            axes.axvline(max(before.record) + 0.5, color="0.6", linestyle="--", linewidth=1)
    above.set(title="Devices " + " → ".join(str(link.devices) for link in chain), ylabel="training loss")
    below.set(yscale="log", ylabel="difference\n(1e-9: none)", xlabel="optimizer step")
    above.legend(frameon=False)
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 1], help="devices of each run of the chain")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 0, 2], help="workers of each run's devices")
    parser.add_argument("--out", type=Path, default=Path("runs/device_counts"))
    parser.add_argument("--tolerance", type=float, default=1e-2, help="largest allowed difference of a loss")
    parser.add_argument("overrides", nargs="*", help="after --: overrides of train.py, in place of the text's")
    options = parser.parse_args()
    if len(options.devices) != len(options.workers):
        parser.error(f"--devices and --workers must be as long; found {len(options.devices)}, {len(options.workers)}")
    folder = options.out.absolute()
    chooses = any(one.lstrip("+").startswith(("data=", "experiment=")) for one in options.overrides)
    overrides = options.overrides if chooses else [*TEXT, *options.overrides]
    whole = run(folder, "whole", overrides, options.devices[0], options.workers[0])
    print(f"Unbroken run: {len(whole)} steps on {options.devices[0]} device(s)", flush=True)
    chain = run_chain(folder, overrides, options.devices, options.workers)
    found = compare(whole, chain)
    largest = max(found.differences.values(), default=0.0)
    print(
        f"Samples lost: {found.lost}, repeated: {found.extra}; steps missing: {len(found.missing)}, repeated: "
        f"{len(found.repeated)}, with other samples: {len(found.wrong)}."
    )
    print(f"Largest difference of a loss: {largest:.1e}; allowed: {options.tolerance:.0e}.")
    draw(folder / "device_counts.png", whole, chain)
    print(f"Picture: {folder / 'device_counts.png'}")
    return 0 if found.is_exact and largest <= options.tolerance else 1


if __name__ == "__main__":
    sys.exit(main())
