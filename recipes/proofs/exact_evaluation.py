"""Proof: an accuracy is the same to the last digit on any number of processes, however unevenly they share samples.

    python -m recipes.proofs.exact_evaluation                            # 103 samples over 1, 2 and 3 processes
    python -m recipes.proofs.exact_evaluation --ranks 1 2 3 5

Each sample is counted once, and whole numbers are added. Beside it are the two usual mistakes: the mean of the
processes' own accuracies, and torch's `DistributedSampler`, which repeats samples until every process has as many.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_stream import LocalDataset, MDSWriter, StreamingDataLoader, StreamingDataset
from lightning_stream.order import World

_SAMPLES, _FEATURES, _CLASSES = 103, 16, 7


def write_samples(folder: str, count: int) -> None:
    """Write points around seven centers; the classes overlap, so that the model errs."""
    rng = np.random.default_rng(3)
    centers = rng.normal(size=(_CLASSES, _FEATURES))
    columns = {"point": f"ndarray:float32:{_FEATURES}", "label": "int"}
    with MDSWriter(out=folder, columns=columns, size_limit=2048) as writer:
        for label in rng.integers(_CLASSES, size=count).tolist():
            point = centers[label] + 1.5 * rng.normal(size=_FEATURES)
            writer.write({"point": point.astype(np.float32), "label": label})


def count(batches: Any) -> torch.Tensor:
    """Correct and all predictions, int64[2], of a fixed model: the nearest center."""
    centers = torch.from_numpy(np.random.default_rng(3).normal(size=(_CLASSES, _FEATURES)).astype(np.float32))
    counts = torch.zeros(2, dtype=torch.int64)
    for batch in batches:
        correct = torch.cdist(batch["point"], centers).argmin(1) == batch["label"]
        counts += torch.tensor([int(correct.sum()), len(correct)])
    return counts


def evaluate(rank: int, num_ranks: int, folder: str, rendezvous: str, out: str) -> None:
    """Evaluate in one of several processes; rank 0 saves the results of all."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_ranks)
    dataset = StreamingDataset(remote=folder, local=f"{folder}-cache-{num_ranks}")
    exact = count(StreamingDataLoader(dataset, 16, evaluation=True, world=World(rank, num_ranks, num_ranks)))
    mean = exact[:1].double() / exact[1:] / num_ranks
    plain: Any = LocalDataset(folder)
    repeated = count(DataLoader(plain, 16, sampler=DistributedSampler(plain, num_ranks, rank, shuffle=False)))
    for tensor in (exact, mean, repeated):
        dist.all_reduce(tensor)
    if rank == 0:
        torch.save({"exact": exact, "mean": mean, "repeated": repeated}, out)
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> int:
    """Evaluate on several numbers of processes; 0 if all results are equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args(arguments)
    results = set()
    print("processes   correct      accuracy              mean of processes     DistributedSampler")
    with tempfile.TemporaryDirectory() as scratch:
        folder = str(Path(scratch) / "val")
        write_samples(folder, _SAMPLES)
        for num_ranks in options.ranks:
            rendezvous, out = f"{scratch}/rendezvous-{num_ranks}", f"{scratch}/result-{num_ranks}.pt"
            spawn(evaluate, (num_ranks, folder, rendezvous, out), nprocs=num_ranks)
            found = torch.load(out, weights_only=True)
            (correct, total), (again, of) = found["exact"].tolist(), found["repeated"].tolist()
            shown = f"{correct / total!r:<20}  {found['mean'].item()!r:<20}  {again / of!r}"
            print(f"{num_ranks:9}   {correct:4} of {total:<4} {shown}")
            results.add((correct, total))
    is_exact = len(results) == 1 and results.pop()[1] == _SAMPLES
    print("The accuracies are equal to the last digit." if is_exact else "The accuracies DIFFER.")
    return 0 if is_exact else 1


if __name__ == "__main__":
    sys.exit(main())
