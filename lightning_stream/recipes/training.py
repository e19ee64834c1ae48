"""From a config to a trained model: check, build, fit, summarise."""

from __future__ import annotations

import logging
import shutil
import signal
import warnings
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig, OmegaConf

from lightning_stream.errors import LightningStreamError, MissingExtraError
from lightning_stream.recipes.callbacks import RunStopped
from lightning_stream.recipes.checks import find_problems
from lightning_stream.recipes.command_line import fail, mark_started, wants_traceback
from lightning_stream.recipes.composer_run import ComposerRun
from lightning_stream.recipes.launching import one_job
from lightning_stream.recipes.places import checkpoints, composer_checkpoints, last_checkpoint
from lightning_stream.recipes.summary import RunSummary, summarise

_SIGNALLED = 128  # a shell's exit code for "ended by signal n" is this plus n


def train(config: DictConfig) -> RunSummary | None:
    """Run what a config of ``train.py`` describes, and say how it went; None on all ranks but the first.

    Raises:
        SystemExit: 2 for a config or data that cannot be used, after all reasons were printed; 128 + n where signal n
            stopped the run.
    """
    mark_started()
    with one_job(config):
        return _checked(config)


def _checked(config: DictConfig) -> RunSummary | None:
    if problems := find_problems(config):
        raise fail(["This config cannot be run:", *(f"  {problem}" for problem in problems)])
    try:
        return _run(config)
    except (LightningStreamError, MissingExtraError) as error:
        if wants_traceback():
            raise
        raise fail([f"{type(error).__name__}: {error}"]) from error
    except SIGTERMException:  # several ranks: Lightning's own, which would end with 0, as if all were done
        signum: int = signal.SIGTERM
    except RunStopped as stop:
        _say_how_to_go_on(stop, config)
        signum = stop.signum
    raise SystemExit(_SIGNALLED + signum)


def _run(config: DictConfig) -> RunSummary | None:
    _quieten()
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    folder = Path(config.folder)
    continued = checkpoint_to_continue(config.ckpt_path, folder)
    data: Any = instantiate(config.data, _convert_="all")
    model: Any = instantiate(config.model, _convert_="all")
    if config.trainer._target_ == f"{ComposerRun.__module__}.{ComposerRun.__name__}":
        _run_composer(config, model, data)
        return None
    callbacks = [instantiate(one, _convert_="all") for one in (config.get("callbacks") or {}).values() if one]
    if config.trainer.get("enable_progress_bar") is False:
        callbacks = [one for one in callbacks if not isinstance(one, ProgressBar)]
    trainer: Any = instantiate(config.trainer, callbacks=callbacks, _convert_="all")
    if continued is None:
        put_aside(checkpoints(folder))
    keep_config(config, folder)
    try:
        trainer.fit(model, datamodule=data, ckpt_path=continued)
        trainer.save_checkpoint(last_checkpoint(folder))
        if not trainer.is_global_zero:
            return None
        summary = summarise(trainer, data, model, folder)
    finally:
        data.close()
    print(summary.to_text())
    return summary


def _run_composer(config: DictConfig, model: Any, data: Any) -> None:
    """The same data and model under Composer, which keeps its own checkpoints and needs none of the callbacks."""
    keep_config(config, Path(config.folder))
    measured = instantiate(config.trainer, _convert_="all").fit(model, data, config.ckpt_path)
    if rank_zero_only.rank:
        return
    print("Measured: " + ", ".join(f"{name} {value:.3f}" for name, value in measured.items()))
    print(f"Checkpoints: {composer_checkpoints(Path(config.folder))}; go on with ckpt_path=last")


def checkpoint_to_continue(ckpt_path: str | None, folder: Path) -> str | None:
    """The checkpoint that `ckpt_path` means: ``last`` is the newest of the run's own folder."""
    return str(last_checkpoint(folder)) if ckpt_path == "last" else ckpt_path


@rank_zero_only
def keep_config(config: DictConfig, folder: Path) -> None:
    """Write down what the run is made of."""
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, folder / "config.yaml")


@rank_zero_only
def put_aside(used: Path) -> None:
    """Keep an earlier run's checkpoints under another name, so that a new run of the same name starts anew."""
    if used.is_dir() and any(used.iterdir()):
        earlier = used.with_name("checkpoints.earlier")
        shutil.rmtree(earlier, ignore_errors=True)
        used.rename(earlier)
        print(f"Starting anew; the checkpoints of the earlier run are now in {earlier}.")


def _say_how_to_go_on(stop: RunStopped, config: DictConfig) -> None:
    saved = f"saved {stop.saved}" if stop.saved else "the last periodic checkpoint serves"
    print(
        f"Stopped by a signal; {saved}. Go on with the same command and ckpt_path=last (run {config.name!r}).",
        flush=True,
    )


def _quieten() -> None:
    """Leave the terminal to what a user can act on."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # A resumed run writes into the folder of the stopped one: that is the point of it.
    warnings.filterwarnings("ignore", message=r"Checkpoint directory .* exists and is not empty")
