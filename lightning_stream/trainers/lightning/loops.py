"""All private layouts of Lightning that this package uses.

Tested with Lightning 2.5 to 2.6; `test_lightning_layouts` fails when one of them changes. Lightning restores counters,
not data: after a resume it uses the counts that its loops saved, which are wrong after a stop at the last batch of an
epoch, inside an accumulation window, or on another number of devices. So the loops' counters in the checkpoint are
rewritten from the data's position, which is always right.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import walk_stack
from typing import Any

import torch
from packaging.specifiers import SpecifierSet
from torch.utils.data import SequentialSampler

from lightning_stream.errors import StateError
from lightning_stream.loader import StreamingDataLoader
from lightning_stream.loading.cursor import TrainerClock
from lightning_stream.loading.iteration import LoaderIterator
from lightning_stream.order import Position
from lightning_stream.trainers.checkpoints import inner
from lightning_stream.trainers.run import Run

TRIED_VERSIONS = SpecifierSet(">=2.5,<2.7", prereleases=True)


def run_folder(trainer: Any) -> Path | None:
    """Where a run's log is by default: in the root folder if one was chosen, else beside its other logs.

    Only the path of the first rank counts: `trainer.log_dir` would be collective.
    """
    folder = str(trainer.default_root_dir)
    if "://" not in folder and Path(folder).resolve() == Path.cwd() and trainer.is_global_zero:
        first = next(iter(trainer.loggers), None)
        folder = str(getattr(first, "log_dir", None) or getattr(first, "save_dir", None) or "")
    return None if trainer.fast_dev_run or "://" in folder or not folder else Path(folder)


@dataclass(frozen=True)
class LoopPosition:
    """The position that Lightning's loops must have."""

    epoch: int  # of the data
    batch: int  # micro-batches of this epoch that were trained on, by this rank in this world
    num_batches: int  # micro-batches of a whole epoch, as the trainer limits it
    validation_due: bool = False  # whether Lightning validates after this batch
    validated: bool = False  # whether it has done so already
    epochs_ahead: int = 0  # of the data before Lightning: it counts an epoch again in which an error ended its fit

    @property
    def epochs_completed(self) -> int:
        """By Lightning's count."""
        return self.epoch - self.epochs_ahead

    @property
    def runs_validation(self) -> bool:
        """Whether a validation comes first."""
        return self.validation_due and not self.validated

    @property
    def at_boundary(self) -> bool:
        """Whether the next thing to do is to begin an epoch."""
        return self.batch == 0


def warn_if_untried(trainer: Any) -> None:
    """Warn, once per fit, of a version of Lightning that was not tested."""
    version = getattr(sys.modules.get(_package_of(trainer)), "__version__", None)
    if version is not None and version not in TRIED_VERSIONS:
        warnings.warn(
            f"resuming exactly rests on layouts inside Lightning {TRIED_VERSIONS}, and this is {version}: prove a "
            "resume before you rely on it, or install one of those",
            stacklevel=2,
        )


def rewrite_loops(checkpoint: dict[str, Any], at: LoopPosition) -> None:
    """Make the saved loops of a checkpoint agree with the data's position, in place.

    Raises:
        StateError: The checkpoint's loops are not those of a tested version of Lightning.
    """
    try:
        _rewrite(checkpoint["loops"]["fit_loop"], at, int(checkpoint["global_step"]))
    except (KeyError, TypeError) as error:
        raise StateError(
            "the counters in a Lightning checkpoint must follow the data's position, but this checkpoint, of Lightning "
            f"{checkpoint.get('pytorch-lightning_version')}, has an unknown layout (missing {error}). Resume it with "
            f"Lightning {TRIED_VERSIONS}"
        ) from error


