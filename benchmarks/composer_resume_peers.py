"""Runs under Composer that are stopped and resumed, with this package's dataset and with mosaicml-streaming's.

python benchmarks/composer_resume_peers.py [--out folder] [--only mosaicml-streaming]

Needs an environment with mosaicml, mosaicml-streaming and this package. Each resumed run is held against the same
library's own uninterrupted one: which optimizer steps were made of other samples, and which samples an epoch lost or
trained on again.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import warnings
from collections import Counter, defaultdict
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

NUM_SAMPLES, GLOBAL_BATCH, EPOCHS, STEPS_PER_EPOCH = 167, 16, 3, 11
OURS, PEER = "lightning_stream", "mosaicml-streaming"
Steps = dict[int, list[int]]


@dataclass(frozen=True)
class Link:
    """One run of a chain: on so many devices, from a checkpoint of another run, up to a step."""

    name: str
    devices: int
    load: tuple[str, int] | None = None
    stop: int = EPOCHS * STEPS_PER_EPOCH
    save: str = "1ba"
    workers: int = 0


WHOLE, BY_EPOCH = Link("whole", 1), Link("by epoch", 1, save="1ep")
CASES: dict[str, tuple[Link, ...]] = {
    "stopped in an epoch": (Link("again", 1, ("whole", 7)),),
    "stopped in an epoch, 2 workers": (Link("with workers", 1, ("whole", 15), workers=2),),
    "saved at an epoch's end (save_interval=1ep)": (Link("next epoch", 1, ("by epoch", STEPS_PER_EPOCH)),),
    "1 device, then 2, then 1": (
        Link("on two", 2, ("whole", 7), stop=15),
        Link("back on one", 1, ("on two", 15)),
    ),
}


def worker(given: dict[str, Any]) -> None:
    """One process of a run: train, and write down this rank's samples by step."""
    import torch
    from composer import ComposerModel, Trainer
    from composer.utils import dist

    warnings.simplefilter("ignore")

    class Net(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 1)
            self.steps: Steps = defaultdict(list)
            self.trainer: Any = None

        def forward(self, batch: Any) -> Any:
            return self.net(batch["x"])

        def loss(self, outputs: Any, batch: Any) -> Any:
            if self.trainer._train_data_spec.get_num_samples_in_batch(batch):  # noqa: SLF001 - filler counts nothing
                self.steps[int(self.trainer.state.timestamp.batch)] += batch["id"].tolist()
            return outputs.square().mean()

    out = Path(given["out"])
    torch.manual_seed(0)
    net = Net()
    trainer = Trainer(
        model=net, train_dataloader=data_of(given, dist.get_world_size()),
        optimizers=torch.optim.Adam(net.parameters(), lr=0.01), max_duration=f"{given['stop']}ba", device="cpu", seed=1,
        progress_bar=False, save_folder=str(out), save_interval=given["save"], save_filename="ba{batch}.pt",
        save_overwrite=True, load_path=given["load"],
    )  # fmt: skip
    net.trainer = trainer
    trainer.fit()
    trainer.close()
    (out / f"rank{dist.get_global_rank()}.json").write_text(json.dumps(net.steps))


def data_of(given: dict[str, Any], world_size: int) -> Any:
    """The training data of either library, with its own defaults for the order."""
    size, workers = GLOBAL_BATCH // world_size, given["workers"]
    if given["library"] == OURS:
        from lightning_stream.trainers.composer.spec import data_spec

        return data_spec(remote=given["shards"], shuffle=True, global_batch_size=GLOBAL_BATCH, num_workers=workers)
    from streaming import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(local=given["shards"], shuffle=True, batch_size=size)
    return StreamingDataLoader(dataset, batch_size=size, num_workers=workers)


def run(link: Link, library: str, shards: Path, out: Path) -> Steps:
    """Launch one link; its steps over all ranks."""
    folder = out / library / link.name.replace(" ", "_")
    folder.mkdir(parents=True)
    load = None if link.load is None else str(out / library / link.load[0].replace(" ", "_") / f"ba{link.load[1]}.pt")
    given = {
        "library": library, "shards": str(shards), "out": str(folder), "load": load, "stop": link.stop,
        "save": link.save, "workers": link.workers,
    }  # fmt: skip
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    start = ["-m", "composer.cli", "-n", str(link.devices), "--master_port", port] if link.devices > 1 else []
    command = [sys.executable, *start, __file__, "--worker", json.dumps(given)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        raise SystemExit(f"{library}, {link.name}:\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    steps: Steps = defaultdict(list)
    for file in folder.glob("rank*.json"):
        for step, ids in json.loads(file.read_text()).items():
            steps[int(step)] += ids
    return {step: sorted(ids) for step, ids in sorted(steps.items())}


def by_epoch(steps: Steps) -> Counter[tuple[int, int]]:
    """How often each sample was trained on, by epoch."""
    return Counter((step // STEPS_PER_EPOCH, one) for step, ids in steps.items() for one in ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where runs are kept; a temporary folder without it")
    parser.add_argument("--only", choices=(OURS, PEER), help="one library alone")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(json.loads(given.worker))
        return
    with tempfile.TemporaryDirectory() as temporary:
        compare(given.out or Path(temporary), (given.only,) if given.only else (OURS, PEER))


def compare(out: Path, libraries: tuple[str, ...]) -> None:
    import numpy as np

    from lightning_stream import MDSWriter

    shards = out / "shards"
    with MDSWriter(out=str(shards), columns={"id": "int", "x": "ndarray:float32:4"}, size_limit=1000) as writer:
        for number in range(NUM_SAMPLES):
            writer.write({"id": number, "x": np.full(4, number / NUM_SAMPLES, np.float32)})
    names = {OURS: OURS, PEER: f"{PEER} {version(PEER)}"}
    print(f"Composer {version('mosaicml')}, {NUM_SAMPLES} samples, global batch {GLOBAL_BATCH}, {EPOCHS} epochs\n")
    print(
        "| resumed run | dataset | steps with other samples | samples lost | samples repeated |\n|---|---|---|---|---|"
    )
    for library in libraries:
        whole = run(WHOLE, library, shards, out)
        assert run(BY_EPOCH, library, shards, out) == whole
        twice = sum(count - 1 for count in by_epoch(whole).values())
        print(f"| never stopped | {names[library]} | | | {twice} |", flush=True)
        for case, links in CASES.items():
            steps = {step: ids for step, ids in whole.items() if step < links[0].load[1]}  # type: ignore[index]
            for link in links:
                steps |= run(link, library, shards, out)
            wrong = sum(steps.get(step) != ids for step, ids in whole.items())
            lost, repeated = by_epoch(whole) - by_epoch(steps), by_epoch(steps) - by_epoch(whole)
            print(
                f"| {case} | {names[library]} | {wrong} of {len(whole)} | {lost.total()} | {repeated.total()} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
