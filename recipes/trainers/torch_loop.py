"""A plain torch loop: a recipe's model on its streamed data, in one process or in those that torchrun started.

It shows where a `StreamingDataLoader` belongs, what a checkpoint must hold of it, and how each sample of an optimizer
step counts once on any number of devices. A step computes what it computes under Lightning, to the bit.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_stream.errors import StateError
from lightning_stream.loader import StreamingDataLoader
from lightning_stream.loading.distributed import detect_world
from lightning_stream.loading.plain import STATE_KEY
from lightning_stream.loading.randomness import sample_seed
from lightning_stream.order import World
from lightning_stream.shared_files import publish
from lightning_stream.trainers.lightning.graceful_stop import TrainingInterrupted
from recipes.data.base import RecipeData
from recipes.models.base import Batch, RecipeModule
from recipes.report import RunFigures

_FORMAT = "recipes.torch_loop/1"
_PRECISIONS = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_AGREE_EVERY = 10  # optimizer steps after which several processes agree whether one got a signal
_CONVERSION_LIMIT = timedelta(days=30)  # others wait so long for the first process; torch's default is 10 or 30 minutes


def on_first_rank(task: Callable[[], object]) -> None:
    """Do a task that may take hours on the first of all processes, while the others wait."""
    if not dist.is_initialized():
        task()
        return
    group = dist.new_group(backend="gloo", timeout=_CONVERSION_LIMIT)
    if dist.get_rank() == 0:
        task()
    dist.barrier(group)
    dist.destroy_process_group(group)


class _Loss(nn.Module):
    """The model's loss as a forward pass, which DDP can wrap."""

    def __init__(self, model: RecipeModule) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch, keep: Tensor, total: int) -> Tensor:
        """See `RecipeModule.training_loss`."""
        return self.model.training_loss(batch, keep, total)


class TorchTrainer:
    """Trains a recipe's model on its data in a plain loop.

    Args:
        folder: Of the run; checkpoints are in its ``torch``.
        max_epochs: Epochs of the whole run; -1 for as many as `max_steps` needs.
        max_steps: Optimizer steps of the whole run; -1 for no such limit.
        accelerator: ``"cpu"``, ``"gpu"``, or ``"auto"`` for a GPU where there is one.
        precision: ``"32-true"``, ``"bf16-mixed"`` or ``"16-mixed"``.
        accumulate_grad_batches: Micro-batches of one optimizer step on each device.
        val_check_interval: Optimizer steps between validations within an epoch; None for none.
        check_val_every_n_epoch: Epochs between validations at an epoch's end; None for none.
        gradient_clip_val: Largest norm of a step's gradient; None for no limit.
        save_every_n_steps: Optimizer steps between checkpoints; there is one after each epoch, too.
        log_every_n_steps: Optimizer steps between logged losses.
        enable_progress_bar: Whether to show one.
    """

    def __init__(
        self,
        *,
        folder: str,
        max_epochs: int = 10,
        max_steps: int = -1,
        accelerator: str = "auto",
        precision: str = "32-true",
        accumulate_grad_batches: int = 1,
        val_check_interval: int | None = None,
        check_val_every_n_epoch: int | None = 1,
        gradient_clip_val: float | None = None,
        save_every_n_steps: int = 20,
        log_every_n_steps: int = 5,
        enable_progress_bar: bool = True,
    ) -> None:
        if precision not in _PRECISIONS:
            raise ValueError(f"precision must be one of {', '.join(_PRECISIONS)} in a plain loop; found {precision!r}.")
        if max_epochs < 0 and max_steps < 0:
            raise ValueError("max_epochs and max_steps are both -1, so the run would never end. Set one of them.")
        self.path = Path(folder) / "torch" / "last.pt"
        self.max_epochs, self.max_steps = max_epochs, max_steps
        self.on_gpu = accelerator in ("gpu", "cuda") or (accelerator == "auto" and torch.cuda.is_available())
        self.half, self.accumulate, self.clip = _PRECISIONS[precision], accumulate_grad_batches, gradient_clip_val
        self.val_steps, self.val_epochs = val_check_interval, check_val_every_n_epoch
        self.save_every, self.log_every, self.shows_bar = save_every_n_steps, log_every_n_steps, enable_progress_bar

    def fit(
        self, model: RecipeModule, data: RecipeData, ckpt_path: str | None = None, logger: Any = None
    ) -> RunFigures:
        """Train; the model's `history` holds the metrics afterwards.

        Args:
            model: What to train.
            data: What to train on.
            ckpt_path: A checkpoint of this trainer to resume from.
            logger: One of Lightning's loggers, on the first rank.

        Raises:
            StateError: The checkpoint cannot be resumed from.
            TrainingInterrupted: A signal ended the run; a checkpoint was saved.
        """
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if self.on_gpu else torch.device("cpu")
        if self.on_gpu:
            torch.cuda.set_device(device)
        with _process_group("nccl" if self.on_gpu else "gloo"):
            on_first_rank(data.prepare_data)
            run = _Run(self, model, data, device, logger)
            try:
                if ckpt_path is not None:
                    run.load(ckpt_path)
                run.train()
            finally:
                run.loader.close()
                run.val_loader.close()
        return run.figures


