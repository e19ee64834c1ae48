"""The command line: what a dataset holds, whether it is whole, what a checkpoint says, what an order would do."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lightning_stream import MDSWriter
from lightning_stream.cli import main


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A train and a val set of small shards, compressed and hashed."""
    root = tmp_path_factory.mktemp("cli") / "shards"
    for split, count in (("train", 64), ("val", 16)):
        with MDSWriter(
            out=str(root / split),
            columns={"x": "ndarray:int32:8", "label": "int", "name": "str"},
            compression="zstd",
            hashes=["sha1", "xxh3_64"],
            size_limit=1 << 10,
        ) as writer:
            for number in range(count):
                writer.write({"x": np.arange(8, dtype=np.int32) + number, "label": number % 4, "name": f"n{number}"})
    return root


def test_inspect_tells_what_a_dataset_holds(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(shards / "train"), "--samples", "1"]) == 0
    told = capsys.readouterr().out
    for part in ("samples      64", "compression  zstd", "hashes       sha1, xxh3_64", "ndarray:int32:8", "'n0'"):
        assert part in told
    assert main(["inspect", str(shards), "--json"]) == 0
    about = json.loads(capsys.readouterr().out)
    assert {name: split["samples"] for name, split in about.items()} == {"train": 64, "val": 16}
    assert about["train"]["columns"] == {"label": "int", "name": "str", "x": "ndarray:int32:8"}


def test_inspecting_and_verifying_need_no_torch(shards: Path) -> None:
    code = (
        "import sys; from lightning_stream.cli import main; "
        f"main(['inspect', {str(shards)!r}]); main(['verify', {str(shards)!r}]); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_verify_finds_every_wrong_file(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(shards / "train", copied)
    assert main(["verify", str(copied)]) == 0
    assert "by sha1, xxh3_64: all as the index says" in capsys.readouterr().out
    files = sorted(copied.glob("*.zstd"))
    data = bytearray(files[1].read_bytes())
    data[-1] ^= 1
    files[1].write_bytes(data)
    files[2].write_bytes(files[2].read_bytes()[:-1])
    files[3].unlink()
    assert main(["verify", str(copied)]) == 1
    out, err = capsys.readouterr()
    assert "3 file(s) WRONG" in out
    assert [line.partition(":")[0] for line in err.splitlines()] == ["shard 1", "shard 2", "shard 3"]
    assert main(["verify", str(copied), "--shards", "0:1"]) == 0


def test_simulate_tells_how_an_order_shuffles_and_what_nodes_fetch(
    shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(shards / "train"), "--batch", "16", "--nodes", "2", "--devices", "2"]) == 0
    told = capsys.readouterr().out
    assert "Shuffle quality" in told
    assert "by node in an epoch, 1." in told


def test_explain_tells_where_a_run_is_and_names_the_samples_that_follow(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch", reason="checkpoints need torch: uv sync")
    from lightning_stream import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(remote=str(shards / "train"), local=str(tmp_path / "cache"), shuffle=True)
    loader = StreamingDataLoader(dataset, global_batch_size=8)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    checkpoint = tmp_path / "last.ckpt"
    torch.save({"callbacks": {"lightning_stream": {"position": loader.state_dict()}}}, checkpoint)
    next(batches)
    assert loader.last_batch is not None
    assert main(["explain", str(checkpoint), "--data", str(shards)]) == 0
    told = capsys.readouterr().out
    assert "24 of about 64 samples: global batch 3" in told
    assert "ids " + ", ".join(map(str, loader.last_batch.ids.tolist())) in told
    assert main(["explain", str(checkpoint), "--data", str(shards / "val")]) == 1
    assert "is not the data of this checkpoint" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["inspect", "nowhere"], "a dataset is a folder with an index.json; there is none at"),
        (["verify", "s3//bucket/x"], "Did you mean s3://BUCKET/FOLDER?"),
        (["inspect", "x", "--option", "endpoint"], "--option takes NAME=VALUE; found 'endpoint'"),
        (["inspect", "s3://b", "--option", "secret_access_key=hush"], "a secret must not stand on a command line"),
        (["explain", "none.ckpt"], "there is no checkpoint at"),
        (["explain", "."], "there is no checkpoint at"),
    ],
)
def test_a_user_s_mistake_is_a_sentence_and_exit_code_2(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert sentence in told
    assert "Traceback" not in told
    assert "hush" not in told


def test_what_is_no_command_is_told_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["trian"])
    assert ended.value.code == 2
    assert "explain" in capsys.readouterr().err


def test_train_takes_hydra_s_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning", reason="the recipes need Lightning: uv sync")
    monkeypatch.chdir(tmp_path)
    seen: list[str] = []
    from lightning_stream.cli import train

    monkeypatch.setattr(train, "_train", lambda config: seen.append(config.folder))
    monkeypatch.setattr(sys, "argv", ["lightning-stream", "train", "+data=flowers", "name=mine", "scale=cpu"])
    assert main() == 0
    assert seen == ["runs/mine"]
    assert sys.argv[1] == "train"
