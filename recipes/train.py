"""From a config to a trained model: check, convert once, build, fit, summarise."""

import logging
import os
import signal
import sys
import tempfile
import warnings
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

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
from lightning_stream.run_log import PAGE_NAME
from lightning_stream.stores import open_store
from lightning_stream.trainers.lightning.callback import StreamingCallback
from lightning_stream.trainers.lightning.graceful_stop import TrainingInterrupted
from recipes.checks import find_problems, last_checkpoint, resumes_itself, trainer_kind, wrong_types
from recipes.data.base import RecipeData
from recipes.models.base import RecipeModule
from recipes.report import RunFigures, RunSummary

_UNUSABLE = (LightningStreamError, HydraException, ImportError, MisconfigurationException, FileNotFoundError)


def main(config: DictConfig) -> RunSummary | None:
    """Run a config of ``train.py``. Returns the summary on the first rank; None on others and with ``prepare_only``."""
    with ExitStack() as stack:
        stack.callback(_clean, Path(config.folder))
        if problems := find_problems(config):
            raise _refused("Invalid config:", *problems)
        _enter(config, stack)
        try:
            return _run(config, stack)
        except TrainingInterrupted as stop:
            raise _stopped(stop.signum, f"Last checkpoint: {stop.saved}. ") from stop
        except SystemExit as end:  # Lightning ends with 1 after a second Ctrl-C
            raise _stopped(signal.SIGINT) if isinstance(end.__context__, KeyboardInterrupt) else end from None
        except _UNUSABLE as error:
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
    data, model, trainer = build(config)
    stack.callback(data.close)
    if config.prepare_only:
        if is_first():
            data.prepare_data()
        return None
    ckpt_path = _local_checkpoint(config, stack)
    if not resumes_itself(config) and is_first():
        _begin(config)
    if trainer_kind(config) == "lightning":
        figures = _fit_lightning(config, trainer, model, data, ckpt_path)
    else:
        figures = trainer.fit(model, data, ckpt_path)
    return _summarise(config, model, data, figures) if is_first() else None


def build(config: DictConfig) -> tuple[RecipeData, RecipeModule, Any]:
    """The data, the model and the trainer of a config. Nothing is written; all refused parts are reported at once."""
    problems: list[str] = []

    def make(where: str, **more: Any) -> Any:
        node = OmegaConf.select(config, where)
        wrong = wrong_types(node, where) if node else []
        problems.extend(wrong)
        try:
            return instantiate(node, **more, _convert_="all") if node and not wrong else None
        except HydraException as error:
            problems.append(_sentence(error))

    data, model = make("data"), make("model")
    if data and model and not isinstance(data, model.data_type):
        found = f"{type(model).__name__} learns from {model.data_type.__name__}, and data is {type(data).__name__}"
        problems.append(f"model: {found}. Omit model=: a data choice brings its own.")
    # One logger, on the first rank; the others have none.
    more: dict[str, Any] = {"logger": (make("logger") if is_first() else None) or False}
    if trainer_kind(config) == "lightning":
        skipped = () if config.trainer.enable_progress_bar else (ProgressBar,)
        callbacks = [make(f"callbacks.{name}") for name in config.callbacks]
        if isinstance(config.trainer.val_check_interval, int):
            more["check_val_every_n_epoch"] = None  # the interval may be longer than an epoch
        more["callbacks"] = [each for each in callbacks if each and not isinstance(each, skipped)]
    trainer = make("trainer", **more)
    if problems:
        raise _refused("Invalid config:", *problems, "(HYDRA_FULL_ERROR=1 shows where.)")
    return data, model, trainer


def _fit_lightning(config: DictConfig, trainer: Any, model: Any, data: Any, ckpt_path: str | None) -> RunFigures:
    trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
    trainer.save_checkpoint(last_checkpoint(config))
    followed = next(each for each in trainer.callbacks if isinstance(each, StreamingCallback))
    now, steps = followed.monitor.stats(), followed.tracker.num_steps
    samples = now.num_samples * trainer.world_size
    return RunFigures(samples, steps, now.elapsed_s, now.validation_s, now.wait_s)


def _summarise(config: DictConfig, model: RecipeModule, data: RecipeData, figures: RunFigures) -> RunSummary:
    folder, last = Path(config.folder), last_checkpoint(config)
    paths = {"checkpoint": last, "best": last.with_name("best.ckpt"), **model.show(data, folder)}
    paths["report"] = folder / PAGE_NAME
    logs = sorted(folder.glob("log/version_*"), key=lambda path: path.stat().st_mtime)
    paths |= {"log": logs[-1]} if logs else {}
    found = {"shards": data.uri, **{name: str(path) for name, path in paths.items() if path.exists()}}
    summary = RunSummary((data.describe(), model.describe(data)), figures, model.history, model.shown, found)
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


def _clean(folder: Path) -> None:
    """Remove the folder of a run that was refused: Hydra has made it."""
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _enter(config: DictConfig, stack: ExitStack) -> None:
    """Set the store's variables for this run and the processes that it starts; restore all variables afterwards.

    Processes that Lightning starts get this process's command line: they must repeat this job of a sweep, not the
    sweep. And Lightning's variables would make the next job believe that its processes were started already.
    """
    stack.callback(_end_process_group)  # also where the process ends: Gloo's threads may abort one that exits with them
    variables = {name: str(value) for name, value in config.store.env.items() if value is not None}
    stack.enter_context(patch.dict(os.environ, variables))
    if not HydraConfig.initialized() or HydraConfig.get().mode is not RunMode.MULTIRUN:
        return
    hydra: Any = HydraConfig.get()
    with read_write(hydra):
        hydra.run.dir = hydra.runtime.output_dir  # Lightning passes it on
    added = [f"--config-dir={each.path}" for each in hydra.runtime.config_sources if each.provider == "command-line"]
    argv = [sys.argv[0], *added, *hydra.overrides.task, "hydra.mode=RUN"]
    stack.enter_context(patch.object(sys, "argv", argv))


def _end_process_group() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _sentence(error: BaseException) -> str:
    """An error as one sentence; where a constructor refused a setting, with the group that it was built from."""
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        raise error
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
    """Leave the terminal to what a user can act on, and to where a run resumed."""
    logging.getLogger("lightning_stream").setLevel(logging.INFO)
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_stream.loading.checks"):
        logging.getLogger(name).setLevel(logging.WARNING)
    unmeasured = ".*could not find the monitored key.*"  # a run that ends before its first validation
    for message in ("Checkpoint directory .* is not empty", ".*logging interval.*", ".*sync_dist=True.*", unmeasured):
        warnings.filterwarnings("ignore", message=message)
