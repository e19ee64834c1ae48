"""A plain torch loop over a LightningModule and streamed data, in one process or in those that torchrun started.

It shows what a loop of your own needs: a `PositionTracker` around the loader, its state in the checkpoint, and each
sample of a step counted once on any number of devices.
"""

import os
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import distributed as dist

from lightning_stream import PositionTracker
from lightning_stream.errors import StateError
from lightning_stream.trainers.lightning.data_module import StreamingDataModule

_CONVERSION_LIMIT = timedelta(days=30)  # others wait so long for the first process; torch's default is 10 or 30 minutes


class TorchTrainer:
    """Trains a LightningModule that optimizes automatically; ``configs/trainer/torch.yaml`` describes the settings.

    Attributes:
        callback_metrics: What the model logged last, by name.
    """

    def __init__(
        self, *, default_root_dir: str, max_epochs: int = 10, max_steps: int = -1, accelerator: str = "auto",
        save_every_n_steps: int = 20, seed: int = 1, callbacks: Any = None, logger: Any = None,
    ) -> None:  # fmt: skip
        del callbacks, logger  # these are Lightning's
        self.path = Path(default_root_dir) / "checkpoints" / "last.ckpt"
        self.max_epochs, self.max_steps, self.save_every_n_steps = max_epochs, max_steps, save_every_n_steps
        self.seed = seed
        on_gpu = accelerator in ("gpu", "cuda") or (accelerator == "auto" and torch.cuda.is_available())
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
        self.rank, self.world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.callback_metrics: dict[str, float] = {}
        self.step = self.estimated_stepping_batches = 0

    def fit(self, model: LightningModule, datamodule: StreamingDataModule, ckpt_path: str | None = None) -> None:
        """Train, and validate after each epoch. After Ctrl-C a run resumes exactly from its last checkpoint."""
        self._join(model, datamodule)
        loader = datamodule.train_dataloader()
        steps = sum(map(loader.num_batches, range(self.max_epochs)))
        self.estimated_stepping_batches = steps if self.max_steps < 0 else min(steps, self.max_steps)
        self.parts = {"state_dict": model, **optimization(model)}
        self.tracker = PositionTracker(loader, seed_steps=self.seed)
        if ckpt_path is not None:
            self._load(ckpt_path)
        while self.step < self.estimated_stepping_batches:
            self._train_epoch()
            self._validate(datamodule.val_dataloader())
        self.tracker.end_run()
        self.tracker.detach()
        datamodule.close()

    def save_checkpoint(self, path: str | Path) -> None:
        """Write weights, optimizer and the data's position, which are the same on every rank; the first one writes."""
        content = {"step": self.step, "data": self.tracker.state()}
        content |= {name: part.state_dict() for name, part in self.parts.items()}
        if self.rank == 0:
            draft = Path(path).with_suffix(".draft")
            draft.parent.mkdir(parents=True, exist_ok=True)
            torch.save(content, draft)
            draft.replace(path)

    def _load(self, path: str) -> None:
        content = torch.load(path, map_location="cpu", weights_only=True)
        if not content.keys() >= {"step", "data", *self.parts}:
            raise StateError(f"{path} must be a checkpoint of trainer=torch. Choose the trainer that wrote it.")
        for name, part in self.parts.items():
            part.load_state_dict(content[name])
        self.step = content["step"]
        self.tracker.load(content["data"])

    def _train_epoch(self) -> None:
        """Train to the end of the epoch or of the run."""
        self.model.train()
        for number, batch in enumerate(self.tracker):
            current: Any = self.tracker.current
            loss: Any = self.model.training_step(self._moved(batch), number)
            # The mean over this process's samples, weighed by their share of the step's samples.
            (loss * current.num_samples / (current.end - current.begin)).backward()
            gradients = [weight.grad for weight in self.model.parameters() if weight.grad is not None]
            for gradient in gradients if dist.is_initialized() else ():
                dist.all_reduce(gradient)
            self.parts["optimizer"].step()
            self.parts["optimizer"].zero_grad()
            if "schedule" in self.parts:
                self.parts["schedule"].step()
            self.step += 1
            self.tracker.stepped()
            self.callback_metrics.update(self.logged.means())
            if self.step % self.save_every_n_steps == 0:
                self.save_checkpoint(self.path)
            if self.step >= self.estimated_stepping_batches:
                break

    @torch.no_grad()
    def _validate(self, batches: Any) -> None:
        self.model.eval()
        for number, batch in enumerate(batches):
            self.model.validation_step(self._moved(batch), number)
        self.callback_metrics.update(self.logged.means())

    def _join(self, model: LightningModule, datamodule: Any) -> None:
        """Join the processes of the run; the first one converts the data while the others wait."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.world_size > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo", timeout=_CONVERSION_LIMIT)
        if self.rank == 0:
            datamodule.prepare_data()
        if dist.is_initialized():
            dist.barrier()
        self.model, self.datamodule = model, datamodule
        self.logged = Logged(model)
        model.trainer = self  # type: ignore[assignment]
        model.configure_model()
        model.to(self.device)

    def _moved(self, batch: Any) -> Any:
        return {name: value.to(self.device) for name, value in batch.items()}


class Logged:
    """Takes the numbers that a LightningModule logs, outside of Lightning's trainer."""

    def __init__(self, model: Any) -> None:
        self.totals: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        model.log_dict = self.log_dict
        model.log = lambda name, value, **options: self.log_dict({name: value}, **options)

    def log_dict(self, values: Any, batch_size: int = 1, **_: Any) -> None:
        for name, value in values.items():
            self.totals[name] += float(value) * batch_size  # type: ignore[assignment]
            self.counts[name] += batch_size

    def means(self) -> dict[str, float]:
        """The means of what was logged since the last call, over samples and processes, which all call this."""
        parts = [(self.totals, self.counts)] * (dist.get_world_size() if dist.is_initialized() else 1)
        if dist.is_initialized():
            dist.all_gather_object(parts, parts[0])
        self.totals, self.counts = Counter(), Counter()
        return {
            name: sum(totals[name] for totals, _ in parts) / sum(counts[name] for _, counts in parts)
            for name in parts[0][0]
        }


def optimization(model: LightningModule) -> dict[str, Any]:
    """The optimizer of a model that has one, and its schedule of steps if there is one."""
    made: Any = model.configure_optimizers()
    if not isinstance(made, dict):
        return {"optimizer": made}
    return {"optimizer": made["optimizer"], "schedule": made["lr_scheduler"]["scheduler"]}
