"""The resume contract: under every host, a run that is continued trains on exactly what was left, or is refused.

A run is saved at each stop and continues to its end; it is then continued from each stop in each world. All runs of a
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
from typing import Any

import pytest

pytest.importorskip("torch", reason="the hosts need torch: uv sync --extra torch")

from support.resume_contract import Steps, from_step, merged, planned

from hosts.run import EPOCHS, GLOBAL_BATCH, STOPS, Numbers
from lightning_stream import MapDataset, MDSWriter, StreamingDataLoader, StreamingDataset
from lightning_stream.convert import convert

# The first case waits for the runs of all.
nightly = pytest.mark.nightly
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]
TESTS = Path(__file__).resolve().parents[1]
# Names of changes: the number of ranks that save, and that continue; the data may have been converted between the two,
# or be a map-style dataset.
CHANGES = {
    "same": (1, 1), "grown": (1, 2), "shrunk": (2, 1), "same two": (2, 2),
    "converted": (1, 1), "converted, grown": (1, 2), "map-style": (1, 2), "map-style, shrunk": (2, 1),
}  # fmt: skip


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
    "torch.distributed.checkpoint": Host("with_dcp:dcp"),
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
    "Transformers, loader": Host("with_transformers:bare_loader", *_TRANSFORMERS),
    "Ignite": Host("with_ignite:bare_loader", "ignite", "pip install pytorch-ignite"),
    "Ray": Host("with_prefetchers:ray", "ray", "pip install 'ray[train]'"),
    "thread that takes batches ahead": Host("with_prefetchers:thread"),
    "Transformers, dataset": Host("with_transformers:dataset", *_TRANSFORMERS, _DEALT_TWICE, False),
}
# In a plain run each stop and each change comes once in a plain loop, and every other host continues in a larger world
# and in a smaller one, and one of each trainer other data, too; the full product is nightly.
QUICK = [("middle", "grown"), ("later epoch", "shrunk")]
MORE = [
    ("middle", "converted, grown"), ("epoch end", "map-style, shrunk"), ("epoch end", "same"), ("last batch", "shrunk"),
    ("later epoch", "converted"), ("middle", "map-style"),
]  # fmt: skip
MORE_OF = {"plain loop": MORE, "Lightning, data module": MORE[:3], "Composer, data_spec": MORE[:3]}
CASES = [
    pytest.param(host, stop, change, marks=[] if (stop, change) in [*QUICK, *MORE_OF.get(host, [])] else nightly)
    for host in HOSTS
    for stop in STOPS
    for change in CHANGES
    if ("converted" not in change or host in MORE_OF) and ("map" not in change or HOSTS[host].marks_padding)
]


class Runs:
    """The runs of all selected cases, which are launched when the first is asked for."""

    def __init__(self, selected: list[tuple[str, str, str]], folder: Path) -> None:
        self.folder = folder
        self.runs: dict[Path, dict[str, Any]] = {}
        for host, _, change in sorted(selected):  # the runs that save come first
            self._plan(host, change, None)
        for host, stop, change in sorted(selected):
            self._plan(host, change, stop)

    def of(self, host: str, change: str, stop: str | None) -> Path:
        """The folder of the run that saves, or that continues from a stop."""
        saved, now = CHANGES[change]
        data = "rows" if "converted" in change else "numbers" if "map" in change else "shards"
        return self.folder / host / (f"{data} {saved}" if stop is None else f"{data} {saved} to {now} {stop}")

    def _plan(self, host: str, change: str, stop: str | None) -> None:
        resumes = None if stop is None else str(self.of(host, change, None))
        self.runs[self.of(host, change, stop)] = {
            "host": HOSTS[host].adapter, "world": CHANGES[change][stop is not None], "stop": stop, "resumes": resumes,
            "folder": str(self.of(host, change, stop)),
            "shards": "53" if "map" in change else str(self.data(host, change, stop is not None)),
        }  # fmt: skip

    def data(self, host: str, change: str, is_converted: bool = False) -> Path:
        """Seven batches an epoch, the last one whole or not; in Parquet files, before they are converted."""
        num_samples = 53 if HOSTS[host].marks_padding else 56
        path = self.folder / f"shards-{num_samples}"
        if "converted" in change:
            path = self.folder / ("converted" if is_converted else "rows")
        if not path.exists():
            write_rows(self.folder) if "converted" in change else write_shards(path, num_samples)
        return path

    def launch(self) -> None:
        """Run all, in one process."""
        plan, self.runs = [*self.runs.values()], {}
        if plan:
            (self.folder / "plan.json").write_text(json.dumps(plan))
            path = os.pathsep.join([str(TESTS), *sys.path])
            env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
            env["LIGHTNING_STREAM_CACHE"] = str(self.folder / "cache")
            command = [sys.executable, "-W", "ignore", "-m", "hosts.launch", "plan.json"]
            subprocess.run(command, cwd=self.folder, env=env, check=True)


def write_shards(path: Path, num_samples: int) -> None:
    with MDSWriter(out=str(path), columns={"id": "int"}, size_limit=100) as writer:
        for number in range(num_samples):
            writer.write({"id": number})


def write_rows(folder: Path) -> None:
    """Parquet files, and the dataset that `convert` makes of them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "rows").mkdir()
    for number in range(3):
        ids = [k for k in range(53) if k % 3 == number]
        pq.write_table(pa.table({"id": pa.array(ids, pa.int64())}), folder / f"rows/{number}.parquet", row_group_size=4)
    convert(folder / "rows", folder / "converted", num_workers=1)


