"""A training run begins on Parquet files and continues on the dataset that `convert` made of them, on other devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the hosts need torch: uv sync --extra torch")
pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: uv sync --extra convert")
import pyarrow.parquet as pq  # noqa: E402

from hosts.run import EPOCHS, GLOBAL_BATCH, STOPS  # noqa: E402
from lightning_stream import StreamingDataLoader, StreamingDataset  # noqa: E402
from lightning_stream.convert import convert  # noqa: E402

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]
HOSTS = {
    "plain loop": ("with_torch", "plain_loop", "torch"),
    "Lightning": ("with_lightning", "data_module", "lightning"),
    "Composer": ("with_composer", "spec", "composer"),
}
CONTINUED = [("middle", 2), ("later epoch", 1)]


def steps_of(folder: Path) -> dict[int, list[int]]:
    steps: dict[int, list[int]] = {}
    for file in folder.glob("ids.*"):
        for line in map(json.loads, file.read_text().splitlines()):
            steps.setdefault(line["step"], []).extend(line["ids"])
    assert steps, "\n".join(file.read_text()[-3000:] for file in folder.glob("out.*"))
    return {step: sorted(ids) for step, ids in steps.items()}


@pytest.mark.parametrize("host", HOSTS)
def test_a_run_continues_on_converted_data_in_another_world(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, function, package = HOSTS[host]
    if find_spec(package) is None:
        pytest.skip(f"{host} needs {package}: uv sync --extra {package}")
    monkeypatch.setenv("LIGHTNING_STREAM_CACHE", str(tmp_path / "cache"))
    rows, shards = tmp_path / "rows", tmp_path / "shards"
    rows.mkdir()
    for number in range(3):
        ids = [k for k in range(53) if k % 3 == number]
        pq.write_table(pa.table({"id": pa.array(ids, pa.int64())}), rows / f"{number}.parquet", row_group_size=4)
    convert(rows, shards, num_workers=1)
    common = {"host": function}
    first = {
        **common,
        "shards": str(rows),
        "folder": str(tmp_path / "first"),
        "world": 1,
        "stop": None,
        "resumes": None,
    }
    plan = [first]
    for stop, world in CONTINUED:
        on = {"shards": str(shards), "folder": str(tmp_path / stop), "world": world, "stop": stop}
        plan.append({**common, **on, "resumes": first["folder"]})
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    tests = str(Path(__file__).resolve().parents[1])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([tests, *sys.path])}
    command = [sys.executable, "-W", "ignore", "-m", "hosts.launch", module, "plan.json"]
    subprocess.run(command, cwd=tmp_path, env=env, check=True)
    dataset = StreamingDataset(remote=str(rows), shuffle=True, shuffle_seed=3)
    loader = StreamingDataLoader(dataset, global_batch_size=GLOBAL_BATCH)
    wanted = {}
    for step, batch in enumerate(batch for _ in range(EPOCHS) for batch in loader):
        assert loader.last_batch is not None
        wanted[step] = sorted(batch["id"][~loader.last_batch.filler].tolist())
    assert steps_of(tmp_path / "first") == wanted
    for stop, _ in CONTINUED:
        rest = {step: ids for step, ids in wanted.items() if step >= STOPS[stop]}
        assert steps_of(tmp_path / stop) == rest
