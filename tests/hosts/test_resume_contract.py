"""The resume contract: under every host, a run that is continued trains on exactly what was left, or is refused.

A run is saved at each stop and goes on to its end; it is then continued from each stop in each world. All runs of a
host together must feed every optimizer step with the samples that the order says, whatever the world; or the host is
refused before its first step, with a sentence that names the cure.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the hosts need torch: uv sync --extra torch")

from hosts.run import EPOCHS, GLOBAL_BATCH, STEPS_PER_EPOCH, STOPS
from lightning_stream import MDSWriter, StreamingDataLoader, StreamingDataset

pytestmark = pytest.mark.distributed
TESTS = Path(__file__).resolve().parents[1]
Steps = dict[int, list[int]]
WORLDS = {"same": (1, 1), "grown": (1, 2), "shrunk": (2, 1), "same two": (2, 2)}


@dataclass(frozen=True)
class Host:
    """A host, and what it promises.

    Args:
        adapter: The function that runs it, as ``module:function``.
        package: What must be installed.
        install: The command that installs it.
        refused: What the refusal says, by the number of ranks; for other numbers it is exact.
        marks_padding: Whether its loader marks padding, so that its epochs may have a rest.
    """

    adapter: str
    package: str = "torch"
    install: str = "uv sync --extra torch"
    refused: tuple[tuple[int, str], ...] = ()
    marks_padding: bool = True


_LIGHTNING = ("lightning", "uv sync --extra lightning")
_COMPOSER = ("composer", "uv sync --no-dev --extra composer")
_ACCELERATE = ("accelerate", "pip install accelerate")
_TRANSFORMERS = ("transformers", "pip install transformers accelerate")
_DEALT_TWICE = ((2, "StreamingDataLoader"),)
HOSTS = {
    "plain loop": Host("with_torch:plain_loop"),
    "torch.distributed.checkpoint": Host("with_torch:dcp"),
    "torchdata": Host("with_torch:torchdata", "torchdata", "pip install torchdata", marks_padding=False),
    "Lightning, data module": Host("with_lightning:data_module", *_LIGHTNING),
    "Lightning, bare loader": Host("with_lightning:bare_loader", *_LIGHTNING),
    "Lightning, callback": Host("with_lightning:callback", *_LIGHTNING),
    "Fabric": Host("with_lightning:fabric", *_LIGHTNING),
    "Composer, data_spec": Host("with_composer:spec", *_COMPOSER),
    "Composer, bare loader": Host("with_composer:bare_loader", *_COMPOSER),
    "Composer, torch DataLoader": Host("with_composer:torch_loader", *_COMPOSER, marks_padding=False),
    "Accelerate, loader": Host("with_accelerate:bare_loader", *_ACCELERATE),
    "Accelerate, torch DataLoader": Host("with_accelerate:torch_loader", *_ACCELERATE, _DEALT_TWICE, False),
    "Transformers, loader": Host("with_accelerate:transformers_loader", *_TRANSFORMERS),
    "Transformers, dataset": Host("with_accelerate:transformers_dataset", *_TRANSFORMERS, _DEALT_TWICE, False),
}
# In a plain run each stop and each change of the world comes once; the full product is slow.
QUICK = [("middle", "grown"), ("epoch end", "same"), ("last batch", "shrunk"), ("later epoch", "shrunk")]
CASES = [
    pytest.param(stop, change, marks=[] if (stop, change) in QUICK else [pytest.mark.slow], id=f"{stop}, {change}")
    for stop in STOPS
    for change in WORLDS
]


class Launched:
    """The runs of one host: each is run when first asked for, its saves are made by one run in each world."""

    def __init__(self, host: Host, shards: Path, folder: Path) -> None:
        self.host, self.shards, self.folder = host, shards, folder

    def run(self, wanted: list[tuple[int, str | None, int]]) -> None:
        """Run these (world, stop, world now) that have not been run, in one process."""
        plan = [
            {"shards": str(self.shards), "folder": str(self._of(*one)), "world": one[2], "stop": one[1],
             "resumes": None if one[1] is None else str(self._of(one[0], None, one[0]))}
            for one in wanted
            if not self._of(*one).exists()
        ]  # fmt: skip
        if not plan:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "plan.json").write_text(json.dumps(plan))
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
        command = [sys.executable, "-W", "ignore", "-m", "hosts.launch", self.host.adapter, "plan.json"]
        subprocess.run(command, cwd=self.folder, env=env, check=True, timeout=280)

    def result(self, saved: int, stop: str | None, world: int) -> tuple[bool, Steps, str]:
        """Whether a run succeeded, what fed its steps, and what its ranks printed."""
        folder = self._of(saved, stop, world)
        steps: Steps = {}
        for file in sorted(folder.glob("ids.*")):
            for line in map(json.loads, file.read_text().splitlines()):
                steps.setdefault(line["step"], []).extend(line["ids"])
        output = "\n".join(file.read_text() for file in sorted(folder.glob("out.*")))
        return (
            not any(json.loads((folder / "codes.json").read_text())),
            {k: sorted(v) for k, v in steps.items()},
            output,
        )

    def _of(self, saved: int, stop: str | None, world: int) -> Path:
        return self.folder / f"{saved}-{stop}-{world}"


@pytest.fixture(scope="session")
def all_shards(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Seven batches an epoch, the last one whole or not."""
    folders = {}
    for marks_padding, num_samples in ((True, 53), (False, 56)):
        folders[marks_padding] = tmp_path_factory.mktemp("shards") / str(num_samples)
        with MDSWriter(out=str(folders[marks_padding]), columns={"id": "int"}, size_limit=100) as writer:
            for number in range(num_samples):
                writer.write({"id": number})
    return folders


