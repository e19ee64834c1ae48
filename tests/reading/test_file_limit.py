"""A process that may have few files open: more are asked for, and where there are none, that is said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

NUM_SHARDS = 300
READ = """
import resource, sys
from lightning_stream import StreamingDataLoader, StreamingDataset
soft, hard = int(sys.argv[3]), int(sys.argv[4])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
dataset = StreamingDataset(remote=sys.argv[1], local=sys.argv[2], shuffle=True, window=300, num_canonical_nodes=1)
print(sum(len(batch["number"]) for batch in StreamingDataLoader(dataset, 250)))
"""


def read(remote: Path, local: Path, soft: int, hard: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", READ, str(remote), str(local), str(soft), str(hard)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from lightning_stream import MDSWriter

    folder = tmp_path_factory.mktemp("shards")
    with MDSWriter(out=str(folder), columns={"number": "int"}, size_limit=100) as writer:
        for number in range(4 * NUM_SHARDS):
            writer.write({"number": number})
    assert len(list(folder.glob("shard.*"))) >= NUM_SHARDS
    return folder


def test_a_batch_over_more_shards_than_files_may_be_open_asks_for_a_higher_limit(shards: Path, tmp_path: Path) -> None:
    done = read(shards, tmp_path, soft=256, hard=4096)
    assert (done.returncode, done.stdout.strip()) == (0, "1200"), done.stderr


def test_where_the_system_grants_no_more_the_error_says_so(shards: Path, tmp_path: Path) -> None:
    done = read(shards, tmp_path, soft=256, hard=256)
    assert done.returncode == 1
    assert "this process may have 256 in all" in done.stderr
    assert "ulimit -n" in done.stderr
