"""A plain torch loop: a recipe's model on its streamed data, in one process or in those that torchrun started.

It shows where a `StreamingDataLoader` belongs, what a checkpoint must hold of it, and how each sample of an optimizer
step counts once on any number of devices. A step computes what it computes under Lightning, to the bit.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_stream.errors import StateError
from lightning_stream.loader import StreamingDataLoader
from lightning_stream.loading.distributed import detect_world
from lightning_stream.loading.plain import STATE_KEY
from lightning_stream.loading.randomness import sample_seed
from lightning_stream.shared_files import publish
from lightning_stream.trainers.lightning.graceful_stop import TrainingInterrupted
from lightning_stream.trainers.report import RunReport
from recipes.data.base import RecipeData
from recipes.models.base import RecipeModule
from recipes.report import RunFigures

_AGREE_EVERY = 10  # optimizer steps after which several processes agree whether one got a signal
_CONVERSION_LIMIT = timedelta(days=30)  # others wait so long for the first process; torch's default is 10 or 30 minutes


def on_first_rank(task: Callable[[], object]) -> None:
    """Do a task that may take hours on the first of all processes, while the others wait."""
    group: Any = dist.new_group(backend="gloo", timeout=_CONVERSION_LIMIT) if dist.is_initialized() else None
    if group is None or dist.get_rank() == 0:
        task()
    if group is not None:
        dist.barrier(group)


class _Loss(nn.Module):
    """The model's loss as a forward pass, which DDP can wrap."""

    def __init__(self, model: RecipeModule) -> None:
        super().__init__()
        self.model = model

    def forward(self, *arguments: Any) -> Tensor:
        return self.model.training_loss(*arguments)


