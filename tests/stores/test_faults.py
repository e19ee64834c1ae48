"""Every remote store behind a network that errs: the same faults, the same promise, whatever client is below."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from servers.fault_proxy import FaultProxy, Plan

from lightning_stream.errors import UnavailableError
from lightning_stream.stores import Store, open_store

CONTENT = bytes(range(256)) * 3000
QUICK = {"first_pause_s": 0.001, "longest_pause_s": 0.01, "timeout_s": 20.0, "retries": 3}
PATIENT = {**QUICK, "timeout_s": 0.5, "retries": 40}  # a busy machine may pause for as long, too
BY_HTTP = {"moto", "ceph", "gcs", "azure", "volumes", "http", "hf"}


def behind(place: Any, proxy_of: Any, policy: dict[str, Any]) -> tuple[Store, Any]:
    """The place's store, reached through a proxy."""
    options = {**place.options}
    for name in ("endpoint_url", "host"):
        if name in options:
            parts = urlsplit(options[name])
            proxy = proxy_of(f"{parts.scheme}://{parts.netloc}")
            return open_store(place.url, {**options, name: proxy.url + parts.path, **policy}), proxy
    proxy = proxy_of(place.server.url)
    return open_store(place.url.replace(place.server.url, proxy.url), {**options, **policy}), proxy


@pytest.fixture
def proxied(place: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives the store with a policy, and its proxy."""
    if place.kind not in BY_HTTP:
        pytest.skip(f"{place.kind} is not reached by HTTP, or stands for a store that is tested here already")
    if place.can_write:
        open_store(place.url, place.options).put("shard", CONTENT)
    else:
        place.server.objects["/datasets/org/name/resolve/v1/folder/shard"] = CONTENT
    proxies: list[FaultProxy] = []

    def proxy_of(url: str) -> FaultProxy:
        proxies.append(FaultProxy(url).__enter__())
        return proxies[-1]

    def reached(policy: dict[str, Any]) -> tuple[Store, Any]:
        if place.kind != "hf":
            return behind(place, proxy_of, policy)
        proxy = proxy_of(place.server.url)
        monkeypatch.setenv("HF_ENDPOINT", proxy.url)
        return open_store(place.url, policy), proxy

    yield reached
    for proxy in proxies:
        proxy.__exit__()


@pytest.mark.parametrize("fault", ["error", "reset", "truncate", "stall"])
def test_faults_are_overcome_to_the_byte(proxied: Any, tmp_path: Path, fault: str) -> None:
    store, proxy = proxied(PATIENT)
    proxy.plan = Plan(probability={fault: 1.0}, left=1 if fault == "stall" else 2)
    assert store.get("shard", tmp_path / "x") == len(CONTENT)
    assert (tmp_path / "x").read_bytes() == CONTENT
    assert proxy.counts[fault] >= 1
    assert store.read("shard", 1000, 5000) == CONTENT[1000:5000]


def test_trouble_without_end_is_unavailable_in_bounded_time(place: Any, proxied: Any) -> None:
    store, proxy = proxied(QUICK)
    proxy.plan = Plan(probability={"error": 1.0}, only="")
    with pytest.raises(UnavailableError, match="gave up after 4 failures in a row"):
        store.read("shard")
    assert proxy.counts["error"] <= 12
