"""Train any LightningModule on any datamodule; configs choose both, see docs/configs.md.

python train.py +data=flowers                              synthetic flowers, no network needed
python train.py +data=flowers data.photos=/path/to/photos  a folder of class folders, or a .tgz of one
python train.py +data=flowers ckpt_path=last               resume the run where it was stopped
python train.py +data._target_=mine.Data +model._target_=mine.Net      your own classes
python train.py --help                                     all choices
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import sys
import tempfile
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from itertools import count, filterfalse
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints
from unittest.mock import patch

import hydra
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from hydra.utils import get_object, instantiate
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException  # type: ignore[attr-defined]
from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException

from lightning_stream.errors import LightningStreamError, is_secret
from lightning_stream.stores.credentials import VARIABLE as CREDENTIALS
from lightning_stream.trainers.lightning.data_module import StreamingDataModule
from lightning_stream.trainers.lightning.graceful_stop import TrainingInterrupted
from recipes.data.base import fetch

UNUSABLE = (
    LightningStreamError,
    HydraException,
    OmegaConfBaseException,
    MisconfigurationException,
    ImportError,
    FileNotFoundError,
    FileExistsError,
)
NUMBERS = {int: "a whole number", float: "a number", bool: "true or false", NoneType: "null"}


class Mode(Enum):
    """What a run does."""

    train = "train"
    validate = "validate"
    test = "test"
    prepare = "prepare"


@dataclass
class Run:
    """The types of a run's own settings, which ``configs/train.yaml`` describes; each group checks its own."""

    task_name: str = "train"
    mode: Mode = Mode.train
    tags: list[str] = field(default_factory=list)
    seed: int = 1
    ckpt_path: str | None = None
    optimized_metric: str | None = None
    data: Any = None
    model: Any = None
    callbacks: Any = None
    logger: Any = None
    trainer: Any = None
    hardware: Any = None
    store: Any = None
    paths: Any = None


ConfigStore.instance().store("run_types", Run)
if sys.version_info >= (3, 14) and hasattr(argparse.ArgumentParser, "_check_help"):
    # From Python 3.14 on, argparse looks into each help text; one of Hydra 1.3's is an object that becomes a text.
    argparse.ArgumentParser._check_help = lambda *_: None  # noqa: SLF001


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(config: DictConfig) -> float | None:
    """Run a config; returns its `optimized_metric` for sweeps. Exit codes: 1 error, 2 config or data unusable."""
    with environment(config):
        try:
            return run(config)
        except TrainingInterrupted as stop:
            say(f"Stopped. Last checkpoint: {stop.saved}. Resume with the same command and ckpt_path=last.")
            raise SystemExit(128 + stop.signum) from stop
        except Exception as error:
            if os.environ.get("HYDRA_FULL_ERROR") == "1" or not is_refusal(error):
                raise
            print(f"{sentence(error)}\n(HYDRA_FULL_ERROR=1 shows where.)", file=sys.stderr)
            raise SystemExit(2) from error


def run(config: DictConfig) -> float | None:
    """Build the parts, then train, evaluate or prepare."""
    if not all("_target_" in (config[group] or ()) for group in ("data", "model")):
        raise MisconfigurationException("data and model each need a _target_. Add +data=NAME; --help lists them")
    OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    seed_everything(config.seed, workers=True, verbose=False)
    data = instantiate(config.data, _convert_="all")
    if config.mode is Mode.prepare:
        data.prepare_data()
        return None
    model = instantiate(config.model, _convert_="all")
    if get_object(config.trainer._target_) is Trainer:
        refuse_types({str(name): value for name, value in config.trainer.items()})
    built = {group: parts for group in ("callbacks", "logger") if (parts := build_all(config[group]))}
    trainer = instantiate(config.trainer, **built, _convert_="all")
    if config.mode is not Mode.train and (not config.ckpt_path or not hasattr(trainer, config.mode.value)):
        raise MisconfigurationException(
            f"mode={config.mode.value} needs trainer=lightning, and weights: add ckpt_path=last, or a path or URL"
        )
    with checkpoint(config) as ckpt_path:
        if config.mode is Mode.train:
            undo = begin_folder(config, ckpt_path)
            try:
                trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
            except BaseException:
                if undo is not None:
                    undo()
                raise
            trainer.save_checkpoint(last_checkpoint(config))
            summarize(config, trainer, data)
        else:
            getattr(trainer, config.mode.value)(model, datamodule=data, ckpt_path=ckpt_path)
    metric = trainer.callback_metrics.get(config.optimized_metric)
    return None if metric is None else float(metric)


