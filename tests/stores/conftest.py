"""Where the conformance suite runs: one place per store, each with a server of its own that starts on first use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from servers import processes
from servers.fake_databricks import TOKEN, FakeDatabricks
from servers.fake_gcs import FakeGcs
from servers.s3 import bucket_at, options_of
from servers.web import HubServer, WebServer

from lightning_stream.stores import transfer

AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # published


@dataclass(frozen=True)
class Place:
    """A URL below which a store may do what it likes, and the options to reach it."""

    kind: str
    url: str
    options: dict[str, Any] = field(default_factory=dict)
    can_list: bool = True
    can_write: bool = True
    server: Any = None


def _local(folder: Path, stack: contextlib.ExitStack) -> Place:
    return Place("local", str(folder / "store"))


def _s3(endpoint: str, kind: str) -> Place:
    bucket_at(endpoint)
    return Place(kind, "s3://bucket/some/folder", options_of(endpoint))


def _moto(folder: Path, stack: contextlib.ExitStack) -> Place:
    return _s3((folder / "endpoint").read_text(), "moto")


def _ceph(folder: Path, stack: contextlib.ExitStack) -> Place:
    return _s3((folder / "endpoint").read_text(), "ceph")


def _gcs(folder: Path, stack: contextlib.ExitStack) -> Place:
    server = stack.enter_context(FakeGcs())
    return Place("gcs", "gs://bucket/some/folder", {"endpoint_url": server.url}, server=server)


def _gcs_hmac(folder: Path, stack: contextlib.ExitStack) -> Place:
    place = _moto(folder, stack)
    options = {name: place.options[name] for name in ("endpoint_url", "access_key_id", "secret_access_key")}
    return Place("gcs-hmac", "gs://bucket/other/folder", options)


def _azure(folder: Path, stack: contextlib.ExitStack) -> Place:
    from azure.storage.blob import ContainerClient

    endpoint = stack.enter_context(processes.azurite(folder))
    credential = {"account_name": "devstoreaccount1", "account_key": AZURITE_KEY}
    with ContainerClient(endpoint, "container", credential) as client:
        client.create_container()
    options = {"account": "devstoreaccount1", "account_key": AZURITE_KEY, "endpoint_url": endpoint}
    return Place("azure", "azure://container/some/folder", options)


def _volumes(folder: Path, stack: contextlib.ExitStack) -> Place:
    server = stack.enter_context(FakeDatabricks())
    return Place("volumes", "dbfs:/Volumes/a/b/c/folder", {"host": server.url, "token": TOKEN}, server=server)


def _http(folder: Path, stack: contextlib.ExitStack) -> Place:
    server = stack.enter_context(WebServer())
    return Place("http", f"{server.url}/some/folder", can_list=False, server=server)


def _http_without_ranges(folder: Path, stack: contextlib.ExitStack) -> Place:
    place = _http(folder, stack)
    place.server.ranges = False
    return place


def _hub(folder: Path, stack: contextlib.ExitStack) -> Place:
    server = stack.enter_context(HubServer())
    patch = stack.enter_context(pytest.MonkeyPatch.context())
    patch.setenv("HF_ENDPOINT", server.url)
    return Place("hf", "hf://datasets/org/name@v1/folder", can_write=False, server=server)


def _sftp(folder: Path, stack: contextlib.ExitStack) -> Place:
    address, key = stack.enter_context(processes.sshd(folder))
    return Place("sftp", f"{address}{folder}/store", {"key_filename": str(key)})


def _memory(folder: Path, stack: contextlib.ExitStack) -> Place:
    return Place("fsspec", "memory://some/folder")


PLACES: dict[str, Callable[[Path, contextlib.ExitStack], Place]] = {
    "local": _local,
    "moto": _moto,
    "ceph": _ceph,
    "gcs": _gcs,
    "gcs-hmac": _gcs_hmac,
    "azure": _azure,
    "volumes": _volumes,
    "http": _http,
    "http-without-ranges": _http_without_ranges,
    "hf": _hub,
    "sftp": _sftp,
    "fsspec": _memory,
}


@pytest.fixture(scope="module", params=list(PLACES))
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param in ("moto", "gcs-hmac", "ceph"):
        server = "ceph_endpoint" if request.param == "ceph" else "moto_endpoint"
        (folder / "endpoint").write_text(request.getfixturevalue(server))
    with contextlib.ExitStack() as stack:
        yield PLACES[request.param](folder, stack)


@pytest.fixture(autouse=True)
def logins_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test has a login of another, which it would share for a minute."""
    monkeypatch.setattr(transfer, "_shared", {})


@pytest.fixture
def moto_place(moto_endpoint: str) -> Place:
    return _s3(moto_endpoint, "moto")
