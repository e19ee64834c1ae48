"""A plain torch loop over a LightningModule and streamed data, in one process or in those that torchrun started.

It shows what a loop of your own needs: a `PositionTracker` around the loader, its state in the checkpoint, and each
sample of a step counted once on any number of devices.
"""

import os
import signal
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from pickle import UnpicklingError
from time import monotonic
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException  # type: ignore[attr-defined]
from torch import distributed as dist

from lightning_stream import PositionTracker
from lightning_stream.errors import StateError
from lightning_stream.loading.loader_arguments import options_of
from lightning_stream.trainers.lightning.data_module import StreamingDataModule
from lightning_stream.trainers.lightning.graceful_stop import TrainingInterrupted
from lightning_stream.trainers.options import PositionOptions

_CONVERSION_LIMIT = timedelta(days=30)  # others wait so long for the first process; torch's default is 10 or 30 minutes


class ModelTrainer:
    """What a trainer other than Lightning's needs to train a LightningModule that optimizes automatically.

    Of its hooks it calls `configure_model`, `configure_optimizers`, `training_step` and `validation_step`.

    Args:
        default_root_dir: The run's folder; checkpoints are in ``checkpoints`` below it.
        max_epochs, max_steps: The earlier ends the run; -1 steps are as many as the epochs have.
        processes: Devices of a node, and nodes: a launcher starts these processes.
        seed: Of dropout.

    Attributes:
        callback_metrics: What the model logged last, by name.
    """

    def __init__(
        self, *, default_root_dir: str, max_epochs: int = 10, max_steps: int = -1, processes: Sequence[int] = (1, 1),
        seed: int = 1,
    ) -> None:  # fmt: skip
        if not isinstance(max_epochs, int) or not isinstance(max_steps, int):
            raise ValueError(f"max_epochs and max_steps are whole numbers; found {max_epochs!r} and {max_steps!r}")
        self.path = Path(default_root_dir) / "checkpoints" / "last.ckpt"
        self.max_epochs = max_epochs
        self.max_steps = max_steps
        self.seed = seed
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if list(processes) != [1, 1] and "WORLD_SIZE" not in os.environ:
            raise MisconfigurationException("hardware asks for several processes: start them by torchrun or composer.")
        self.callback_metrics: dict[str, float] = {}

    def join(self, model: Any, datamodule: Any) -> None:
        """Bring a model and its data together; the first process converts the data while the others wait."""
        if not isinstance(datamodule, StreamingDataModule):
            raise MisconfigurationException("data must be a StreamingDataModule; trainer=lightning takes any other.")
        if self.rank == 0:
            datamodule.prepare_data()
        if dist.is_initialized():
            dist.barrier()
        self.model = model
        self.datamodule = datamodule
        self.logged = Logged(model)
        model.trainer = self
        model.configure_model()

    def plan(self, loader: Any, step: int = 0) -> None:
        """Count the optimizer steps of the run: those done, and those that follow from where the loader stands."""
        here = loader.position
        steps = step
        while here.epoch < self.max_epochs:
            steps += len(loader.micro_batches_from(here))
            here = here.next_epoch()
        self.estimated_stepping_batches = steps if self.max_steps < 0 else min(steps, self.max_steps)


