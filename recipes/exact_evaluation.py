"""An accuracy is the same to the last digit on one process and on several, however unevenly they share the samples.

    python recipes/exact_evaluation.py                    # 103 samples over 1, 2 and 3 processes
    python recipes/exact_evaluation.py --samples 1009 --ranks 1 2 3 5

1. A held-out set is written to shards, of a size that no number of processes divides.  2. Each number of processes
evaluates a fixed model: every sample once, whole numbers added.  3. Beside it stand the two ways that go wrong: the
mean of the processes' own accuracies, and a sampler that repeats samples until every process has as many.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from lightning_stream import MDSWriter, StreamingDataLoader, StreamingDataset
from lightning_stream.order import World
from lightning_stream.recipes.evaluation import Tally, tally

_WIDTH, _CLASSES = 16, 7


@dataclass(frozen=True)
class Result:
    """What some processes measured together.

    Attributes:
        num_ranks: How many.
        counted: All samples, each once.
        mean_of_ranks: The mean of their own accuracies.
        with_repeats: The accuracy over what torch's `DistributedSampler` gives them.
    """

    num_ranks: int
    counted: Tally
    mean_of_ranks: float
    with_repeats: float


def write_samples(folder: Path, count: int) -> None:
    """Points of seven classes that overlap, so that some are told wrongly."""
    chance = np.random.default_rng(3)
    centres = chance.normal(size=(_CLASSES, _WIDTH))
    columns = {"point": f"ndarray:float32:{_WIDTH}", "label": "int"}
    with MDSWriter(out=str(folder), columns=columns, size_limit=2048) as writer:
        for _ in range(count):
            label = int(chance.integers(_CLASSES))
            point = centres[label] + 1.5 * chance.normal(size=_WIDTH)
            writer.write({"point": point.astype(np.float32), "label": label})


def fixed_model() -> torch.nn.Module:
    """Tells a point's class by the nearest centre."""
    centres = np.random.default_rng(3).normal(size=(_CLASSES, _WIDTH)).astype(np.float32)
    model = torch.nn.Linear(_WIDTH, _CLASSES)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(centres))
        model.bias.copy_(-0.5 * model.weight.square().sum(1))
    return model.eval()


def judge(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """int64[4]: what a batch adds to the tally."""
    logits = model(batch["point"])
    losses = torch.nn.functional.cross_entropy(logits, batch["label"], reduction="none")
    return tally(logits.argmax(1) == batch["label"], losses).sum(0)


@torch.inference_mode()
def measure(rank: int, num_ranks: int, folder: str, meeting: str, out: str) -> None:
    """What one of the processes does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=num_ranks)
    model = fixed_model()
    dataset = StreamingDataset(remote=folder, local=f"{folder}-cache-{num_ranks}")
    loader = StreamingDataLoader(dataset, batch_size=16, evaluation=True, world=World(rank, num_ranks, num_ranks))
    counted = sum((judge(model, batch) for batch in loader), torch.zeros(4, dtype=torch.int64))
    own = torch.tensor([Tally.of(counted).accuracy], dtype=torch.float64)
    dist.all_reduce(counted)  # whole numbers: the same in any order
    dist.all_reduce(own)

    sampler: Any = DistributedSampler(range(dataset.size), num_ranks, rank, shuffle=False)  # type: ignore[arg-type]
    repeated = DataLoader(_ById(dataset), batch_size=16, sampler=sampler)
    with_repeats = sum((judge(model, batch) for batch in repeated), torch.zeros(4, dtype=torch.int64))
    dist.all_reduce(with_repeats)
    if rank == 0:
        found = Result(num_ranks, Tally.of(counted), float(own) / num_ranks, Tally.of(with_repeats).accuracy)
        torch.save(asdict(found), out)
    dist.barrier()
    dist.destroy_process_group()


class _ById(torch.utils.data.Dataset[Any]):
    """The samples by index, for torch's own loader."""

    def __init__(self, dataset: StreamingDataset) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __len__(self) -> int:
        return self.dataset.size


def measured_by(num_ranks: int, folder: Path) -> Result:
    """Evaluate with so many processes."""
    with tempfile.TemporaryDirectory() as scratch:
        meeting, out = f"{scratch}/meeting", f"{scratch}/result.pt"
        torch.multiprocessing.spawn(measure, (num_ranks, str(folder), meeting, out), nprocs=num_ranks)
        held = torch.load(out, weights_only=True)
    return Result(**{**held, "counted": Tally(**held["counted"])})


def main(arguments: list[str] | None = None) -> int:
    """Evaluate with several numbers of processes; 0 if all measure the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=103)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    settings = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "held_out"
        write_samples(folder, settings.samples)
        results = [measured_by(num_ranks, folder) for num_ranks in settings.ranks]
    print("processes   right of all   accuracy              mean of processes     with repeats")
    for one in results:
        right = f"{one.counted.right} of {one.counted.total}"
        exact, mean, repeats = (
            f"{value!r:<20}" for value in (one.counted.accuracy, one.mean_of_ranks, one.with_repeats)
        )
        print(f"{one.num_ranks:9}   {right:>12}   {exact}  {mean}  {repeats}".rstrip())
    same = len({(one.counted.accuracy, one.counted.total) for one in results}) == 1
    print("The accuracies are the same to the last digit." if same else "The accuracies DIFFER.")
    return 0 if same and results[0].counted.total == settings.samples else 1


if __name__ == "__main__":
    sys.exit(main())
