"""One process of a distributed run: trains up to a step, and writes down what this rank's samples were.

python -m support.lightning_worker '{"shards": ..., "out": ..., "ckpt": ..., ...}'
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_stream import GracefulStop, StreamingDataModule
from support.lightning_runs import Recorder, Run, keep_all


class KillAt(Callback):
    """Ends the process as `kill -9` would, before a given optimizer step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            _write(trainer, self.out)
            os.kill(os.getpid(), 9)

    out: Path


class StopAt(Callback):
    """Ends the run as an early stop would, after a given optimizer step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.should_stop = True


class WriteDown(Callback):
    """Writes what this rank saw, in whichever process it runs, however it ends."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        _write(trainer, self.out)

    def on_fit_end(self, trainer: Any, *_: Any) -> None:
        _write(trainer, self.out)


class EndsRank(Callback):
    """Lets some ranks come to an end before a given optimizer step: by an exception, or by a signal's number."""

    def __init__(self, step: int, ranks: list[int], how: str | int) -> None:
        self.step, self.ranks, self.how = step, ranks, how

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step != self.step or trainer.global_rank not in self.ranks:
            return
        self.step = -1
        if isinstance(self.how, int):
            os.kill(os.getpid(), self.how)
        else:
            raise RuntimeError(self.how)


class Sharded(Recorder):
    """A `Recorder` whose parameters are sharded by FSDP2."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class Split(Recorder):
    """A `Recorder` whose layers are split over pairs of ranks, and sharded by FSDP2 over the pairs."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        parallelize_module(
            self.net, self.device_mesh["tensor_parallel"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class Writer(Recorder):
    """A `Recorder` that predicts the numbers of its samples, filler aside."""

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> list[int]:
        return self._real(batch, self.trainer.predict_dataloaders)

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self._validating += self._real(batch, self.trainer.test_dataloaders)

    def on_test_epoch_end(self) -> None:
        pass

    @staticmethod
    def _real(batch: dict[str, Any], loader: Any) -> list[int]:
        ids: list[int] = batch["id"][~torch.from_numpy(loader.last_batch.filler)].tolist()
        return ids


def _write(trainer: Any, out: Path) -> None:
    steps = {step: sorted(ids) for step, ids in trainer.lightning_module.steps.items()}
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in trainer.lightning_module.parameters()]
    weights = torch.cat([p.detach().flatten() for p in whole]).tolist()
    validated = [[step, list(ids)] for step, ids in trainer.lightning_module.validations]
    content = {"steps": steps, "weights": weights, "validations": validated, "global_step": trainer.global_step}
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"rank{trainer.global_rank}of{trainer.world_size}.json"
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(content))
    draft.replace(path)  # who is killed leaves the last whole one


def evaluate(shards: Path, out: Path, devices: int, strategy: str) -> None:
    """Predict and test, and write down what this rank saw."""
    data = StreamingDataModule(test={"remote": shards}, predict={"remote": shards}, batch_size=8)
    trainer = pl.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, logger=False, enable_progress_bar=False,
        enable_checkpointing=False, default_root_dir=out,
    )  # fmt: skip
    module = Writer()
    predicted = [number for batch in trainer.predict(module, datamodule=data) or [] for number in batch]
    trainer.test(module, datamodule=data, verbose=False)
    out.mkdir(parents=True, exist_ok=True)
    content = {"predicted": predicted, "tested": module._validating}
    (out / f"rank{trainer.global_rank}.json").write_text(json.dumps(content))


def main() -> None:
    """Run what the argument describes."""
    options = json.loads(sys.argv[1])
    shards, out = Path(options.pop("shards")), Path(options.pop("out"))
    if options.pop("evaluate", False):
        evaluate(shards, out, **options)
        return
    ckpt, every = options.pop("ckpt", None), options.pop("every", 1)
    callbacks: list[Callback] = [keep_all(out, every_n_train_steps=every), WriteDown(out)]
    if (kill := options.pop("kill_at", None)) is not None:
        killer = KillAt(kill)
        killer.out = out
        callbacks.append(killer)
    if (stop := options.pop("stop_at", None)) is not None:
        callbacks.append(StopAt(stop))
    if (ending := options.pop("ends", None)) is not None:
        callbacks.append(EndsRank(*ending))
    if (agree_every := options.pop("graceful", None)) is not None:
        callbacks.append(GracefulStop(out / "graceful", agree_every_n_steps=agree_every))
    if options.get("strategy") == "fsdp2":
        options |= {"strategy": ModelParallelStrategy(options["devices"], 1), "recorder": Sharded}
    if options.get("strategy") == "pairs":
        options |= {"strategy": ModelParallelStrategy(options["devices"] // 2, 2), "recorder": Split}
    Run(shards, out, ckpt, callbacks=callbacks, **options)


if __name__ == "__main__":
    main()
