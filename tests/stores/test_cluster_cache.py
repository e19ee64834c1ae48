"""An nginx between the nodes and the store, with the settings that docs/multi_node.md has: one copy for a cluster."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import processes, s3
from servers.web import WebServer

pytest.importorskip("torch")

from lightning_stream import MDSWriter, StreamingDataLoader, StreamingDataset
from lightning_stream.errors import AlreadyExistsError
from lightning_stream.order import World
from lightning_stream.stores import open_store

PAGE = Path(__file__).parent.parent.parent / "docs" / "multi_node.md"
SAMPLES, BATCH = 768, 48


def settings_of(store: str) -> str:
    """The block of the page, with this store, port and folder."""
    found = re.search(r"```nginx[^\n]*\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    block = found[1].replace("http://store.example:9000", store).replace("listen 8080;", "listen 127.0.0.1:{port};")
    assert store in block
    return block.replace("/var/cache/nginx/shards", "{folder}/shards").replace("max_size=2t", "max_size=1g")


@pytest.fixture
def store() -> Iterator[WebServer]:
    with WebServer() as server:
        yield server


@pytest.fixture
def proxy(store: WebServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with processes.nginx(tmp_path_factory.mktemp("nginx"), settings_of(store.url)) as url:
        yield url


def test_four_nodes_three_epochs_and_three_worlds_take_one_copy_from_the_store(
    store: WebServer, proxy: str, tmp_path: Path
) -> None:
    with MDSWriter(out=str(tmp_path / "data"), columns={"number": "int64"}, size_limit=300) as writer:
        for number in range(SAMPLES):
            writer.write({"number": number})
    for path in (tmp_path / "data").iterdir():
        store.objects[f"/data/{path.name}"] = path.read_bytes()
    state = None
    for epoch, num_nodes in enumerate((4, 3, 4)):
        loaders = []
        for node in range(num_nodes):
            local = tmp_path / f"disk{epoch}.{node}"  # the worst case: every world has new disks
            dataset = StreamingDataset(remote=f"{proxy}/data", local=local, shuffle=True)
            loader = StreamingDataLoader(dataset, global_batch_size=BATCH, world=World(node, num_nodes, 1))
            if state is not None:
                loader.load_state_dict(state)
            loaders.append(loader)
        seen = Counter(
            number for parts in zip(*loaders, strict=True) for part in parts for number in part["number"].tolist()
        )
        assert seen == Counter(range(SAMPLES))
        state = loaders[0].state_dict()
    shards = [path for method, path in store.asked if method == "GET" and path.endswith(".mds")]
    assert len(shards) == len({*shards}) == sum(path.endswith(".mds") for path in store.objects)
    assert store.count("GET", "index.json") >= 3  # it may change, so it is always asked for


def test_ranges_are_kept_apart_and_conditional_puts_pass_through(store: WebServer, proxy: str, tmp_path: Path) -> None:
    store.objects["/data/a.mds"] = bytes(range(256)) * 8
    through = open_store(f"{proxy}/data")
    for _ in range(2):
        assert through.read("a.mds", 100, 160) == store.objects["/data/a.mds"][100:160]
        assert through.read("a.mds", 500, 560) == store.objects["/data/a.mds"][500:560]
    assert store.count("GET", "a.mds") == 2
    through.put("new.json", b"one", if_absent=True)
    with pytest.raises(AlreadyExistsError):
        through.put("new.json", b"two", if_absent=True)
    assert store.objects["/data/new.json"] == b"one"


def test_an_s3_server_accepts_what_the_proxy_passes_on(s3_endpoint: str, tmp_path: Path) -> None:
    s3.bucket_at(s3_endpoint, "cluster-cache")
    with processes.nginx(tmp_path, settings_of(s3_endpoint)) as url:
        through = open_store("s3://cluster-cache/data", s3.options_of(url))
        through.put("a.mds", bytes(range(256)), if_absent=True)
        with pytest.raises(AlreadyExistsError):
            through.put("a.mds", b"", if_absent=True)
        for _ in range(2):
            assert through.read("a.mds", 100, 160) == bytes(range(100, 160))
            assert through.read("a.mds") == bytes(range(256))
        assert [entry.name for entry in through.list()] == ["a.mds"]