@pytest.fixture(scope="session")
def launched(
    request: pytest.FixtureRequest, all_shards: dict[bool, Path], tmp_path_factory: pytest.TempPathFactory
) -> Launched:
    """A host with the runs of all selected cases."""
    host = HOSTS[request.param]
    if find_spec(host.package) is None:
        pytest.skip(f"{request.param} needs {host.package}: {host.install}")
    runs = Launched(host, all_shards[host.marks_padding], tmp_path_factory.mktemp("host") / "runs")
    cases = {
        (item.callspec.params["stop"], item.callspec.params["change"])
        for item in request.session.items
        if hasattr(item, "callspec") and item.callspec.params.get("launched") == request.param
    }
    worlds = [(*WORLDS[change], stop) for stop, change in cases]
    whole: list[tuple[int, str | None, int]] = [
        (world, None, world) for world in sorted({saved for saved, *_ in worlds})
    ]
    runs.run(whole)
    runs.run([(saved, stop, now) for saved, now, stop in worlds if runs.result(saved, None, saved)[0]])
    return runs


def planned(shards: Path) -> Steps:
    """What feeds every step, by the order alone."""
    loader = StreamingDataLoader(
        StreamingDataset(remote=str(shards), shuffle=True, shuffle_seed=3), global_batch_size=GLOBAL_BATCH
    )
    steps = [
        sorted(loader.last_batch.ids[~loader.last_batch.filler].tolist())
        for _ in range(EPOCHS)
        for _ in loader
        if loader.last_batch is not None
    ]
    assert len(steps) == EPOCHS * STEPS_PER_EPOCH
    return dict(enumerate(steps))


@pytest.mark.parametrize(("stop", "change"), CASES)
@pytest.mark.parametrize("launched", HOSTS, indirect=True)
def test_a_run_continues_with_exactly_what_is_left_or_is_refused_with_the_cure(
    launched: Launched, stop: str, change: str
) -> None:
    saved, now = WORLDS[change]
    plan, refused = planned(launched.shards), dict(launched.host.refused)
    for began, at, world in ((saved, None, saved), (saved, stop, now)):
        if began in refused and at is not None:
            return  # there is no checkpoint to continue from
        succeeded, steps, output = launched.result(began, at, world)
        if world in refused:
            assert not succeeded
            assert steps == {}, "refused only after training began"
            assert re.search(refused[world], output), output[-3000:]
            continue
        first = 0 if at is None else STOPS[at]
        assert succeeded, output[-3000:]
        assert steps == {step: ids for step, ids in plan.items() if step >= first}