@dataclass(kw_only=True)
class TorchTrainer:
    """Trains a recipe's model on its data in a plain loop; configs/trainer/torch.yaml describes the settings."""

    folder: str
    max_epochs: int = 10
    max_steps: int = -1
    accelerator: str = "auto"
    precision: str = "32-true"
    accumulate_grad_batches: int = 1
    val_check_interval: int | None = None
    gradient_clip_val: float | None = None
    save_every_n_steps: int = 20
    log_every_n_steps: int = 5
    enable_progress_bar: bool = True
    seed: int = 1
    logger: Any = None  # one of Lightning's

    def __post_init__(self) -> None:
        if self.precision not in ("32-true", "bf16-mixed"):
            raise ValueError(f"precision must be 32-true or bf16-mixed in a plain loop; found {self.precision!r}.")
        on_gpu = self.accelerator in ("gpu", "cuda") or (self.accelerator == "auto" and torch.cuda.is_available())
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
        self.path, self.log = Path(self.folder) / "torch" / "last.pt", (self.logger or DummyLogger()).log_metrics
        self.step, self.signum, self.figures = 0, 0, RunFigures()

    def fit(self, model: RecipeModule, data: RecipeData, ckpt_path: str | None = None) -> RunFigures:
        """Train; the model's `history` holds the metrics afterwards. A signal raises TrainingInterrupted."""
        with ExitStack() as stack:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            if detect_world().num_ranks > 1 and not dist.is_initialized():
                dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
                stack.callback(dist.destroy_process_group)
            on_first_rank(data.prepare_data)
            self._build(model, data)
            stack.enter_context(closing(self.loader))
            stack.enter_context(closing(self.val_loader))
            if ckpt_path is not None:
                self._load(ckpt_path)
            stack.enter_context(RunReport(self.folder, self.loader, step=lambda: self.step))
            for signum in (signal.SIGINT, signal.SIGTERM):
                stack.callback(signal.signal, signum, signal.signal(signum, self._remember))
            began = time.perf_counter()
            while self.step < self.total_steps:
                self._train_epoch(self.loader.position.epoch)
            self.figures.training_s = time.perf_counter() - began - self.figures.validation_s
            self.figures.waited_s = self.loader.stats().wait_s
        return self.figures

    def _build(self, model: Any, data: RecipeData) -> None:
        self.model, self.world, on_gpu = model, detect_world(), self.device.type == "cuda"
        model.build(data)
        model.to(self.device)
        common: dict[str, Any] = {"num_workers": data.num_workers, "persistent_workers": data.num_workers != 0}
        common |= {"pin_memory": on_gpu, "world": self.world}
        sizes: dict[str, Any] = {"global_batch_size": data.global_batch_size, "tail": data.tail}
        accumulate = self.accumulate_grad_batches
        self.loader = StreamingDataLoader(data.train_dataset, accumulate=accumulate, **sizes, **common)
        self.val_loader = StreamingDataLoader(data.val_dataset, data.eval_batch_size, evaluation=True, **common)
        self.loss: nn.Module = _Loss(model)
        if self.world.num_ranks > 1:
            self.loss = DistributedDataParallel(self.loss, device_ids=[self.device.index] if on_gpu else None)
        steps = sum(-(-self.loader.num_batches(epoch) // accumulate) for epoch in range(self.max_epochs))
        steps = -1 if self.max_epochs < 0 else steps
        self.total_steps = min(limit for limit in (steps, self.max_steps) if limit >= 0)
        self.optimizer = model.optimizer()
        self.schedule = model.schedule(self.optimizer, self.total_steps)
        self.parts: dict[str, Any] = {"state_dict": model, "optimizer": self.optimizer, "schedule": self.schedule}

    def _train_epoch(self, epoch: int) -> None:
        """Train to the end of the epoch or of the run, then validate and save."""
        self.model.train()
        loss, done = torch.zeros((), device=self.device), self.loader.batches_before(self.loader.position)
        off = not self.enable_progress_bar or self.world.rank > 0
        bar = tqdm(self.loader, total=len(self.loader), initial=done, desc=f"Epoch {epoch}", disable=off)
        for number, batch in enumerate(bar, done):
            # Each micro-batch has its own seed, so dropout draws the same after a resume.
            torch.manual_seed(sample_seed(self.seed, self.step * 65536 + self.world.rank, number))
            info: Any = self.loader.last_batch
            loss += self._backward(batch, info)
            if not info.completes_step:
                continue
            self._optimize(loss, epoch)
            loss = torch.zeros_like(loss)
            if self.step >= self.total_steps:
                break
            if not info.ends_epoch:
                self._after_step(epoch)
        self._validate(epoch)
        self._save()
        self._stop_if_asked()

    def _backward(self, batch: Any, info: Any) -> Tensor:
        """Add a micro-batch's gradient; gives its part of the step's loss in this process."""
        keep = torch.from_numpy(~info.filler).to(self.device)
        self.figures.num_samples += info.num_samples * self.world.num_ranks
        with self._autocast():
            loss = self.loss(self._on_device(batch), keep, info.end - info.begin)
        (loss * self.world.num_ranks).backward()  # DDP computes the mean over processes, not the sum
        return loss.detach()

    def _optimize(self, loss: Tensor, epoch: int) -> None:
        if self.gradient_clip_val:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.gradient_clip_val)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if (self.step + 1) % self.log_every_n_steps == 0:
            values = {"train/loss": float(_summed(loss)), "learning_rate": self.schedule.get_last_lr()[0]}
            self.log({**values, "epoch": epoch}, step=self.step)  # counted from 0, as in Lightning
        self.schedule.step()
        self.step += 1
        self.figures.num_steps += 1

    def _after_step(self, epoch: int) -> None:
        if self.val_check_interval and self.step % self.val_check_interval == 0:
            self._validate(epoch)
        if self.step % self.save_every_n_steps == 0:
            self._save()
        if self.world.num_ranks == 1 or self.step % _AGREE_EVERY == 0:
            self._stop_if_asked()

    def _validate(self, epoch: int) -> None:
        began = time.perf_counter()
        self.model.eval()
        for batch in self.val_loader:
            with torch.inference_mode(), self._autocast():
                self.model.evaluate(self._on_device(batch))
        computed = {**self.model.end_pass("train", epoch), **self.model.end_pass("val", epoch), "epoch": epoch}
        computed.pop("train/loss", None)  # in the log this is each step's
        self.log(computed, step=self.step - 1)
        self.figures.validation_s += time.perf_counter() - began
        self.model.train()

    def _on_device(self, batch: Any) -> dict[str, Tensor]:
        return {name: each.to(self.device, non_blocking=True) for name, each in batch.items()}

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16-mixed")

    def _save(self) -> None:
        """Write a checkpoint, whole or not at all. All processes call this; the first writes."""
        content = {"step": self.step, "metrics": self.model.metric_state()}
        if self.world.rank:
            return
        content |= {name: part.state_dict() for name, part in self.parts.items()}
        # The position is the same on every rank. It is where Lightning keeps it, so `position` finds it, too.
        content["callbacks"] = {STATE_KEY: {"position": self.loader.state_dict()}}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_name("draft.pt")
        torch.save(content, draft)
        publish(draft, self.path)

    def _load(self, path: str) -> None:
        """Resume from a checkpoint, which any number of processes may have written."""
        content = torch.load(path, map_location="cpu", weights_only=True)
        if not content.keys() >= {"step", "metrics", *self.parts}:
            raise StateError(f"{path} must be a checkpoint of trainer=torch. Choose the trainer that wrote it.")
        for name, part in self.parts.items():
            part.load_state_dict(content[name])
        self.step = content["step"]
        self.model.load_metric_state(content["metrics"], self.world.rank == 0)
        self.loader.load_state_dict(content["callbacks"][STATE_KEY]["position"])
        here = self.loader.position
        if self.world.rank == 0:
            print(f"Resumed at epoch {here.epoch}, step {self.step:,} ({here.position:,} samples of this epoch).")

    def _remember(self, signum: int, _frame: object) -> None:
        """Stop at the end of the next step, after a first signal; at once, after a second."""
        if self.signum:
            raise KeyboardInterrupt
        self.signum = signum
        os.write(2, b"\nFinishing this step, then saving a checkpoint (again to quit now).\n")

    def _stop_if_asked(self) -> None:
        if int(_summed(torch.tensor(int(self.signum > 0), device=self.device))):
            self._save()
            raise TrainingInterrupted(self.signum or signal.SIGTERM, self.path)


def _summed(value: Tensor) -> Tensor:
    """The sum over all processes, which all call this."""
    if dist.is_initialized():
        value = value.clone()
        dist.all_reduce(value)
    return value