def build_all(group: DictConfig | None) -> list[Any]:
    """The parts of a group that have a `_target_`; others are settings of parts that were not chosen."""
    return [instantiate(part, _convert_="all") for part in (group or {}).values() if part and "_target_" in part]


def refuse_types(settings: dict[str, Any]) -> None:
    """Refuse what is no number where Lightning's trainer takes numbers alone: it would fail while it counts."""
    types = get_type_hints(Trainer.__init__)
    for name, value in settings.items():
        kinds = get_args(types.get(name)) or (types.get(name),)
        if set(kinds) <= NUMBERS.keys() and not isinstance(value, (int, *kinds)):
            wanted = " or ".join(NUMBERS[kind] for kind in kinds)
            raise MisconfigurationException(f"trainer.{name} takes {wanted}; found {value!r}")


def last_checkpoint(config: DictConfig) -> Path:
    """What ``ckpt_path=last`` resumes from, under every trainer."""
    return Path(config.paths.output) / "checkpoints" / "last.ckpt"


@contextmanager
def checkpoint(config: DictConfig) -> Iterator[str | None]:
    """The checkpoint to begin with, as a local file; one in a store is there as long as it is used."""
    wanted = config.ckpt_path or ""
    path = last_checkpoint(config) if wanted == "last" else Path(wanted).expanduser()
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder:
        if "://" in wanted:
            path = fetch(wanted, Path(folder))
        if not path.exists():
            raise FileNotFoundError(
                f"ckpt_path={wanted}: {path} does not exist. Omit it to start, set task_name=, or name a checkpoint of "
                "an earlier start (they are in checkpoints-1, checkpoints-2, ...)"
            )
        parts = (path / ".metadata", path / "checkpoint")  # of sharded checkpoints, PyTorch's and DeepSpeed's
        if wanted and not (any(map(Path.exists, parts)) if path.is_dir() else zipfile.is_zipfile(path)):
            raise MisconfigurationException(f"ckpt_path is a checkpoint of PyTorch; found {path}, which is none")
        yield str(path) if wanted else None


