"""One process of a distributed run: trains, and writes down what this rank's samples were.

python -m support.worker HOST '{"shards": ..., "out": ..., "checkpoint": ..., "ends": [step, ranks, how], ...}'
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write(out: Path, rank: int, world: int, content: dict[str, Any]) -> None:
    """Write down what a rank saw; a process that is killed leaves the last whole file."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"rank{rank}of{world}.json"
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(content))
    draft.replace(path)


def lightning(shards: Path, out: Path, checkpoint: str | None, ends: Sequence[Any] = (), **options: Any) -> None:
    """Train under Lightning."""
    from lightning.pytorch.strategies import ModelParallelStrategy

    from lightning_stream import GracefulStop
    from support.lightning_runs import Run, keep_all
    from support.rank_callbacks import Ends, Sharded, WritesDown

    stop_at, agree_every = options.pop("stop_at", -1), options.pop("graceful", None)
    callbacks = [keep_all(out, every_n_train_steps=options.pop("every", 1)), WritesDown(out), Ends(ends, stop_at)]
    if agree_every is not None:
        callbacks.append(GracefulStop(out / "graceful", agree_every_n_steps=agree_every))
    pairs = {"fsdp2": 1, "pairs": 2}.get(options.get("strategy"))
    if pairs is not None:
        options |= {"strategy": ModelParallelStrategy(options["devices"] // pairs, pairs), "recorder": Sharded}
    Run(shards, out, checkpoint, callbacks=callbacks, **options)


def predict_and_test(shards: Path, out: Path, checkpoint: str | None, **options: Any) -> None:
    """Predict and test under Lightning."""
    import torch

    from lightning_stream import StreamingDataModule
    from support.lightning_runs import QUIET, Recorder, pl

    class Writer(Recorder):
        """A `Recorder` that predicts the numbers of its samples, filler aside."""

        def predict_step(self, batch: dict[str, Any], batch_idx: int) -> list[int]:
            return self._real(batch, self.trainer.predict_dataloaders)

        def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
            self._validating += self._real(batch, self.trainer.test_dataloaders)

        @staticmethod
        def _real(batch: dict[str, Any], loader: Any) -> list[int]:
            ids: list[int] = batch["id"][~torch.from_numpy(loader.last_batch.filler)].tolist()
            return ids

    data = StreamingDataModule(test={"remote": shards}, predict={"remote": shards}, batch_size=8)
    trainer, module = pl.Trainer(**{**QUIET, "default_root_dir": out, **options}), Writer()
    predicted = [number for batch in trainer.predict(module, datamodule=data) or [] for number in batch]
    trainer.test(module, datamodule=data, verbose=False)
    write(out, trainer.global_rank, trainer.world_size, {"predicted": predicted, "tested": module._validating})


def composer(shards: Path, out: Path, checkpoint: str | None, ends: Sequence[Any] = (), **options: Any) -> None:
    """Train under Composer."""
    from composer import Callback
    from composer.utils import dist

    from support.composer_runs import Run

    class Ends(Callback):
        """Ends the process by a signal in the middle of an optimizer step."""

        def after_loss(self, state: Any, logger: Any) -> None:
            if ends and int(state.timestamp.batch) == ends[0]:
                model = getattr(state.model, "module", state.model)
                write(out, dist.get_global_rank(), dist.get_world_size(), {"steps": model.steps})
                os.kill(os.getpid(), ends[2])

    if (folder := options.pop("composed", None)) is not None:
        from support.chains import composed

        options |= dict(zip(("dataset", "data"), composed(Path(folder)), strict=True))
    run = Run(shards, out, checkpoint, callbacks=[Ends()], **options)
    content = {"steps": run.steps, "losses": run.losses, "weights": run.weights, "evaluations": run.evaluations}
    write(out, dist.get_global_rank(), dist.get_world_size(), content)


def main(host: str, text: str) -> None:
    """Run what the text describes."""
    warnings.simplefilter("ignore")
    options = json.loads(text)
    places = Path(options.pop("shards")), Path(options.pop("out")), options.pop("checkpoint", None)
    {"Lightning": lightning, "predict and test": predict_and_test, "Composer": composer}[host](*places, **options)


if __name__ == "__main__":
    main(*sys.argv[1:])
