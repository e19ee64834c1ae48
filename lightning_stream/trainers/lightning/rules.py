"""Settings of Lightning that cannot be exact are refused, with the reason, before training starts."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_stream.dataset import StreamingDataset, plain_iterations_of
from lightning_stream.errors import StateError
from lightning_stream.loader import StreamingDataLoader
from lightning_stream.loading.source import BatchSettings
from lightning_stream.order.micro_batches import MicroBatch
from lightning_stream.trainers.lightning.loops import LoopPosition, lacks_last

_TUNERS = ("LearningRateFinder", "BatchSizeFinder")


def check_callbacks(trainer: Any) -> None:
    """Refuse callbacks that hang several ranks, or change the global batch."""
    for callback in trainer.callbacks:
        name = type(callback).__name__
        saves = name == "OnExceptionCheckpoint" or getattr(callback, "save_on_exception", False)
        if saves and trainer.world_size > 1:
            raise ValueError(
                f"{name} saves on an exception, which may come on one rank only; saving is collective, so the other "
                f"of the {trainer.world_size} ranks would wait for ever. Remove it: the last periodic checkpoint "
                "serves, see ModelCheckpoint(every_n_train_steps=...)"
            )
        if name == "GradientAccumulationScheduler" and callback.going_to_accumulate_grad_batches():
            raise ValueError(
                "one optimizer step must take one global batch, whose size is known when the data is set up; "
                f"GradientAccumulationScheduler({callback.scheduling}) changes it later. Use "
                "Trainer(accumulate_grad_batches=...) instead, and another number from a checkpoint on"
            )


def check_tuners(trainer: Any, checkpoint: Mapping[str, Any]) -> None:
    """Refuse to resume where a callback looks for a learning rate or a batch size before the training.

    Lightning goes back to where it began to look, and then trains the whole run again, from its first step on.
    """
    for callback in trainer.callbacks:
        hook = type(callback).on_fit_start.__qualname__  # some subclasses look elsewhere
        if hook.split(".")[0] in _TUNERS and checkpoint["global_step"] > trainer.global_step:
            raise StateError(
                f"a resumed run must continue from its checkpoint, of step {checkpoint['global_step']}, but after "
                f"{type(callback).__name__} Lightning trains from step 0 again. Remove it where ckpt_path is passed: "
                "the checkpoint has the learning rate, and the batch size that was found is a setting"
            )


def check_loader(trainer: Any, loader: StreamingDataLoader) -> None:
    """Refuse a loader that accumulates otherwise than the trainer, or shuffles where epochs are alike."""
    if trainer.lightning_module.automatic_optimization:
        _check_accumulation(trainer, loader)
    if trainer.overfit_batches and loader.settings().order.shuffle:
        raise ValueError(
            f"overfit_batches={trainer.overfit_batches} trains on the same batches in every epoch, but this loader's "
            "dataset shuffles, which draws others. Pass shuffle=False to the dataset"
        )


def _check_accumulation(trainer: Any, loader: StreamingDataLoader) -> None:
    if loader.accumulate != trainer.accumulate_grad_batches:
        raise ValueError(
            "a global batch is what one optimizer step takes, but the trainer accumulates "
            f"{trainer.accumulate_grad_batches} micro-batches a step and the loader {loader.accumulate}. Give both the "
            "same number: Trainer(accumulate_grad_batches=...), StreamingDataLoader(accumulate=...)"
        )
    if loader.epochs_differ:
        return  # every global batch is cut into as many micro-batches
    settings = loader.settings()
    plan = loader.micro_batches_from(loader.first_position()).plan
    rests = range(plan.num_whole_batches, plan.num_batches - 1)
    if any(plan.num_micro_batches(k, settings.device_batch_size) != loader.accumulate for k in rests):
        raise ValueError(
            f"Lightning steps at every {loader.accumulate}th micro-batch, but with "
            f"batching_method={settings.order.batching_method!r} the rests of the streams are global batches of fewer. "
            "Pass tail='drop', or accumulate 1"
        )


def check_alignment(loader: StreamingDataLoader, at: LoopPosition) -> None:
    """Refuse to resume where Lightning would step in the middle of global batches, whose size has changed."""
    if at.batch % loader.accumulate and at.batch != at.num_batches:
        raise StateError(
            f"Lightning steps at every {loader.accumulate}th micro-batch counted from the epoch's beginning, but the "
            f"global batch has changed to {loader.settings().global_batch_size} samples in the middle of an epoch, at "
            f"what would be micro-batch {at.batch} of {at.num_batches}. Keep the former size, accumulate 1, or resume "
            "from a checkpoint at the start of an epoch"
        )


def check_counted(num_batches: int, at: LoopPosition) -> None:
    """Refuse to resume inside an epoch whose loader counts other batches than the one before the resume counted."""
    if num_batches != at.batch:
        raise StateError(
            f"a resumed epoch must have the batches that it had before, but train_dataloader() made a loader by which "
            f"{num_batches} micro-batches of epoch {at.epoch} are done, and before that one by which {at.batch} are. "
            "Let it make the same loader whenever it is asked in the same epoch"
        )


def check_last(trainer: Any) -> None:
    """Refuse ``ckpt_path="last"`` where it found nothing although there are checkpoints.

    Lightning would begin from the start, with no more than a warning.
    """
    if not lacks_last(trainer):
        return
    root = Path(trainer.default_root_dir)
    dirpaths = [callback.dirpath for callback in trainer.callbacks if hasattr(callback, "dirpath")]
    folders = [Path(folder) for folder in dirpaths if folder]
    if None in dirpaths or not dirpaths:  # ModelCheckpoint then saves in a folder of the logger, a new one for each run
        logged = [Path(logger.save_dir or root) / str(logger.name) for logger in trainer.loggers]
        folders += [root / "checkpoints", *(path for folder in logged for path in folder.glob("*/checkpoints"))]
    checkpoints = [path for folder in folders for path in folder.glob("*.ckpt")]
    if not checkpoints:
        return
    newest = str(max(checkpoints, key=lambda path: path.stat().st_mtime))
    raise StateError(
        f'ckpt_path="last" must find the last checkpoint, but none is marked as last for this run among the '
        f"{len(checkpoints)} in {Path(newest).parent}: training would start again. Pass ModelCheckpoint(dirpath=..., "
        f"save_last=True) from the first run on, or name the file: ckpt_path={newest!r}"
    )


def check_others(loaders: Sequence[Any], *, is_resumed: bool) -> None:
    """Warn of training loaders over datasets of ours whose position Lightning does not keep; refuse a resume with them.

    A dataset that the user's own code has given a state continues from there.
    """
    datasets = [
        dataset for loader in loaders if isinstance(dataset := getattr(loader, "dataset", None), StreamingDataset)
    ]
    if not datasets:
        return
    if any(isinstance(loader, StreamingDataLoader) for loader in loaders):
        reason = f"the position of one training loader is kept, but a collection of {len(loaders)} was given"
        cure = "Pass one loader to fit, and mix the data as streams= of one StreamingDataset"
    elif any(plain_iterations_of(dataset).loaded_state is None for dataset in datasets):
        reason = "Lightning does not resume torch's DataLoader"
        cure = (
            "Replace it by StreamingDataLoader(dataset, batch_size=...), imported from lightning_stream; nothing else "
            "has to change"
        )
    else:
        return
    if is_resumed:
        raise StateError(f"a resumed run must train on what its checkpoint has not seen, but {reason}. {cure}")
    warnings.warn(f"{reason}: no checkpoint of this run can be resumed. {cure}", stacklevel=2)


def weight_of(current: MicroBatch, settings: BatchSettings) -> float:
    """What a micro-batch's loss must be multiplied by, so that each sample of its step weighs the same.

    Lightning divides by the accumulation, and the ranks' gradients are averaged: right for whole steps only.
    """
    micro_batches = settings.accumulate * settings.world.num_replicas
    return micro_batches * current.num_samples / (current.end - current.begin)
