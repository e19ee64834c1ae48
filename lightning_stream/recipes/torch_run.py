"""A plain loop in torch: a recipe's model on its streamed data, in one process or in those that torchrun started.

What the loop shows: where a loader of ours belongs, what a checkpoint must hold of it, and how each sample of an
optimizer step counts once on any number of devices. One optimizer step is the same as under Lightning, to the bit.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_stream.errors import StateError
from lightning_stream.loader import StreamingDataLoader
from lightning_stream.loading.plain import STATE_KEY
from lightning_stream.loading.randomness import sample_seed
from lightning_stream.order.micro_batches import MicroBatch
from lightning_stream.recipes.callbacks import RunStopped
from lightning_stream.recipes.converted_set import TRAIN, VAL
from lightning_stream.recipes.places import TORCH, checkpoint_meant, last_checkpoint
from lightning_stream.recipes.steps_log import StepsLog
from lightning_stream.recipes.task import Batch, TaskData, TaskModel
from lightning_stream.recipes.torch_processes import Processes, started
from lightning_stream.shared_files import publish

KEY = "lightning_stream.torch_run"
"""What tells a checkpoint of this loop from others'."""

_VERSION = 1
_PRECISIONS = {"32-true": None, "32": None, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_AGREE_EVERY = 10  # optimizer steps after which several processes ask each other whether one was told to stop


@dataclass
class RunFigures:
    """What one launch did, for its summary: of this process, in seconds and samples."""

    num_samples: int = 0
    num_steps: int = 0
    training_s: float = 0.0
    validating_s: float = 0.0
    waited_s: float = 0.0
    longest_s: float = 0.0


class _Loss(nn.Module):
    """The model's loss as a forward pass: what DDP wraps."""

    def __init__(self, model: TaskModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch, keep: Tensor, total: int) -> Tensor:
        """See `TaskModel.loss`."""
        return self.model.loss(batch, keep, total)


class TorchRun:
    """Trains a recipe's model on its data in a plain loop; stands where Lightning's `Trainer` does.

    Args:
        folder: The run's; checkpoints and the log go into its ``torch``.
        max_epochs: Epochs of the whole run; -1 for as many as `max_steps` takes.
        max_steps: Optimizer steps of the whole run, where these are fewer; -1 for no such limit.
        accelerator: ``"cpu"``, ``"gpu"``, or ``"auto"``.
        devices, num_nodes: What the launcher must have started; checked before the run, of no further use here.
        precision: ``"32-true"``, ``"bf16-mixed"`` or ``"16-mixed"``.
        accumulate_grad_batches: Micro-batches of one optimizer step on each device.
        val_check_interval: Optimizer steps between validations; None for none within an epoch.
        check_val_every_n_epoch: Epochs between validations at an epoch's end; None for none there.
        gradient_clip_val: Largest norm of a step's gradient; None for no limit.
        save_every: Optimizer steps between checkpoints; there is one after each epoch, too.
        seed: Of dropout.
        trained_ids: Whether to list the samples that each optimizer step was made of.
        progress: Whether to show a bar.
    """

    def __init__(
        self,
        *,
        folder: str,
        max_epochs: int = 15,
        max_steps: int = -1,
        accelerator: str = "auto",
        devices: int | str = 1,  # noqa: ARG002
        num_nodes: int = 1,  # noqa: ARG002
        precision: str = "32-true",
        accumulate_grad_batches: int = 1,
        val_check_interval: int | None = None,
        check_val_every_n_epoch: int | None = 1,
        gradient_clip_val: float | None = None,
        save_every: int = 20,
        seed: int = 1,
        trained_ids: bool = False,
        progress: bool = True,
    ) -> None:
        if precision not in _PRECISIONS:
            raise ValueError(f"precision is one of {', '.join(_PRECISIONS)} in a plain loop; found {precision!r}.")
        if max_epochs < 0 and max_steps < 0:
            raise ValueError("a run ends somewhere: max_epochs and max_steps are both -1. Set one of them.")
        self.folder = Path(folder)
        self.max_epochs = max_epochs
        self.max_steps = max_steps
        self.accelerator = accelerator
        self.half = _PRECISIONS[precision]
        self.accumulate = accumulate_grad_batches
        self.val_steps = val_check_interval
        self.val_epochs = check_val_every_n_epoch
        self.clip = gradient_clip_val
        self.save_every = save_every
        self.seed = seed
        self.trained_ids = trained_ids
        self.progress = progress
        self.figures = RunFigures()

    def fit(self, model: TaskModel, datamodule: TaskData, ckpt_path: str | None = None) -> dict[str, float]:
        """Train; gives the last measures, under names such as ``val/accuracy``.

        Args:
            model: What to train.
            datamodule: On what.
            ckpt_path: ``"last"`` goes on from the newest checkpoint of this folder; else a file, or None.

        Raises:
            StateError: The checkpoint cannot be continued from.
            RunStopped: A signal asked for it, and a checkpoint was written.
        """
        with started(self.accelerator) as processes:
            if processes.world.rank % processes.world.ranks_per_node == 0:
                datamodule.prepare_data()
            processes.wait_for_all()
            loop = _Loop(self, processes, model, datamodule)
            try:
                if ckpt_path is not None:
                    loop.load(checkpoint_meant(ckpt_path, self.folder, TORCH))
                loop.run()
            finally:
                loop.close()
            return dict(model.history.get(max(model.history, default=0), {}))


class _Loop:
    """All that a run in progress holds."""

    def __init__(self, run: TorchRun, processes: Processes, model: TaskModel, data: TaskData) -> None:
        self.run_of, self.processes, self.figures = run, processes, run.figures
        self.model = model
        model.build(data)
        model.to(processes.device)
        workers: dict[str, Any] = {
            "num_workers": data.num_workers,
            "persistent_workers": data.num_workers > 0,
            "pin_memory": processes.device.type == "cuda",
            "world": processes.world,
        }
        train, val = data.datasets[TRAIN], data.datasets[VAL]
        assert train is not None
        self.loader = StreamingDataLoader(
            train, global_batch_size=data.global_batch_size, accumulate=run.accumulate, tail=data.tail, **workers
        )
        self.val_loader = (
            None
            if val is None
            else StreamingDataLoader(val, data.eval_batch_size or self.loader.batch_size, evaluation=True, **workers)
        )
        self.loss: nn.Module = _Loss(model)
        if processes.are_many:
            on_gpu = processes.device.type == "cuda"
            self.loss = DistributedDataParallel(self.loss, device_ids=[processes.device.index] if on_gpu else None)
        self.optimizer = model.optimizer()
        steps = -(-len(self.loader) // run.accumulate)
        limits = [limit for limit in (run.max_epochs * steps, run.max_steps) if limit >= 0]
        self.total_steps = min(limits)
        self.schedule = model.schedule(self.optimizer, self.total_steps)
        self.scaler = torch.amp.GradScaler(processes.device.type, enabled=run.half == torch.float16)
        self.log = StepsLog(run.folder / TORCH, run.folder / "trained_ids" if run.trained_ids else None, processes)
        self.step = 0
        self.signum: int | None = None

    # The loop

    def run(self) -> None:
        """Train from where the loader stands to the end."""
        self.log.begin(self.step)
        with self._heeding_signals():
            while self.step < self.total_steps:
                epoch = self.loader.position.epoch
                if self.loader.position.position == 0:
                    self.model.begin_pass(TRAIN)
                self._train_epoch(epoch)
                every = self.run_of.val_epochs
                if self.step >= self.total_steps or (every is not None and (epoch + 1) % every == 0):
                    self._validate(epoch)
                else:
                    self.model.end_pass(TRAIN, epoch, self.processes.summed)
                self.save()
                self._stop_if_told()

    def _train_epoch(self, epoch: int) -> None:
        self.model.train()
        before = self.loader.batches_before(self.loader.position)
        loss = torch.zeros((), device=self.processes.device)
        began = time.perf_counter()
        for number, (batch, info, waited_s) in enumerate(self._batches(epoch, before), before):
            # Seeded by its place in the run: dropout is the same after a resume.
            torch.manual_seed(sample_seed(self.run_of.seed, self.step * 65536 + self.processes.world.rank, number))
            loss += self._learn(batch, info)
            self.figures.num_samples += info.num_samples
            self.figures.waited_s += waited_s
            self.figures.longest_s = max(self.figures.longest_s, waited_s)
            self.log.add(info)
            if info.completes_step:
                self._step()
                self.log.end_step(self.step, epoch, loss, float(self.schedule.get_last_lr()[0]))
                loss = torch.zeros_like(loss)
                self.figures.training_s += time.perf_counter() - began
                self._after_step(info)
                began = time.perf_counter()
                if self.step >= self.total_steps:
                    break

    def _batches(self, epoch: int, before: int) -> Iterator[tuple[Any, MicroBatch, float]]:
        """Batches on the device, what each is made of, and how long it was waited for."""
        bar = self.log.bar(f"epoch {epoch + 1}", len(self.loader), before) if self.run_of.progress else None
        batches = iter(self.loader)
        with bar if bar is not None else contextlib.nullcontext():
            while True:
                began = time.perf_counter()
                batch = next(batches, None)
                if batch is None:
                    return
                waited_s = time.perf_counter() - began
                assert self.loader.last_batch is not None
                yield self.processes.moved(batch), self.loader.last_batch, waited_s
                if bar is not None:
                    bar.update()

    def _learn(self, batch: Batch, info: MicroBatch) -> Tensor:
        """Add this micro-batch's gradient; gives its part of the step's loss, over this process alone."""
        keep = torch.from_numpy(~info.filler).to(self.processes.device)
        waits = not info.completes_step and isinstance(self.loss, DistributedDataParallel)
        with self.loss.no_sync() if waits else contextlib.nullcontext():  # type: ignore[operator]
            with self._autocast():
                loss: Tensor = self.loss(batch, keep, info.end - info.begin)
            # DDP takes the mean over processes where the sum is wanted.
            torch.autograd.backward(self.scaler.scale(loss * self.processes.world.num_ranks))
        return loss.detach()

    def _autocast(self) -> Any:
        return torch.autocast(self.processes.device.type, self.run_of.half, enabled=self.run_of.half is not None)

    def _step(self) -> None:
        if self.run_of.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.run_of.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.step += 1
        self.figures.num_steps += 1

    def _validate(self, epoch: int) -> None:
        """Validate, and note what was measured; a checkpoint of this step is written only after."""
        began = time.perf_counter()
        self.model.eval()
        self.model.begin_pass(VAL)
        for batch in self.val_loader or ():
            with torch.inference_mode(), self._autocast():
                self.model.evaluate(self.processes.moved(batch))
        for stage in (TRAIN, VAL):
            self.model.end_pass(stage, epoch, self.processes.summed)
        self.figures.validating_s += time.perf_counter() - began
        self.log.measured(epoch, self.step, self.model.history.get(epoch, {}))
        self.model.train()

    # Checkpoints

    def _after_step(self, info: MicroBatch) -> None:
        if info.ends_epoch or self.step >= self.total_steps:
            return  # the epoch's end, or the run's, comes next, with a checkpoint
        if self.run_of.val_steps is not None and self.step % self.run_of.val_steps == 0:
            self._validate(info.epoch)
        if self.step % self.run_of.save_every == 0:
            self.save()
        if not self.processes.are_many or self.step % _AGREE_EVERY == 0:
            self._stop_if_told(save=True)

    def save(self) -> None:
        """Write a checkpoint, whole or not at all. All processes call this; the first writes."""
        measured = self.model.measured_state(self.processes.summed)
        if not self.processes.is_first:
            return
        content = {
            KEY: _VERSION,
            "state_dict": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "step": self.step,
            "measured": measured,
            # Plain values, the same on every rank; where Lightning keeps it, so that `read_position` finds it too.
            "callbacks": {STATE_KEY: {"position": self.loader.state_dict()}},
        }
        path = last_checkpoint(self.run_of.folder, TORCH)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"draft-{secrets.token_hex(8)}.pt")
        try:
            torch.save(content, draft)
            publish(draft, path)
        finally:
            draft.unlink(missing_ok=True)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint, of any number of processes.

        Raises:
            StateError: It is not one of this loop's, or the data cannot be continued there.
        """
        content = torch.load(path, map_location="cpu", weights_only=True)
        if content.get(KEY) != _VERSION:
            raise StateError(f"{path} must be a checkpoint of trainer=torch, version {_VERSION}; it is another's.")
        self.model.load_state_dict(content["state_dict"])
        self.optimizer.load_state_dict(content["optimizer"])
        self.schedule.load_state_dict(content["schedule"])
        self.scaler.load_state_dict(content["scaler"])
        self.step = content["step"]
        self.model.go_on_measuring(content["measured"], self.processes.is_first)
        self.loader.load_state_dict(content["callbacks"][STATE_KEY]["position"])

    # Stopping

    @contextlib.contextmanager
    def _heeding_signals(self) -> Iterator[None]:
        before = {one: signal.signal(one, self._remember) for one in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)

    def _remember(self, signum: int, _frame: object) -> None:
        if self.signum is not None:
            raise KeyboardInterrupt
        self.signum = signum
        print(f"\n{signal.Signals(signum).name}: stopping soon, at the end of a step ...", flush=True)

    def _stop_if_told(self, save: bool = False) -> None:
        if not self.processes.any(self.signum is not None):
            return
        if save:
            self.save()
        raise RunStopped(self.signum or signal.SIGTERM, last_checkpoint(self.run_of.folder, TORCH))

    def close(self) -> None:
        """End the workers, close the log."""
        self.log.close()
        self.loader.close()
        if self.val_loader is not None:
            self.val_loader.close()
