"""What we rely on inside Lightning: this file fails when a new version lays it out otherwise.

Then look at `trainers/lightning/loops.py`, make the other tests of Lightning pass on that version, and widen its
`TRIED_VERSIONS`.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
pl = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.callbacks.progress.progress_bar import ProgressBar  # noqa: E402
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy  # noqa: E402
from lightning.pytorch.utilities import CombinedLoader  # noqa: E402
from support.lightning_runs import QUIET  # noqa: E402

from lightning_stream import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402
from lightning_stream.errors import StateError  # noqa: E402
from lightning_stream.trainers.lightning import loops as lightning_loops  # noqa: E402
from lightning_stream.trainers.lightning.loops import TRIED_VERSIONS, LoopPosition, rewrite_loops, warn_if_untried  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*your dataloader is not resumable.*")
PAIR, FOUR = {"ready", "completed"}, {"ready", "started", "processed", "completed"}
BATCHES = {"current": FOUR, "total": FOUR, "is_last_batch": bool}
STEPS = {"current": PAIR, "total": PAIR}
LOOPS: dict[str, Any] = {  # of a fit loop in a checkpoint of Lightning 2.5 to 2.6; a set: numbers under these names
    "state_dict": {},
    "epoch_progress": {"current": FOUR, "total": FOUR},
    "epoch_loop.state_dict": {"_batches_that_stepped"},
    "epoch_loop.batch_progress": BATCHES,
    "epoch_loop.scheduler_progress": STEPS,
    "epoch_loop.automatic_optimization.state_dict": {},
    "epoch_loop.automatic_optimization.optim_progress": {
        "optimizer": {
            "step": STEPS,
            "zero_grad": {"current": FOUR - {"processed"}, "total": FOUR - {"processed"}},
        }
    },
    "epoch_loop.manual_optimization.state_dict": {},
    "epoch_loop.manual_optimization.optim_step_progress": STEPS,
    "epoch_loop.val_loop.state_dict": {},
    "epoch_loop.val_loop.batch_progress": BATCHES,
}


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
        self.heard: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(pl.LightningDataModule):
    """Notes in which order Lightning calls."""

    heard: list[str]

    def setup(self, stage: str) -> None:
        self.heard.append("module setup")
        self.trainer.callbacks.insert(0, Inserted(self.heard))

    def train_dataloader(self) -> Any:
        self.heard.append("train_dataloader")
        return self.val_dataloader()

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.zeros(20, 4), batch_size=4)


class Inserted(pl.Callback):
    def __init__(self, heard: list[str]) -> None:
        self.heard = heard

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.heard.append("callback setup")

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.heard.append(f"load at batch {trainer.fit_loop.epoch_loop.batch_progress.current.ready}")

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.heard.append(f"train from batch {trainer.fit_loop.epoch_loop.batch_progress.current.ready}")


class SaveAt3(pl.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)


def trained(ckpt: Path | None = None, *callbacks: Any) -> tuple[Any, list[str]]:
    trainer = pl.Trainer(max_epochs=1, callbacks=list(callbacks), **QUIET)
    data = Data()
    data.heard = []
    trainer.fit(Net(), datamodule=data, ckpt_path=ckpt)
    return trainer, data.heard


def is_laid_out(found: Any, expected: Any) -> bool:
    if isinstance(expected, set):
        return set(found) == expected and all(isinstance(number, int) for number in found.values())
    if isinstance(expected, type):
        return isinstance(found, expected)
    return set(found) == set(expected) and all(is_laid_out(found[name], expected[name]) for name in expected)


def test_this_version_of_lightning_was_tried() -> None:
    assert pl.__version__ in TRIED_VERSIONS, f"try {pl.__version__} as this file's first lines say"


def test_a_checkpoint_holds_the_counters_that_we_rewrite_and_no_others(tmp_path: Path) -> None:
    path = tmp_path / "at3.ckpt"
    trained(None, SaveAt3(path))
    checkpoint = torch.load(path, weights_only=True)
    assert {"callbacks", "global_step", "loops", "pytorch-lightning_version"} <= set(checkpoint)
    fit_loop = checkpoint["loops"]["fit_loop"]
    assert set(fit_loop) == set(LOOPS)
    for name, expected in LOOPS.items():
        assert is_laid_out(fit_loop[name], expected), f"{name} is {fit_loop[name]}"
    # as saved in on_train_batch_end: begun 3, completed 2, which Lightning repairs when it loads
    assert fit_loop["epoch_loop.batch_progress"]["current"] == {
        "ready": 3, "started": 3, "processed": 3, "completed": 2,
    }  # fmt: skip
    assert fit_loop["epoch_loop.state_dict"] == {"_batches_that_stepped": 2}


def test_callbacks_read_a_checkpoint_before_the_loops_and_after_the_data_modules_setup(tmp_path: Path) -> None:
    path = tmp_path / "at3.ckpt"
    _, first = trained(None, SaveAt3(path))
    assert first[:3] == ["module setup", "callback setup", "train_dataloader"]
    _, again = trained(path)
    assert again[:5] == [
        "module setup", "callback setup", "load at batch 0", "train_dataloader", "train from batch 3",
    ]  # fmt: skip


def test_the_trainers_parts_that_we_reach_into_are_there() -> None:
    trainer, _ = trained()
    loop = trainer.fit_loop
    for place, name in (
        (loop, "setup_data"), (loop, "epoch_loop"), (loop.epoch_loop, "_batches_that_stepped"),
        (loop.epoch_loop, "_should_accumulate"), (trainer, "log_every_n_steps"),
        (loop, "_combined_loader"), (loop, "_data_fetcher"), (_PrefetchDataFetcher(), "fetched"),
        (trainer, "is_last_batch"), (trainer, "sanity_checking"), (trainer, "enable_validation"),
        (trainer, "overfit_batches"), (trainer, "limit_train_batches"),
        (trainer, "limit_val_batches"), (trainer, "val_check_interval"), (trainer, "check_val_every_n_epoch"),
        (trainer, "accumulate_grad_batches"), (trainer, "progress_bar_callback"), (trainer, "num_nodes"),
        (trainer, "lr_scheduler_configs"), (trainer, "callback_metrics"), (trainer, "ckpt_path"),
        (loop, "_restarting"), (loop, "_data_source"), (loop._data_source, "instance"),
        (loop.epoch_loop.val_loop, "_has_run"), (CombinedLoader([]), "_iterator"),
        (trainer.strategy, "handles_gradient_accumulation"),
    ):  # fmt: skip
        assert hasattr(place, name), f"{type(place).__name__}.{name}"
    restarting = type(loop.epoch_loop).restarting
    assert isinstance(restarting, property)
    assert restarting.fset is not None
    assert list(inspect.signature(loop.setup_data).parameters) == []
    assert trainer.state.fn == "fit"
    since_2_6 = tuple(map(int, pl.__version__.split(".")[:2])) >= (2, 6)
    assert hasattr(trainer, "_val_check_time_interval") == since_2_6
    assert hasattr(loop.epoch_loop, "_broadcast_sigterm_tensor") == since_2_6
    assert callable(trainer._signal_connector._sigterm_notifier_fn)
    assert list(inspect.signature(ProgressBar.get_metrics).parameters) == ["self", "trainer", "pl_module"]
    for strategy in (DDPStrategy, ModelParallelStrategy):
        assert isinstance(strategy.distributed_sampler_kwargs, property)
    assert isinstance(Strategy.root_device, property)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_the_iterations_that_a_fit_takes_its_batches_from_are_found(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path), columns={"x": "ndarray:float32:4"}) as writer:
        for _ in range(8):
            writer.write({"x": np.zeros(4, np.float32)})
    found: list[Any] = []

    class Looks(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            found.append(lightning_loops.iterators(self.trainer))
            return super().training_step(batch["x"], batch_idx)

    trainer = pl.Trainer(max_steps=2, **QUIET)
    trainer.fit(Looks(), StreamingDataLoader(StreamingDataset(remote=tmp_path), 4))
    assert [len(one) for one in found] == [1, 1]
    assert found[0][0] is found[1][0]
    assert not lightning_loops.lacks_last(trainer)


def test_no_other_file_reaches_into_lightnings_loops() -> None:
    folder = Path(lightning_loops.__file__).parent
    files = [path for path in folder.glob("*.py") if path.name != "loops.py"]
    assert len(files) > 4
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "value", None)
            assert name not in ("fit_loop", "epoch_loop", "val_loop", "loops"), (
                f"{path.name}, line {getattr(node, 'lineno', '?')}"
            )
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                assert isinstance(node.value, ast.Name), f"{path.name}, line {node.lineno}: {node.attr}"
                assert node.value.id in ("self", "cls"), f"{path.name}, line {node.lineno}: {node.attr}"


def test_a_checkpoint_laid_out_otherwise_is_refused() -> None:
    checkpoint = {"global_step": 3, "pytorch-lightning_version": "9.0.0", "loops": {"fit_loop": {"state_dict": {}}}}
    with pytest.raises(StateError, match=r"of Lightning 9\.0\.0, has an unknown layout .* Lightning <2\.7,>=2\.5"):
        rewrite_loops(checkpoint, LoopPosition(0, 3, 5))


def test_an_untested_version_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = SimpleNamespace(fit_loop=pl.Trainer(logger=False, accelerator="cpu", enable_checkpointing=False).fit_loop)
    warn_if_untried(trainer)
    monkeypatch.setattr(pl, "__version__", "2.7.0rc1")
    with pytest.warns(UserWarning, match=r"<2\.7,>=2\.5, and this is 2\.7\.0rc1"):
        warn_if_untried(trainer)