class TorchTrainer(ModelTrainer):
    """A plain loop; ``configs/trainer/torch.yaml`` describes the settings, see `ModelTrainer` for most."""

    def __init__(
        self, *, accelerator: str = "auto", precision: str = "32-true", save_every_n_steps: int = 20, **run: Any
    ) -> None:
        super().__init__(**run)
        if precision not in ("32-true", "bf16-mixed"):
            raise ValueError(f"hardware.precision is 32-true or bf16-mixed for this trainer; found {precision}.")
        if not isinstance(save_every_n_steps, int) or save_every_n_steps < 1:
            raise ValueError(f"save_every_n_steps is a whole number of at least 1; found {save_every_n_steps!r}")
        self.precision = precision
        self.save_every_n_steps = save_every_n_steps
        has_gpu = torch.cuda.is_available()
        on_gpu = has_gpu if accelerator == "auto" else accelerator != "cpu"
        if on_gpu and not has_gpu:
            raise MisconfigurationException("this machine has no GPU for PyTorch; hardware=cpu trains without one.")
        self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
        self.step = self.signum = 0
        self.signalled_at = 0.0

    def fit(self, model: LightningModule, datamodule: StreamingDataModule, ckpt_path: str | None = None) -> None:
        """Train, and validate after each epoch. Ctrl-C and SIGTERM save a checkpoint at the end of the step."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.world_size > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo", timeout=_CONVERSION_LIMIT)
        self.join(model, datamodule)
        model.to(self.device)
        loader = datamodule.train_dataloader()
        self.plan(loader)
        self.parts = {"state_dict": model, **optimization(model)}
        options = options_of(PositionOptions, datamodule.options)
        self.tracker = PositionTracker(loader, **{"seed_steps": self.seed, **options})
        self.tracker.clock.padding = False  # the loss is a mean over the samples that count
        if ckpt_path is not None:
            self._load(ckpt_path)
            self.plan(loader, self.step)
        before = {signum: signal.signal(signum, self._on_signal) for signum in (signal.SIGINT, signal.SIGTERM)}
        try:
            while self.step < self.estimated_stepping_batches:
                self._train_epoch()
                if datamodule.datasets["val"] is not None:
                    self._validate(datamodule.val_dataloader())
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)
        self.tracker.end_run()
        self.tracker.detach()
        datamodule.close()

    def save_checkpoint(self, path: str | Path) -> None:
        """Write weights, optimizer and the data's position, which are the same on every rank; the first one writes."""
        states = {name: part.state_dict() for name, part in self.parts.items()}
        content = {"step": self.step, "data": self.tracker.state(), **states}
        if self.rank == 0:
            draft = Path(path).with_suffix(".draft")
            draft.parent.mkdir(parents=True, exist_ok=True)
            torch.save(content, draft)
            draft.replace(path)

    def _load(self, path: str) -> None:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except UnpicklingError:  # it holds objects of another trainer
            content = {}
        if not content.keys() >= {"step", "data", *self.parts}:
            raise StateError(f"{path} must be a checkpoint of trainer=torch. Choose the trainer that wrote it.")
        for name, part in self.parts.items():
            part.load_state_dict(content[name])
        self.step = content["step"]
        self.tracker.load(content["data"])

    def _train_epoch(self) -> None:
        """Train to the end of the epoch or of the run."""
        self.model.train()
        for batch_index, batch in enumerate(self.tracker):
            current: Any = self.tracker.current
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16-mixed"):
                loss: Any = self.model.training_step(move_data_to_device(batch, self.device), batch_index)
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
            signum = self._signal_of_any()
            if signum or self.step % self.save_every_n_steps == 0:
                self.save_checkpoint(self.path)
            if signum:
                raise TrainingInterrupted(signum, self.path)
            if self.step >= self.estimated_stepping_batches:
                break

    def _signal_of_any(self) -> int:
        """The signal that any process got, or 0: they may get it in different steps, and must leave after the same."""
        signum = torch.tensor(self.signum, device=self.device)
        if dist.is_initialized():
            dist.all_reduce(signum, dist.ReduceOp.MAX)
        return int(signum)

    @torch.no_grad()
    def _validate(self, batches: Any) -> None:
        self.model.eval()
        for batch_index, batch in enumerate(batches):
            self.model.validation_step(move_data_to_device(batch, self.device), batch_index)
        self.callback_metrics.update(self.logged.means())

    def _on_signal(self, signum: int, _frame: object) -> None:
        """Ask the loop to stop. A launcher may repeat a signal at once; a second one, later, ends the run now."""
        now = monotonic()
        if self.signum and now - self.signalled_at > 1:
            raise KeyboardInterrupt
        self.signum = signum
        self.signalled_at = now


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
        self.totals = Counter()
        self.counts = Counter()
        return {
            name: sum(totals[name] for totals, _ in parts) / sum(counts[name] for _, counts in parts)
            for name in parts[0][0]
        }


def optimization(model: LightningModule) -> dict[str, Any]:
    """The optimizer of a model that has one, and its schedule of steps if there is one."""
    match model.configure_optimizers():
        case torch.optim.Optimizer() as optimizer:
            return {"optimizer": optimizer}
        case {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}:
            return {"optimizer": optimizer, "schedule": schedule}
    raise MisconfigurationException("configure_optimizers returns one optimizer, with a schedule of interval=step.")