def result(folder: Path) -> tuple[bool, Steps, str]:
    """Whether a run succeeded, what fed its steps, and what its ranks printed."""
    lines = [json.loads(line) for file in folder.glob("ids.*") for line in file.read_text().splitlines()]
    output = "\n".join(file.read_text() for file in sorted(folder.glob("out.*")))
    succeeded = not any(json.loads((folder / "codes.json").read_text()))
    return succeeded, merged({line["step"]: line["ids"]} for line in lines), output


def is_installed(host: str, change: str) -> bool:
    packages = [HOSTS[host].package, *(["pyarrow"] if "converted" in change else [])]
    return all(find_spec(package) is not None for package in packages)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The runs of every selected case whose host is installed."""
    params = [item.callspec.params for item in request.session.items if item.path == Path(__file__)]
    cases = [(one["host"], one["stop"], one["change"]) for one in params]
    return Runs([case for case in cases if is_installed(case[0], case[2])], tmp_path_factory.mktemp("hosts"))


@pytest.mark.parametrize(("host", "stop", "change"), CASES)
def test_a_run_continues_with_exactly_what_is_left_or_is_refused_with_the_cure(
    runs: Runs, host: str, stop: str, change: str
) -> None:
    if not is_installed(host, change):
        pytest.skip(f"{host} needs {HOSTS[host].package}: {HOSTS[host].install}; conversion needs pyarrow")
    runs.launch()
    if "map" in change:
        dataset: StreamingDataset = MapDataset(Numbers(53), shuffle=True, seed=3)
    else:
        data = runs.data(host, change)
        dataset = StreamingDataset(remote=data, local=runs.folder / f"of {data.name}", shuffle=True, shuffle_seed=3)
    plan = planned(StreamingDataLoader(dataset, global_batch_size=GLOBAL_BATCH), epochs=EPOCHS)
    refused = dict(HOSTS[host].refused)
    for at, world in zip((None, stop), CHANGES[change], strict=True):
        succeeded, steps, output = result(runs.of(host, change, at))
        if world in refused:
            assert not succeeded
            assert steps == {}, "refused only after training began"
            assert re.search(refused[world], output), output[-3000:]
            return  # there is no checkpoint to continue from
        assert succeeded, output[-3000:]
        assert steps == (plan if at is None else from_step(plan, STOPS[at]))