def is_refusal(error: Exception) -> bool:
    """Whether an error says what is wrong with the config or the data: ours do, wherever they come from."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    raised_in = frame.f_globals["__name__"].partition(".")[0]
    is_ours = raised_in in ("lightning_stream", "recipes") and isinstance(error, (TypeError, ValueError))
    return is_ours or isinstance(error, UNUSABLE)


@rank_zero_only
def begin_folder(config: DictConfig, ckpt_path: str | None) -> Callable[[], None]:
    """Write the config, without secrets; move an earlier run's checkpoints aside with its own, unless this one resumes.

    Returns what undoes both, unless this run has saved a checkpoint: often its settings were refused.
    """
    folder = last_checkpoint(config).parent
    kept = folder.with_name("config.yaml")
    former = kept.read_bytes() if kept.exists() else None
    aside = None
    resumes = ckpt_path is not None and Path(ckpt_path).resolve().is_relative_to(folder.resolve())
    if not resumes and folder.is_dir() and any(folder.iterdir()):
        names = (folder.with_name(f"{folder.name}-{number}") for number in count(1))
        aside = folder.rename(next(filterfalse(Path.exists, names)))
        if former is not None:
            kept.rename(aside / kept.name)
        print(f"Starting over; the earlier checkpoints are now in {aside}. ckpt_path=last resumes instead.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(OmegaConf.to_yaml(without_secrets(OmegaConf.to_container(config))))
    begun = kept.stat().st_mtime_ns

    def undo() -> None:
        if any(path.stat().st_mtime_ns > begun for path in folder.rglob("*")):
            return
        if former is not None:
            kept.write_bytes(former)
        if aside is not None:
            (aside / kept.name).unlink(missing_ok=True)
            aside.rename(folder)
            print(f"This run saved no checkpoint; the earlier ones are in {folder} again.")

    return undo


def without_secrets(value: Any, name: str = "", in_store: bool = False) -> Any:
    """A part of a config in which credentials that a user added are replaced."""
    if isinstance(value, dict):
        in_store = in_store or name in ("store", "store_options", "env")
        return {key: without_secrets(child, str(key), in_store) for key, child in value.items()}
    if isinstance(value, list):
        return [without_secrets(child, name, in_store) for child in value]
    return "(secret)" if is_secret(name, value, of_store=in_store) else value


@rank_zero_only
def summarize(config: DictConfig, trainer: Any, data: Any) -> None:
    """Print the final metrics, the speed, and where everything is."""
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if not name.startswith("data/")}
    print("", *(f"{name:<14} {value:.4g}" for name, value in sorted(metrics.items())), sep="\n")
    if isinstance(data, StreamingDataModule) and (stats := data.stats()).elapsed_s:
        samples = stats.num_samples * data.world().num_replicas
        unit = "rows" if stats.num_tokens else "samples"  # of packed samples, the rows are counted
        speed = f"{samples:,} {unit}, {samples / stats.elapsed_s:,.0f} a second"
        print(f"{'trained':<14} {speed}; waited {stats.wait_s / stats.elapsed_s:.1%} of the time for data")
    print(f"{'run':<14} {config.paths.output}")


@contextmanager
def environment(config: DictConfig) -> Iterator[None]:
    """Set the store's variables, and restore all afterwards.

    Processes that Lightning starts get this process's command line: they must repeat this job of a sweep, not the
    sweep. And Lightning's variables would make the next job believe that its processes were started already.
    """
    quieten()
    settings = config.store.env if config.store and config.store.env else {}
    variables = {name: str(value) for name, value in settings.items() if value is not None}
    if config.store and (name := config.store.get("credentials")):
        variables[CREDENTIALS] = f"{config.store.root}={name}"
    with ExitStack() as stack:
        stack.callback(end_process_group)
        stack.enter_context(patch.dict(os.environ, variables))
        if HydraConfig.initialized() and HydraConfig.get().mode is RunMode.MULTIRUN:
            running: Any = HydraConfig.get()
            (Path(running.sweep.dir) / "multirun.yaml").unlink(missing_ok=True)  # it may hold secrets
            with read_write(running):
                running.run.dir = running.runtime.output_dir  # Lightning passes it on
            paths = [source.path for source in running.runtime.config_sources if source.provider == "command-line"]
            argv = [sys.argv[0], *(f"--config-dir={path}" for path in paths), *running.overrides.task, "hydra.mode=RUN"]
            stack.enter_context(patch.object(sys, "argv", argv))
        yield


def end_process_group() -> None:
    """Also where the process ends: Gloo's threads may abort one that exits with them."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def sentence(error: BaseException) -> str:
    """An error as one sentence; where a constructor refused a setting, with the group that it was built from."""
    cause = error.__cause__ or error
    where = re.search(r"full_key: (\S+)", str(error))
    return f"{where[1]}: {cause}" if where else f"{type(error).__name__}: {error}"


say = rank_zero_only(print)


def quieten() -> None:
    """Leave the terminal to what a user can act on, and to where a run resumed."""
    logging.getLogger("lightning_stream").setLevel(logging.INFO)
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*(Checkpoint directory|logging interval|monitored key|LeafSpec)")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