class _Run:
    """A run in progress, in one of its processes."""

    def __init__(
        self, trainer: TorchTrainer, model: RecipeModule, data: RecipeData, device: torch.device, logger: Any
    ) -> None:
        self.trainer, self.model, self.device, self.logger = trainer, model, device, logger
        self.world: World = detect_world()
        self.seed = data.position_callback.tracker.seed_steps or 0
        model.build(data)
        model.to(device)
        common: dict[str, Any] = {
            "num_workers": data.num_workers,
            "persistent_workers": data.num_workers > 0,
            "pin_memory": trainer.on_gpu,
            "world": self.world,
        }
        self.loader = StreamingDataLoader(
            data.train_dataset,
            global_batch_size=data.global_batch_size,
            accumulate=trainer.accumulate,
            tail=data.tail,
            **common,
        )
        val_size = data.eval_batch_size or self.loader.batch_size
        self.val_loader = StreamingDataLoader(data.val_dataset, val_size, evaluation=True, **common)
        self.loss: nn.Module = _Loss(model)
        if self.world.num_ranks > 1:
            self.loss = DistributedDataParallel(self.loss, device_ids=[device.index] if trainer.on_gpu else None)
        self.optimizer = model.optimizer()
        steps_per_epoch = -(-len(self.loader) // trainer.accumulate)
        self.total_steps = min(n for n in (trainer.max_epochs * steps_per_epoch, trainer.max_steps) if n >= 0)
        self.schedule = model.schedule(self.optimizer, self.total_steps)
        self.scaler = torch.amp.GradScaler(device.type, enabled=trainer.half == torch.float16)
        self.step, self.signum, self.figures = 0, 0, RunFigures()

    def train(self) -> None:
        """Train from where the loader is to the end of the run."""
        with _signals(self._remember):
            while self.step < self.total_steps:
                epoch = self.loader.position.epoch
                self._train_epoch(epoch)
                every = self.trainer.val_epochs
                if self.step >= self.total_steps or (every and (epoch + 1) % every == 0):
                    self._validate(epoch)
                else:
                    self.model.end_pass("train", epoch)
                self.save()
                self._stop_if_asked()
        self.figures.waited_s = self.loader.waited_s

    def _train_epoch(self, epoch: int) -> None:
        self.model.train()
        loss = torch.zeros((), device=self.device)
        began, validated_s = time.perf_counter(), self.figures.validation_s
        done = self.loader.batches_before(self.loader.position)
        off = not self.trainer.shows_bar or self.world.rank > 0
        bar = tqdm(total=len(self.loader), initial=done, desc=f"Epoch {epoch}", disable=off, file=sys.stderr)
        with bar:
            for number, batch in enumerate(self.loader, done):
                # Each micro-batch has its own seed, so dropout draws the same after a resume.
                torch.manual_seed(sample_seed(self.seed, self.step * 65536 + self.world.rank, number))
                loss += self._backward(_to(batch, self.device))
                bar.update()
                if self._micro_batch().completes_step:
                    self._optimize(loss, epoch)
                    loss = torch.zeros_like(loss)
                    self._after_step(epoch)
                    if self.step >= self.total_steps:
                        break
        self.figures.training_s += time.perf_counter() - began - (self.figures.validation_s - validated_s)

    def _micro_batch(self) -> Any:
        """What the batch in training consists of."""
        assert self.loader.last_batch is not None
        return self.loader.last_batch

    def _backward(self, batch: Batch) -> Tensor:
        """Add a micro-batch's gradient; gives its part of the step's loss in this process."""
        info, ddp = self._micro_batch(), self.loss
        keep = torch.from_numpy(~info.filler).to(self.device)
        self.figures.num_samples += info.num_samples * self.world.num_ranks
        waits = isinstance(ddp, DistributedDataParallel) and not info.completes_step
        with ddp.no_sync() if waits else nullcontext():  # type: ignore[operator]
            with self._autocast():
                loss: Tensor = ddp(batch, keep, info.end - info.begin)
            # DDP computes the mean over processes, where the sum is needed.
            torch.autograd.backward(self.scaler.scale(loss * self.world.num_ranks))
        return loss.detach()

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, self.trainer.half, enabled=self.trainer.half is not None)

    def _optimize(self, loss: Tensor, epoch: int) -> None:
        if self.trainer.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.trainer.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        rate = self.schedule.get_last_lr()[0]
        self.schedule.step()
        self.step += 1
        self.figures.num_steps += 1
        if self.step % self.trainer.log_every == 0:
            value = float(_summed(loss))
            self._log({"train/loss": value, "learning_rate": rate, "epoch": epoch})

    def _log(self, values: Mapping[str, float]) -> None:
        if self.logger is not None:
            self.logger.log_metrics(dict(values), step=self.step - 1)  # Lightning counts steps from 0

    def _validate(self, epoch: int) -> None:
        began = time.perf_counter()
        self.model.eval()
        self.model.reset_metrics("val")
        for batch in self.val_loader:
            with torch.inference_mode(), self._autocast():
                self.model.evaluate(_to(batch, self.device))
        computed = {**self.model.end_pass("train", epoch), **self.model.end_pass("val", epoch)}
        computed.pop("train/loss", None)
        self._log({**computed, "epoch": epoch})
        self.figures.validation_s += time.perf_counter() - began
        self.model.train()

    def _after_step(self, epoch: int) -> None:
        if self._micro_batch().ends_epoch or self.step >= self.total_steps:
            return  # the end of the epoch validates and saves
        if self.trainer.val_steps and self.step % self.trainer.val_steps == 0:
            self._validate(epoch)
        if self.step % self.trainer.save_every == 0:
            self.save()
        if self.world.num_ranks == 1 or self.step % _AGREE_EVERY == 0:
            self._stop_if_asked(save=True)

    def save(self) -> None:
        """Write a checkpoint, whole or not at all. All processes call this; the first writes."""
        metrics = self.model.metric_state()
        if self.world.rank:
            return
        content = {
            "format": _FORMAT,
            "state_dict": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "step": self.step,
            "metrics": metrics,
            # Plain values, the same on every rank, where Lightning keeps them: `checkpoint show` finds them too.
            "callbacks": {STATE_KEY: {"position": self.loader.state_dict()}},
        }
        self.trainer.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.trainer.path.with_name(f"draft-{secrets.token_hex(8)}")
        try:
            torch.save(content, draft)
            publish(draft, self.trainer.path)
        finally:
            draft.unlink(missing_ok=True)

    def load(self, path: str) -> None:
        """Resume from a checkpoint, which any number of processes may have written."""
        content = torch.load(path, map_location="cpu", weights_only=True)
        if content.get("format") != _FORMAT:
            raise StateError(
                f"{path} must be a checkpoint of trainer=torch ({_FORMAT}). Choose the trainer that wrote it."
            )
        self.model.load_state_dict(content["state_dict"])
        self.optimizer.load_state_dict(content["optimizer"])
        self.schedule.load_state_dict(content["schedule"])
        self.scaler.load_state_dict(content["scaler"])
        self.step = content["step"]
        self.model.load_metric_state(content["metrics"], self.world.rank == 0)
        self.loader.load_state_dict(content["callbacks"][STATE_KEY]["position"])
        if self.world.rank == 0:
            position = self.loader.position
            print(
                f"Resumed at epoch {position.epoch}, step {self.step:,} ({position.position:,} samples of this epoch)."
            )

    def _remember(self, signum: int, _frame: object) -> None:
        if self.signum:
            raise KeyboardInterrupt
        self.signum = signum
        os.write(2, b"\nFinishing this step, then saving a checkpoint (again to quit now).\n")

    def _stop_if_asked(self, save: bool = False) -> None:
        if int(_summed(torch.tensor(int(self.signum > 0), device=self.device))):
            if save:
                self.save()
            raise TrainingInterrupted(self.signum or signal.SIGTERM, self.trainer.path)


def _summed(value: Tensor) -> Tensor:
    """The sum over all processes, which all call this."""
    if dist.is_initialized():
        value = value.clone()
        dist.all_reduce(value)
    return value


def _to(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    return {name: _to(value, device) for name, value in batch.items()} if isinstance(batch, Mapping) else batch


@contextmanager
def _process_group(backend: str) -> Iterator[None]:
    """Join the processes that torchrun started, if it did."""
    joins = detect_world().num_ranks > 1 and not dist.is_initialized()
    if joins and "MASTER_ADDR" not in os.environ:
        raise ValueError("MASTER_ADDR is not set: start several processes with torchrun (under SLURM: srun torchrun).")
    if joins:
        dist.init_process_group(backend)
    try:
        yield
    finally:
        if joins:
            dist.destroy_process_group()


@contextmanager
def _signals(handler: Callable[[int, object], None]) -> Iterator[None]:
    before = {signum: signal.signal(signum, handler) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, earlier in before.items():
            signal.signal(signum, earlier)