def _rewrite(fit_loop: dict[str, Any], at: LoopPosition, global_step: int) -> None:
    # Loaders' own states: ours follows the callback, another number of loaders would be an error.
    fit_loop["state_dict"].pop("combined_loader", None)
    batches = fit_loop["epoch_loop.batch_progress"]
    half_saved = batches["total"]["ready"] != batches["total"]["completed"] or batches["is_last_batch"]
    _set(batches["current"], at.batch, at.batch)
    total = at.epochs_completed * at.num_batches + at.batch
    _set(batches["total"], total, total)
    batches["is_last_batch"] = at.batch == at.num_batches and at.batch > 0

    begun = at.epochs_completed + (not at.at_boundary)
    for counts in fit_loop["epoch_progress"].values():
        _set(counts, begun, at.epochs_completed)

    epoch_loop = fit_loop["epoch_loop.state_dict"]
    automatic = fit_loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]["total"]["completed"]
    # With manual optimization a batch may step several optimizers, so the steps are not the batches. Where a
    # validation is due, run or not, the loop passes the end of this batch once more and counts it again.
    stepped = global_step if automatic else epoch_loop["_batches_that_stepped"] + half_saved
    epoch_loop["_batches_that_stepped"] = stepped - at.validation_due

    validation = fit_loop["epoch_loop.val_loop.batch_progress"]
    done = validation["total"]["completed"]
    _set(validation["total"], done + at.runs_validation, done)
    _set(validation["current"], int(at.runs_validation), 0)
    validation["is_last_batch"] = False


def _set(counts: dict[str, int], begun: int, ended: int) -> None:
    """A loop's four counters: so many begun, so many ended."""
    counts.update(ready=begun, started=begun, processed=ended, completed=ended)


def enter(trainer: Any, at: LoopPosition) -> None:
    """Let the epoch loop of a resumed run begin where it was put; called in `on_train_start`."""
    loop = trainer.fit_loop.epoch_loop
    if at.at_boundary:
        loop.restarting = False  # else it takes the start of an epoch for the middle, and counts a batch too many
    elif at.batch == at.num_batches and not at.validation_due:
        loop.val_loop._has_run = True  # noqa: SLF001 - else it trains on one batch more before it ends the epoch


def end_restart(trainer: Any) -> None:
    """End what Lightning treats as a restart with the resumed epoch, so that it updates plateau schedulers.

    If a scheduler's metric was logged only before the checkpoint, the scheduler is not updated, with a warning.
    """
    loop = trainer.fit_loop
    if not loop.restarting:
        return
    loop.epoch_loop.restarting = False
    monitored = {config.monitor for config in trainer.lr_scheduler_configs if config.reduce_on_plateau}
    lacking = sorted(str(name) for name in monitored - set(trainer.callback_metrics))
    if lacking:
        warnings.warn(
            f"a scheduler on plateaus needs the metric of the whole epoch, but {', '.join(lacking)} was logged before "
            "the checkpoint that this run resumed from: the scheduler is not updated at the end of this epoch",
            stacklevel=2,
        )
    else:
        loop._restarting = False  # noqa: SLF001 - its setter would restart what has ended already


def left_out_batch(trainer: Any) -> bool:
    """Whether the model's `on_train_batch_start` ended the epoch instead of training on the batch that it got."""
    counts = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(counts.started < counts.ready)


def epoch_end_is_due(checkpoint: Mapping[str, Any], epoch: int) -> bool:
    """Whether a checkpoint at the end of an epoch was written before Lightning ran that epoch's last hooks."""
    return int(inner(checkpoint, "loops", "fit_loop", "epoch_progress", "current").get("processed", epoch)) < epoch


def stopped_inside(checkpoint: Mapping[str, Any]) -> bool:
    """Whether the run of a checkpoint was stopped inside an epoch, which Lightning may take for a whole one."""
    batches = inner(checkpoint, "loops", "fit_loop", "epoch_loop.batch_progress")
    return bool(inner(batches, "current").get("completed")) and not batches["is_last_batch"]


