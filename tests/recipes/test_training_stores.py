"""store=...: shards are written to a bucket and streamed from it, by config alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the recipes need torch: uv sync")
pytest.importorskip("hydra", reason="configs are put together by Hydra: uv sync")
pytest.importorskip("lightning", reason="the recipes need Lightning: uv sync")
pytest.importorskip("boto3", reason="s3:// needs boto3: uv sync")

import boto3
from hydra import compose, initialize_config_dir
from servers import processes

from lightning_stream.recipes import training

CONFIGS = Path(__file__).resolve().parent.parent.parent / "configs"


def test_flowers_go_to_a_bucket_and_are_learnt_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "TESTKEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "TESTSECRET")
    monkeypatch.delenv("S3_ENDPOINT_URL", raising=False)
    with processes.moto(tmp_path) as endpoint:
        client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
        client.create_bucket(Bucket="flowers")
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            config = compose(
                "train",
                overrides=[
                    "data=flowers",
                    "store=s3",
                    "store.bucket=flowers",
                    f"store.endpoint={endpoint}",
                    "store.region=us-east-1",
                    "data.drawn_count=30",
                    "data.held_out=0.2",
                    "data.image_size=32",
                    "data.num_workers=1",
                    "+model.network_options.width_mult=0.25",
                    "trainer=torch",
                    "trainer.max_epochs=1",
                    "trainer.progress=false",
                    "scale=cpu",
                    f"root={tmp_path}",
                    "name=bucket",
                ],
            )
        training.train(config)
        listed = client.list_objects_v2(Bucket="flowers", Prefix="lightning_stream/flowers/")["Contents"]
    keys = [one["Key"] for one in listed]
    assert sum(key.endswith("/index.json") for key in keys) == 2
    assert not (tmp_path / "shards").exists()
    assert list((tmp_path / "cache").rglob("*.mds"))
    summary = json.loads((tmp_path / "bucket" / "summary.json").read_text())
    assert summary["places"]["shards"].startswith("s3://flowers/lightning_stream/flowers/")
    assert "TESTSECRET" not in (tmp_path / "bucket" / "config.yaml").read_text() + capsys.readouterr().out
