"""mosaicml-streaming continues a training run of ours, by the state that docs/migrating.md shows."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from lightning_stream import MDSWriter, StreamingDataLoader, StreamingDataset

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrating.md"
READER = """
import json, sys
from streaming import StreamingDataLoader, StreamingDataset
dataset = StreamingDataset(local=sys.argv[1], shuffle=True, shuffle_algo=sys.argv[2], batch_size=16)
loader = StreamingDataLoader(dataset, batch_size=16)
loader.load_state_dict(json.loads(sys.argv[3]))
print(json.dumps([batch["id"].tolist() for batch in loader]))
"""


@pytest.mark.parametrize("algorithm", ["py1e", "py1s"])
def test_the_peer_delivers_the_rest_of_the_epoch(algorithm: str, tmp_path: Path) -> None:
    python = os.environ.get("LIGHTNING_STREAM_MOSAIC_PYTHON")
    if not python:
        pytest.skip("LIGHTNING_STREAM_MOSAIC_PYTHON=/path/to/python names none that has mosaicml-streaming")
    with MDSWriter(out=tmp_path / "shards", columns={"id": "int"}, size_limit=1024) as writer:
        for i in range(256):
            writer.write({"id": i})
    dataset = StreamingDataset(remote=tmp_path / "shards", shuffle=True, shuffle_algo=algorithm, batch_size=16)
    batches = iter(StreamingDataLoader(dataset))
    for _ in range(5):
        next(batches)
    names: dict[str, Any] = {"loader": batches}
    block = re.search(r"```python\n(ours = loader.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert block
    exec(block[1], names)
    command = [python, "-W", "ignore", "-c", READER, str(tmp_path / "shards"), algorithm, json.dumps(names["state"])]
    read = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    assert json.loads(read) == [batch["id"].tolist() for batch in batches]