class LightningClock(TrainerClock):
    """Lightning's: its global step grows with each step, in automatic and in manual optimization."""

    padding = False  # losses are weighted by the samples that count
    reads_states = True
    how_to_step = (
        "Give Trainer(accumulate_grad_batches=...) and the loader's accumulate= the same number, and change neither "
        "during a fit"
    )

    def __init__(self, trainer: Any, loader: StreamingDataLoader) -> None:
        self._trainer = trainer
        self._loader = loader

    @property
    def takes_whole_batches(self) -> bool:
        """Not with manual optimization, nor where weights are averaged: a last epoch then updates batch norms only."""
        trainer = self._trainer
        is_training = not trainer.fit_loop._skip_backward  # noqa: SLF001
        return is_training and bool(trainer.lightning_module.automatic_optimization)

    def micro_batch(self) -> int:
        """The number of the batch in training."""
        return int(self._trainer.fit_loop.batch_idx)

    def step(self) -> int:
        """How many steps there were."""
        return int(self._trainer.global_step)

    def ends_epoch(self) -> bool:
        """Whether the batch in training is the last, also by a limit of the trainer's."""
        return bool(self._trainer.is_last_batch)

    def owns(self, iterator: LoaderIterator) -> bool:
        """Whether the fit loop takes its batches from this iteration."""
        return any(active is iterator for active in iterators(self._trainer))

    def follow_length(self, epoch: int) -> None:
        """Let Lightning expect as many batches as an epoch has, where epochs differ.

        It asks for a loader's length once, and would end a longer epoch there.
        """
        trainer = self._trainer
        loader = self._loader
        loop = self._trainer.fit_loop
        combined = loop._combined_loader  # noqa: SLF001
        fetcher = loop._data_fetcher  # noqa: SLF001
        if combined is None or not loader.epochs_differ:
            return
        num_batches = limited(loader.num_batches(epoch), trainer.limit_train_batches)
        combined.limits = [num_batches]
        loop.max_batches = num_batches
        if fetcher is not None:
            fetcher.length = num_batches
        interval = getattr(trainer, "val_check_interval", None)
        if isinstance(interval, float):
            trainer.val_check_batch = max(1, int(num_batches * interval))


def iterators(trainer: Any) -> list[LoaderIterator]:
    """Our iterations that the fit loop takes its batches from."""
    fetcher = trainer.fit_loop._data_fetcher  # noqa: SLF001
    combined = None if fetcher is None else fetcher._combined_loader  # noqa: SLF001
    mode = None if combined is None else combined._iterator  # noqa: SLF001
    return [] if mode is None else [iterator for iterator in mode.iterators if isinstance(iterator, LoaderIterator)]


def data_source_of(trainer: Any) -> Any:
    """The argument of `fit`: a loader, or a module that makes one."""
    return trainer.fit_loop._data_source.instance  # noqa: SLF001


def lacks_last(trainer: Any) -> bool:
    """Whether `fit` was called with ``ckpt_path="last"`` and found none; Lightning keeps neither until it loads."""
    asked = {
        frame.f_code.co_name: frame.f_locals.get("ckpt_path")
        for frame, _ in walk_stack(None)
        if frame.f_locals.get("self") is trainer
    }
    return asked.get("fit") == "last" and asked["_run"] is None


def logs_now(trainer: Any) -> bool:
    """Whether Lightning logs after the batch in training, by its own rule; the same on every rank."""
    loop = trainer.fit_loop.epoch_loop
    every = trainer.log_every_n_steps
    if not every or (loop._should_accumulate() and trainer.lightning_module.automatic_optimization):  # noqa: SLF001
        return False
    return bool((loop._batches_that_stepped + 1) % every == 0)  # noqa: SLF001


def log(trainer: Any, metrics: dict[str, float], changes: ExitStack) -> None:
    """Log metrics in the one row, and at the one step, of what the user logged for the batch in training.

    They join the call that Lightning logs a step's values with: `log_dict` would take 2 ms for ten of them.
    """
    connector = trainer._logger_connector  # noqa: SLF001
    values = torch.tensor(list(metrics.values()), device=trainer.strategy.root_device).unbind()
    tensors = dict(zip(metrics, values, strict=True))

    def joined(logged: dict[str, Any], step: int | None = None) -> None:
        changes.close()
        connector.log_metrics({**tensors, **logged}, step)

    changes.close()
    _override(connector, "log_metrics", joined, changes)
    trainer.callback_metrics.update(tensors)
    trainer.logged_metrics.update(tensors)


