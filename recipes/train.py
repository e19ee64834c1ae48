"""From a config to a trained model: check, convert once, build, fit, summarise."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException  # type: ignore[attr-defined]
from omegaconf import DictConfig, OmegaConf, read_write

from lightning_stream.errors import LightningStreamError, StateError
from lightning_stream.stores import open_store
from lightning_stream.trainers.lightning.graceful_stop import TrainingInterrupted
from lightning_stream.trainers.lightning.monitor import RunMonitor
from recipes.checks import find_problems, last_checkpoint, trainer_kind
from recipes.data.base import RecipeData
from recipes.models.base import RecipeModule
from recipes.report import RunFigures, RunSummary

_LAUNCHED = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE")


def main(config: DictConfig) -> RunSummary | None:
    """Run a config of ``train.py``. Gives the summary on the first rank, None on others and with ``prepare_only``.

    Raises:
        SystemExit: 2 for a config or data that cannot be used, after all reasons were printed; 128 + n where signal n
            stopped the run.
    """
    if problems := find_problems(config):
        raise _refused("Invalid config:", *problems)
    with ExitStack() as stack:
        stack.enter_context(one_job())
        stack.enter_context(environment(config.store.env))
        try:
            return _run(config, stack)
        except TrainingInterrupted as stop:
            _stopped(stop.saved)
            raise SystemExit(128 + stop.signum) from stop
        except SystemExit as end:
            if not isinstance(end.__context__, KeyboardInterrupt):
                raise
            _stopped(None)  # Lightning ends with 1 after a second Ctrl-C
            raise SystemExit(128 + signal.SIGINT) from end
        except (LightningStreamError, HydraException, ImportError, MisconfigurationException, OSError) as error:
            if os.environ.get("HYDRA_FULL_ERROR") == "1" or (
                isinstance(error, OSError) and error.filename is None and not isinstance(error, LightningStreamError)
            ):
                raise
            advice = (
                [f"The run began with the settings in {config.folder}/config.yaml."]
                if isinstance(error, StateError)
                else []
            )
            raise _refused(_sentence(error), *advice, "(HYDRA_FULL_ERROR=1 shows where.)") from error


def _run(config: DictConfig, stack: ExitStack) -> RunSummary | None:
    _quieten()
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    data: RecipeData = instantiate(config.data, _convert_="all")
    model: RecipeModule = instantiate(config.model, _convert_="all")
    stack.callback(data.close)
    if config.prepare_only:
        if not rank_zero_only.rank:
            data.prepare_data()
        return None
    ckpt_path = _local_checkpoint(config, stack)
    if ckpt_path is None:
        _begin(config)
    fit = _fit_lightning if trainer_kind(config) == "lightning" else _fit_other
    figures = fit(config, model, data, ckpt_path)
    return None if rank_zero_only.rank else _summarise(config, model, data, figures)


def _fit_lightning(config: DictConfig, model: RecipeModule, data: RecipeData, ckpt_path: str | None) -> RunFigures:
    callbacks = [instantiate(each, _convert_="all") for each in config.callbacks.values() if each]
    if not config.trainer.enable_progress_bar:
        callbacks = [each for each in callbacks if not isinstance(each, ProgressBar)]
    trainer: Any = instantiate(
        config.trainer, callbacks=callbacks, logger=make_logger(config) or False, _convert_="all"
    )
    trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
    trainer.save_checkpoint(last_checkpoint(config))
    monitor = next((each for each in callbacks if isinstance(each, RunMonitor)), RunMonitor())
    return RunFigures(
        monitor.num_samples * trainer.world_size,
        monitor.num_steps,
        monitor.training_s,
        monitor.validation_s,
        monitor.waited_s,
        monitor.longest_wait_s,
    )


def _fit_other(config: DictConfig, model: RecipeModule, data: RecipeData, ckpt_path: str | None) -> RunFigures:
    figures: RunFigures = instantiate(config.trainer, _convert_="all").fit(model, data, ckpt_path, make_logger(config))
    return figures


def make_logger(config: DictConfig) -> Any:
    """The chosen logger; None for none, and on all ranks but the first."""
    return instantiate(config.logger, _convert_="all") if config.get("logger") and not rank_zero_only.rank else None


def _summarise(config: DictConfig, model: RecipeModule, data: RecipeData, figures: RunFigures) -> RunSummary:
    folder, last = Path(config.folder), last_checkpoint(config)
    artifacts = model.show(data, folder)
    best = last.with_name("best.ckpt")
    paths = {"shards": data.uri, "checkpoint": str(last), "summary": str(folder / "summary.json")}
    if best.exists():
        paths["best"] = str(best)
    logs = sorted(folder.glob("log/version_*"), key=lambda path: path.stat().st_mtime)
    paths |= {"log": str(logs[-1])} if logs else {}
    notes = (data.describe(), model.describe(data), *artifacts.notes)
    summary = RunSummary(notes, figures, model.history, model.shown, {**paths, **artifacts.files})
    summary.save(folder / "summary.json")
    print(summary)
    return summary


def _begin(config: DictConfig) -> None:
    """Keep the config of a new run, and the checkpoints of an earlier one under another name: none is ever deleted."""
    if rank_zero_only.rank:
        return
    used = last_checkpoint(config).parent
    if used.is_dir() and any(used.iterdir()):
        kept = used.with_name(f"{used.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
        used.rename(kept)
        print(f"Starting over; the earlier checkpoints are now in {kept}.")
    Path(config.folder).mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, Path(config.folder) / "config.yaml")


def _local_checkpoint(config: DictConfig, stack: ExitStack) -> str | None:
    """The checkpoint to resume from, as a local file; one in a store is downloaded for the time of the run."""
    wanted = config.ckpt_path
    if wanted is None or wanted == "last":
        return str(last_checkpoint(config)) if wanted else None
    if "://" not in wanted:
        return str(Path(wanted).expanduser())
    folder, _, name = str(wanted).rpartition("/")
    path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="checkpoint-"))) / name
    open_store(folder).get(name, path)
    return str(path)


@contextmanager
def environment(wanted: Mapping[str, Any]) -> Iterator[None]:
    """Set the variables of a store, unless null, for this process and those that it starts; restore them after."""
    values = {name: str(value) for name, value in wanted.items() if value is not None}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        _restore(before)


@contextmanager
def one_job() -> Iterator[None]:
    """Let processes that Lightning starts repeat this job, not the sweep that it is part of, and leave nothing behind.

    Lightning starts them with this process's command line, and its variables would make a sweep's next job believe
    that its processes were started already.
    """
    if not HydraConfig.initialized() or HydraConfig.get().mode is not RunMode.MULTIRUN:
        yield
        return
    before, argv, hydra = {name: os.environ.get(name) for name in _LAUNCHED}, sys.argv, HydraConfig.instance().cfg
    assert hydra is not None
    with read_write(hydra):
        hydra.hydra.run.dir = hydra.hydra.runtime.output_dir  # Lightning passes it on
    added = [str(each.path) for each in hydra.hydra.runtime.config_sources if each.provider == "command-line"]
    flags = [flag for path in added for flag in ("--config-dir", path)]
    sys.argv = [argv[0], *flags, *hydra.hydra.overrides.task, "hydra.mode=RUN"]
    try:
        yield
    finally:
        sys.argv = argv
        if torch.distributed.is_initialized() and before["LOCAL_RANK"] is None:
            torch.distributed.destroy_process_group()
        _restore(before)


def _restore(before: Mapping[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _sentence(error: BaseException) -> str:
    """An error as one sentence; of what an object's constructor refused, with the group that it was built from."""
    cause = error.__cause__ if isinstance(error, HydraException) else None
    where = next((line.partition(": ")[2] for line in str(error).splitlines() if line.startswith("full_key: ")), "")
    return f"{where}: {cause}" if cause is not None else f"{type(error).__name__}: {error}"


def _stopped(saved: str | None) -> None:
    if not rank_zero_only.rank:
        found = f"Last checkpoint: {saved}. " if saved else ""
        print(f"Stopped. {found}Resume with the same command and ckpt_path=last.", flush=True)


def _refused(*sentences: str) -> SystemExit:
    print(*sentences, sep="\n  ", file=sys.stderr)
    return SystemExit(2)


def _quieten() -> None:
    """Leave the terminal to what a user can act on."""
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=r".*treespec, LeafSpec.*", category=FutureWarning)  # Lightning's own
    warnings.filterwarnings("ignore", message=r"Checkpoint directory .* exists and is not empty")  # of a resumed run
    warnings.filterwarnings("ignore", message=r".*smaller than the logging interval.*")
