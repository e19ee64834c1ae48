"""A client is made quickly: nothing is collected meanwhile, and the services' descriptions are read once."""

from __future__ import annotations

import gc
import json

import pytest

from lightning_stream.stores import open_store
from lightning_stream.stores.retry import RetryingStore
from lightning_stream.stores.s3 import S3Store, _make_loader
from lightning_stream.stores.transfer import PerProcess


def test_nothing_is_collected_while_a_client_is_made_and_all_is_as_before_afterwards() -> None:
    def make() -> bool:
        return gc.isenabled()

    def fail() -> None:
        raise OSError("no client")

    assert gc.isenabled()
    assert PerProcess(make)() is False
    assert gc.isenabled()
    with pytest.raises(OSError, match="no client"):
        PerProcess(fail)()
    assert gc.isenabled()
    gc.disable()
    try:
        PerProcess(make)()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_making_an_s3_client_collects_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    store = open_store("s3://bucket/data", {"region": "us-east-1"})
    assert isinstance(store, RetryingStore)
    assert isinstance(store.store, S3Store)
    seen: list[int] = []

    def collected(phase: str, details: dict[str, int]) -> None:
        seen.append(details["generation"])

    gc.collect()
    gc.callbacks.append(collected)
    try:
        client = store.store._signed().client
    finally:
        gc.callbacks.remove(collected)
    assert client.meta.service_model.service_name == "s3"
    assert 2 not in seen


def test_services_are_described_as_by_the_loader_of_botocore() -> None:
    loaders = pytest.importorskip("botocore.loaders", reason="needs botocore: pip install lightning-stream[s3]")
    usual = loaders.Loader()
    ours = _make_loader(list(usual.search_paths))
    services = usual.list_available_services("service-2")
    assert {"s3", "sts", "sso", "sso-oidc"} <= set(services) <= set(ours.list_available_services("service-2"))
    for service in ("s3", "sts", "sso-oidc"):
        for kind in ("service-2", "endpoint-rule-set-1", "paginators-1"):
            found, expected = (one.load_service_model(service, kind) for one in (ours, usual))
            assert json.dumps(found) == json.dumps(expected)  # the order of the keys included
    for name in ("endpoints", "partitions", "sdk-default-configuration"):
        assert json.dumps(ours.load_data(name)) == json.dumps(usual.load_data(name))
    with pytest.raises(loaders.UnknownServiceError):
        ours.load_service_model("no-such-service", "service-2")