def show_in_bar(trainer: Any, run: Run, changes: ExitStack) -> None:
    """Let the progress bar, if there is one, show ``samples=trained on/of an epoch``, until `changes` is closed.

    What the run's monitor has to say comes after that, as ``data=2% · 310 MB/s``. The bar asks for its metrics
    only when it refreshes; logging a value would cost each step.
    """
    bar = trainer.progress_bar_callback
    if bar is None:
        return
    metrics = bar.get_metrics
    num_samples = run.loader.num_samples

    def with_position(*arguments: Any) -> dict[str, Any]:
        here = run.position
        has_ended = not here.position and here.epoch > trainer.current_epoch
        values = {**metrics(*arguments), "samples": f"{num_samples if has_ended else here.position}/{num_samples}"}
        return {**values, **run.shown()}

    _override(bar, "get_metrics", with_position, changes)


def time_checkpoints(trainer: Any, run: Run, changes: ExitStack) -> None:
    """Measure how long the trainer writes checkpoints, until `changes` is closed."""
    save = trainer.save_checkpoint

    def timed(*arguments: Any, **named: Any) -> Any:
        with run.loader.aside("checkpoint"):
            return save(*arguments, **named)

    _override(trainer, "save_checkpoint", timed, changes)


def _override(owner: Any, name: str, replacement: Callable[..., Any], changes: ExitStack) -> None:
    """Replace a method of one object until `changes` is closed."""
    user_method = vars(owner).get(name)  # of the user's
    setattr(owner, name, replacement)
    changes.callback(*((vars(owner).pop, name, None) if user_method is None else (setattr, owner, name, user_method)))


def say(trainer: Any, sentence: str) -> None:
    """Log a sentence at INFO: by this package's logger if that is enabled, else by Lightning's."""
    ours = logging.getLogger("lightning_stream")
    (ours if ours.isEnabledFor(logging.INFO) else logging.getLogger(_package_of(trainer))).info(sentence)


def _package_of(trainer: Any) -> str:
    """``lightning.pytorch`` or ``pytorch_lightning``."""
    return type(trainer.fit_loop).__module__.partition(".loops.")[0]


def let_ranks_stop_together(trainer: Any) -> None:
    """Handle SIGTERM where all ranks meet: at the next step that begins after rank 0 got it.

    Lightning 2.6 broadcasts from within the signal's handler, wherever each rank happens to be. The ranks' collectives
    then no longer match, and the run hangs (seen with its own launcher, which passes the signal on to ranks that were
    signalled already; Lightning's issue 20806). It also asks rank 0 before each step, where nothing can cross.
    """
    loop = trainer.fit_loop.epoch_loop
    connector = trainer._signal_connector  # noqa: SLF001
    vars(loop).pop("_broadcast_sigterm_tensor", None)  # ours, of a fit before this one
    ask = getattr(loop, "_broadcast_sigterm_tensor", None)
    handlers = getattr(signal.getsignal(signal.SIGTERM), "signal_handlers", [])
    if trainer.world_size == 1 or ask is None or connector._sigterm_notifier_fn not in handlers:  # noqa: SLF001
        return
    asked = threading.Event()

    def note(signum: int, _: Any) -> None:
        if not asked.is_set():
            asked.set()
            if trainer.strategy.launcher is not None:
                trainer.strategy.launcher.kill(signum)

    def ask_rank_0() -> None:
        connector.received_sigterm = asked.is_set()
        try:
            ask()
        except BaseException:
            connector.received_sigterm = True  # rank 0 was asked to stop: all ranks leave
            raise
        connector.received_sigterm = False

    handlers[handlers.index(connector._sigterm_notifier_fn)] = note  # noqa: SLF001
    vars(loop)["_broadcast_sigterm_tensor"] = ask_rank_0


