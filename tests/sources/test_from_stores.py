"""Datasets in other formats in a store: little is read before the samples are numbered, and changes are noticed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed: uv sync --extra convert")
boto3 = pytest.importorskip("boto3", reason="boto3 is not installed: uv sync --extra s3")
import pyarrow.parquet as pq  # noqa: E402

TESTS = str(Path(__file__).resolve().parent.parent)
if TESTS not in sys.path:
    sys.path.insert(0, TESTS)

from servers import processes  # noqa: E402
from servers.web import HubServer  # noqa: E402

from lightning_stream import Stream, StreamingDataset  # noqa: E402
from lightning_stream.errors import FormatError, NotFoundError  # noqa: E402
from lightning_stream.stores import Store, open_store  # noqa: E402
from lightning_stream.stores.retry import RetryingStore  # noqa: E402

KEY, SECRET = "TESTKEY", "TESTSECRET"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_STREAM_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with processes.moto(tmp_path_factory.mktemp("moto")) as url:
        client = boto3.client(
            "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id=KEY, aws_secret_access_key=SECRET
        )
        client.create_bucket(Bucket="formats")
        yield url
