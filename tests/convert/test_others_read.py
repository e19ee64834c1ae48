"""mosaicml-streaming reads what is converted, where an environment that has it is named."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lightning_stream.convert import convert

READER = """
import json, sys
from streaming import StreamingDataset
dataset = StreamingDataset(local=sys.argv[1], batch_size=1)
plain = lambda value: value.tolist() if hasattr(value, "tolist") else value
print(json.dumps([{name: plain(value) for name, value in dataset[i].items()} for i in range(len(dataset))]))
"""


@pytest.mark.parametrize("shuffle", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_mosaicml_streaming_reads_the_same_samples(
    rows_file: Path, tmp_path: Path, samples_of: Any, mosaic_python: str, shuffle: bool
) -> None:
    convert(rows_file, tmp_path / "out", compression=None, num_workers=1, partition_bytes="30kb", shuffle=shuffle)
    command = [mosaic_python, "-W", "ignore", "-c", READER, str(tmp_path / "out")]
    read = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    ours = [{**sample, "tokens": sample["tokens"].tolist()} for sample in samples_of(tmp_path / "out")]
    assert read == ours