def follow_loaders(trainer: Any, follow: Callable[[Any], object], changes: ExitStack) -> None:
    """Call `follow` with each loader that the fit loop sets up, until `changes` is closed.

    It does so for an epoch, and for a tuner that tries something in the middle of a run, which calls no callback then.
    """
    set_up = trainer.fit_loop.setup_data

    def followed() -> None:
        set_up()
        follow(trainer.train_dataloader)

    _override(trainer.fit_loop, "setup_data", followed, changes)


def train_loader_of(trainer: Any) -> Any:
    """The loader that the trainer trains on, made now if Lightning has not made it yet."""
    trainer.fit_loop.setup_data()
    return trainer.train_dataloader


def train_loaders_of(trainer: Any) -> list[Any]:
    """All loaders that the trainer takes its batches from."""
    combined = trainer.fit_loop._combined_loader  # noqa: SLF001
    return [] if combined is None else list(combined.flattened)


def evaluated_loaders(trainer: Any) -> list[StreamingDataLoader]:
    """Our loaders that the trainer evaluates on now."""
    loaders = trainer._active_loop._combined_loader.flattened  # noqa: SLF001
    return [loader for loader in loaders if isinstance(loader, StreamingDataLoader)]


def ask_as_in(trainer: Any, epoch: int) -> None:
    """Let ``train_dataloader`` make the loader that a run had in this epoch: it may ask for `trainer.current_epoch`."""
    if every := trainer.reload_dataloaders_every_n_epochs:
        trainer.fit_loop.epoch_progress.current.completed = epoch - epoch % every


def forget_fetched(trainer: Any) -> None:
    """Let Lightning request its data again if it has trained on some of it.

    For a checkpoint restored in the middle of a fit, as the learning rate finder does: before 2.6 Lightning continues
    to count the batches fetched, and ends the first epoch early.
    """
    fetcher = trainer.fit_loop._data_fetcher  # noqa: SLF001
    if fetcher is not None and fetcher.fetched:
        trainer.fit_loop._combined_loader = None  # noqa: SLF001


def limited(num_batches: int, limit: float) -> int:
    """Micro-batches of an epoch under `limit_train_batches`."""
    return min(num_batches, limit) if isinstance(limit, int) else int(num_batches * limit)


def epoch_length(trainer: Any, loader: StreamingDataLoader, position: Position) -> int:
    """Micro-batches of the epoch of a position, in the order of that position, under `limit_train_batches`."""
    return limited(len(loader.micro_batches_from(replace(position, position=0))), trainer.limit_train_batches)


def validation_is_due(trainer: Any, at: LoopPosition) -> bool:
    """Whether Lightning validates after this batch, by its own rules; time-based intervals never count as due."""
    interval = getattr(trainer, "val_check_interval", None)  # None where it validates by time
    if interval is None or at.batch == 0 or not trainer.enable_validation:
        return False
    every = interval if isinstance(interval, int) else max(1, int(at.num_batches * interval))
    if trainer.check_val_every_n_epoch is None:
        return (at.epochs_completed * at.num_batches + at.batch) % every == 0
    return (at.epochs_completed + 1) % trainer.check_val_every_n_epoch == 0 and at.batch % every == 0


def loader_states(checkpoint: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The states that Lightning itself saved of stateful loaders, ours or others'."""
    states = inner(checkpoint, "loops", "fit_loop", "state_dict").get("combined_loader", [])
    return [state for state in states if isinstance(state, dict)]


def loader_kept_as_it_is(loader: StreamingDataLoader) -> StreamingDataLoader:
    """Keep Lightning from making a new loader under `overfit_batches`, as it does with all that seem to shuffle.

    It looks at the sampler, which has no other use here.
    """
    vars(loader)["sampler"] = SequentialSampler(range(1))
    return loader


def sampler_replicas(trainer: Any) -> int:
    """The replicas of a distributed sampler: fewer than ranks under tensor parallelism."""
    strategy = trainer.strategy
    ranks = int(trainer.world_size)
    if ranks == 1:
        return 1
    # Asked for by its plain name where several ranks train: a Lightning without it must fail loudly.
    return int((strategy.distributed_sampler_kwargs or {}).get("num_replicas", ranks))
