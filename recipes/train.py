"""From a config to a trained model: check, convert once, build, fit, summarise."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count
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
from recipes.checks import find_problems, last_checkpoint, resumes_itself, trainer_kind
from recipes.data.base import RecipeData
from recipes.models.base import RecipeModule
from recipes.report import RunFigures, RunSummary

_LAUNCHED = dict.fromkeys(("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"))
_UNUSABLE = (LightningStreamError, HydraException, ImportError, MisconfigurationException, FileNotFoundError)


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
            raise _stopped(stop.signum, f"Last checkpoint: {stop.saved}. ") from stop
        except SystemExit as end:  # Lightning ends with 1 after a second Ctrl-C
            raise _stopped(signal.SIGINT) if isinstance(end.__context__, KeyboardInterrupt) else end from None
        except _UNUSABLE as error:
            if os.environ.get("HYDRA_FULL_ERROR") == "1":
                raise
            began = [f"The run began with the settings in {config.folder}/config.yaml."]
            advice = began if isinstance(error, StateError) else []
            raise _refused(_sentence(error), *advice, "(HYDRA_FULL_ERROR=1 shows where.)") from error


def is_first() -> bool:
    """Whether this process speaks for all."""
    return not int(getattr(rank_zero_only, "rank", 0))


def _run(config: DictConfig, stack: ExitStack) -> RunSummary | None:
    _quieten()
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    data: RecipeData = instantiate(config.data, _convert_="all")
    model: RecipeModule = instantiate(config.model, _convert_="all")
    stack.callback(data.close)
    if config.prepare_only:
        if is_first():
            data.prepare_data()
        return None
    ckpt_path = _local_checkpoint(config, stack)
    if not resumes_itself(config) and is_first():
        _begin(config)
    # One logger, on the first rank; the others have none.
    logger = instantiate(config.logger) if config.get("logger") and is_first() else None
    if trainer_kind(config) == "lightning":
        figures = _fit_lightning(config, model, data, ckpt_path, logger)
    else:
        figures = instantiate(config.trainer, _convert_="all").fit(model, data, ckpt_path, logger)
    return _summarise(config, model, data, figures) if is_first() else None


def _fit_lightning(config: DictConfig, model: Any, data: Any, ckpt_path: str | None, logger: Any) -> RunFigures:
    callbacks = [instantiate(each, _convert_="all") for each in config.callbacks.values() if each]
    if not config.trainer.enable_progress_bar:
        callbacks = [each for each in callbacks if not isinstance(each, ProgressBar)]
    trainer: Any = instantiate(config.trainer, callbacks=callbacks, logger=logger or False, _convert_="all")
    trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
    trainer.save_checkpoint(last_checkpoint(config))
    now = next((each for each in callbacks if isinstance(each, RunMonitor)), RunMonitor())
    samples = now.num_samples * trainer.world_size
    return RunFigures(samples, now.num_steps, now.training_s, now.validation_s, now.waited_s, now.longest_wait_s)


def _summarise(config: DictConfig, model: RecipeModule, data: RecipeData, figures: RunFigures) -> RunSummary:
    folder, last = Path(config.folder), last_checkpoint(config)
    artifacts = model.show(data, folder)
    logs = sorted(folder.glob("log/version_*"), key=lambda path: path.stat().st_mtime)
    paths: dict[str, Any] = {
        "shards": data.uri,
        "checkpoint": last,
        "best": last.with_name("best.ckpt"),
        **artifacts.files,
    }
    paths |= {"log": logs[-1]} if logs else {}
    found = {name: str(path) for name, path in paths.items() if name == "shards" or Path(path).exists()}
    notes = (data.describe(), model.describe(data), *artifacts.notes)
    summary = RunSummary(notes, figures, model.history, model.shown, found)
    summary.save(folder / "summary.json")
    print(summary)
    return summary


def _begin(config: DictConfig) -> None:
    """Keep the config of a new run, and the checkpoints of an earlier one under another name: none is ever deleted."""
    used = last_checkpoint(config).parent
    if used.is_dir() and any(used.iterdir()):
        kept = next(one for n in count(1) if not (one := used.with_name(f"{used.name}-{n}")).exists())
        used.rename(kept)
        print(f"Starting over; the earlier checkpoints are now in {kept}.")
    Path(config.folder).mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, Path(config.folder) / "config.yaml")


def _local_checkpoint(config: DictConfig, stack: ExitStack) -> str | None:
    """The checkpoint to resume from, as a local file; one in a store is downloaded for the duration of the run."""
    if config.ckpt_path is None or config.ckpt_path == "last":
        return str(last_checkpoint(config)) if config.ckpt_path else None
    if "://" not in config.ckpt_path:
        return str(Path(config.ckpt_path).expanduser())
    folder, _, name = config.ckpt_path.rpartition("/")
    path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="checkpoint-"))) / name
    open_store(folder).get(name, path)
    return str(path)


@contextmanager
def environment(wanted: Mapping[str, Any]) -> Iterator[None]:
    """Set variables, unless null, for this process and those that it starts; restore all of them afterwards."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update({name: str(value) for name, value in wanted.items() if value is not None})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({name: value} if value is not None else {})


@contextmanager
def one_job() -> Iterator[None]:
    """Let processes that Lightning starts repeat this job, not the sweep that it is part of, and leave nothing behind.

    Lightning starts them with this process's command line, and its variables would make a sweep's next job believe
    that its processes were started already.
    """
    if not HydraConfig.initialized() or HydraConfig.get().mode is not RunMode.MULTIRUN:
        yield
        return
    argv = sys.argv
    hydra: Any = HydraConfig.get()
    with read_write(hydra):
        hydra.run.dir = hydra.runtime.output_dir  # Lightning passes it on
    added = [f"--config-dir={each.path}" for each in hydra.runtime.config_sources if each.provider == "command-line"]
    is_launched = "LOCAL_RANK" in os.environ
    sys.argv = [argv[0], *added, *hydra.overrides.task, "hydra.mode=RUN"]
    try:
        with environment(_LAUNCHED):
            yield
    finally:
        sys.argv = argv
        if torch.distributed.is_initialized() and not is_launched:
            torch.distributed.destroy_process_group()


def _sentence(error: BaseException) -> str:
    """An error as one sentence; where a constructor refused a setting, with the group that it was built from."""
    cause = error.__cause__ if isinstance(error, HydraException) else None
    where = next((line.partition(": ")[2] for line in str(error).splitlines() if line.startswith("full_key: ")), "")
    return f"{where}: {cause}" if cause is not None else f"{type(error).__name__}: {error}"


def _stopped(signum: int, found: str = "") -> SystemExit:
    if is_first():
        print(f"Stopped. {found}Resume with the same command and ckpt_path=last.", flush=True)
    return SystemExit(128 + signum)


def _refused(*sentences: str) -> SystemExit:
    print(*sentences, sep="\n  ", file=sys.stderr)
    return SystemExit(2)


def _quieten() -> None:
    """Leave the terminal to what a user can act on."""
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_stream.loading.checks"):
        logging.getLogger(name).setLevel(logging.WARNING)
    messages = (".*treespec, LeafSpec.*", "Checkpoint directory .* is not empty", ".*than the logging interval.*")
    for message in (*messages, ".*`self.log.*sync_dist=True.*"):  # the metrics are those of all ranks already
        warnings.filterwarnings("ignore", message=message)
