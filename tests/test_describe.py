"""`describe` of a dataset and of a loader: what it shows is what is delivered, on one screen, without credentials."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servers.web import WebServer

torch = pytest.importorskip("torch", reason="batches need torch: uv sync")

from lightning_stream import (  # noqa: E402
    MDSWriter,
    Packing,
    Stream,
    StreamingDataLoader,
    StreamingDataset,
    World,
)
from lightning_stream.order.rows import PackedRows  # noqa: E402
from lightning_stream.questions import describe as chains  # noqa: E402
from lightning_stream.questions.describe import Chain, Stage  # noqa: E402

PACK = Packing(row_length=64, window=50, long_documents="truncate")


def write(folder: Path, count: int, seed: int = 0) -> str:
    rng = np.random.default_rng(seed)
    columns = {"tokens": "ndarray:int32"}
    with MDSWriter(out=str(folder), columns=columns, size_limit=1 << 12, lengths={"tokens": len}) as writer:
        for size in rng.integers(1, 100, count):
            writer.write({"tokens": rng.integers(1, 1000, size).astype(np.int32)})
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("described") / "web", 400)


def keep_most(sample: dict[str, Any]) -> bool:
    return len(sample["tokens"]) % 5 > 0


FILTER = {"sample": keep_most, "lengths": {"tokens": (4, None)}, "exclude_ids": range(20)}


def everything(folder: str, **given: Any) -> StreamingDataset:
    rules = {"filter": FILTER, "forget": [3, 4]}
    return StreamingDataset(folder, shuffle=True, pack=PACK, balance="tokens", cache_limit="64mb", **{**rules, **given})


def names(chain: Chain) -> list[str]:
    return [stage.name for stage in chain]


def without_names(chain: Chain, *left_out: str) -> list[Stage]:
    return [stage for stage in chain if stage.name not in left_out]


def test_the_whole_chain_is_on_one_screen_in_its_order(folder: str) -> None:
    loader = StreamingDataLoader(everything(folder), batch_size=2, accumulate=2, world=World(1, 4, 2))
    chain = loader.describe()
    assert names(chain) == [
        "streams", "filter", "lengths", "draw", "shuffle", "forget", "pack", "batches", "balance", "share", "samples",
    ]  # fmt: skip
    lines = str(chain).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    assert lines[0].split()[:3] == ["streams", "400", "samples,"]
    assert json.loads(json.dumps(chain.to_json()))[0]["counts"]["samples"] == 400


def test_its_counts_are_those_of_what_is_delivered(folder: str) -> None:
    dataset = everything(folder)
    ranks = [StreamingDataLoader(dataset, batch_size=2, accumulate=2, world=World(r, 2, 2)) for r in range(2)]
    chain = ranks[0].describe()
    batches = [(batch, loader.last_batch) for loader in ranks for batch in loader]
    steps = sum(place.completes_step for _, place in batches) // len(ranks)
    rows = sum(place.num_samples for _, place in batches)
    tokens = sum(int(batch["num_tokens"][~place.filler].sum()) for batch, place in batches)
    lengths = dataset.lengths("tokens")
    pack = chain["pack"].counts
    assert (pack["rows"], pack["tokens"], pack["padding tokens"]) == (rows, tokens, rows * 64 - tokens)
    assert pack["long documents"] == int((lengths > 64).sum())
    assert chain["filter"].counts["samples kept"] == dataset.size == chain["draw"].counts["samples per epoch"]
    assert chain["filter"].parts[0].counts == {"samples left": 380}
    assert chain["filter"].parts[-1] == Stage("filter=keep_most", {}, {"samples left": dataset.size})
    assert chain["lengths"].parts[0].counts["sum"] == int(lengths.sum())
    assert chain["forget"].counts == {"samples": 2}
    assert chain["batches"].counts == {"batches": steps, "rows per global batch": 8}
    assert chain["share"].counts == {"rows per step": 4, "rows per micro-batch": len(batches[0][0]["input_ids"])}


def test_its_digests_are_those_of_a_state(folder: str) -> None:
    loader = StreamingDataLoader(everything(folder), batch_size=2)
    chain, state = loader.describe(), loader.state_dict()
    assert chain["filter"].digest == state["snapshot"]["digest"]
    assert chain["streams"].parts[0].digest.startswith(state["snapshot"]["versions"][0])
    assert chain["draw"].digest == state["weights"]
    assert chain["pack"].digest == chain["lengths"].parts[0].digest == state["order"]["packing"]["lengths"]
    assert chain["forget"].digest == state["order"]["forgotten"]


@pytest.mark.parametrize(
    ("changed", "stages"),
    [
        ({"shuffle_seed": 1}, {"shuffle"}),
        ({"filter": {**FILTER, "exclude_ids": [20]}}, {"filter", "lengths", "pack", "shuffle", "forget"}),
        ({"forget": [3]}, {"forget", "shuffle"}),
    ],
)
def test_a_digest_changes_with_what_its_stage_depends_on(
    changed: dict[str, Any], stages: set[str], folder: str
) -> None:
    def digests(**given: Any) -> dict[str, Any]:
        chain = StreamingDataLoader(everything(folder, **given), batch_size=2).describe()
        return {stage.name: stage.digest or [part.digest for part in stage.parts] for stage in chain}

    before, after = digests(), digests(**changed)
    assert {name for name in before if before[name] != after[name]} <= stages
    assert before[min(stages)] != after[min(stages)]


def test_only_the_rank_s_own_stages_differ_between_worlds(folder: str) -> None:
    dataset = StreamingDataset(folder, shuffle=True, pack=PACK)
    one, other = (
        StreamingDataLoader(dataset, global_batch_size=8, world=world).describe() for world in (World(), World(3, 4, 2))
    )
    own = ("batches", "share")
    assert without_names(one, *own) == without_names(other, *own)
    assert one["batches"].counts == other["batches"].counts
    assert (other["share"].settings["rank"], other["share"].counts["rows per step"]) == ("3 of 4", 2)


def test_without_a_batch_size_a_dataset_describes_what_it_knows(folder: str) -> None:
    dataset = StreamingDataset(folder, shuffle=True, window=4)
    chain = dataset.describe()
    assert names(chain) == ["streams", "draw", "shuffle", "batches"]
    assert chain["shuffle"].settings["window"] == 4
    assert "num_canonical_nodes" not in chain["shuffle"].settings
    assert chain["shuffle"].note == "the batch size decides num_canonical_nodes"
    assert "StreamingDataLoader" in chain["batches"].note
    sized = StreamingDataset(folder, shuffle=True, batch_size=8).describe()
    assert sized["batches"].counts == {"batches": 50, "samples per global batch": 8}
    loader = StreamingDataLoader(dataset, batch_size=16)
    next(iter(loader))
    assert dataset.describe() == loader.describe()
    with pytest.raises(KeyError, match="no stage 'pack'; it has streams, draw"):
        chain["pack"]


def test_settings_that_no_batch_size_decides_are_shown_without_one(folder: str) -> None:
    mosaic = StreamingDataset(folder, shuffle=True, shuffle_algo="py1e").describe()["shuffle"]
    assert (mosaic.settings["num_canonical_nodes"], mosaic.note) == (1, "")
    ordered = StreamingDataset(folder).describe()["shuffle"]
    assert ordered.note == "the batch size decides num_canonical_nodes"
    given = StreamingDataset(folder, shuffle=True, num_canonical_nodes=2, window=4, batching_method="per_stream")
    loader = StreamingDataLoader(given, batch_size=4)
    found = given.describe()["shuffle"]
    assert (found.note, found.settings) == ("", loader.describe()["shuffle"].settings)
    assert found.digest is None  # which depends on the batch size here
    packed = StreamingDataset(folder, shuffle=True, pack=PACK).describe(count_rows=True)["pack"]
    assert (packed.counts, packed.note) == ({"documents per epoch": 400}, "the batch size decides the rows")
    blocks = StreamingDataset(folder, shuffle=True, batching_method="device_per_stream").describe()["shuffle"]
    assert blocks.note == "the batch size decides num_canonical_nodes and window and device_block"


def test_many_columns_are_counted(tmp_path: Path) -> None:
    names = [f"column_{number:02}" for number in range(40)]
    with MDSWriter(out=str(tmp_path), columns=dict.fromkeys(names, "int")) as writer:
        writer.write(dict.fromkeys(names, 1))
    chain = StreamingDataset(str(tmp_path), batch_size=1).describe()
    assert "column_07 int, ... 40 in all)" in str(chain)
    assert len(json.loads(json.dumps(chain.to_json()))[-1]["settings"]["columns"]) == 40


def test_a_column_that_streams_encode_differently_is_shown_with_each_encoding(tmp_path: Path) -> None:
    streams = []
    for encoding, value in (("int", 1), ("str", "1")):
        streams.append(str(tmp_path / encoding))
        with MDSWriter(out=streams[-1], columns={"x": encoding, "y": "int"}) as writer:
            writer.write({"x": value, "y": 1})
    samples = StreamingDataset(streams=streams, batch_size=1).describe()["samples"]
    assert samples.settings["columns"] == ("x int", "y int", "x str")


def test_many_documents_are_packed_only_when_that_is_asked_for(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = StreamingDataLoader(StreamingDataset(folder, shuffle=True, pack=PACK), batch_size=2)
    counted = loader.describe()
    assert loader.describe(count_rows=True) == counted
    monkeypatch.setattr(chains, "_WORTH_COUNTING", 100)
    monkeypatch.setattr(PackedRows, "totals", lambda _: pytest.fail("the epoch was planned"))
    chain = loader.describe()
    assert chain["pack"].counts == {"documents per epoch": 400}
    assert "count_rows=True" in chain["pack"].note
    assert "batches" not in chain["batches"].counts


def test_batches_by_length_are_described(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sorted_ = StreamingDataset(folder, shuffle=True, bucket_by={"lengths": "tokens", "window": 64})
    loader = StreamingDataLoader(sorted_, batch_size=4, collate_fn=list)
    chain, state = loader.describe(), loader.state_dict()
    assert chain["buckets"].settings == {"bucket_window": 64}
    assert chain["buckets"].digest == chain["lengths"].parts[0].digest == state["order"]["buckets"]["lengths"]
    assert chain["batches"].counts == {"batches": len(list(loader)), "samples per global batch": 4}
    dataset = StreamingDataset(folder, shuffle=True, batch_tokens=800)
    assert names(dataset.describe())[-3:] == ["batches", "share", "samples"]
    loader = StreamingDataLoader(dataset, collate_fn=list)
    chain = loader.describe()
    assert chain["buckets"].settings["batch_tokens"] == 800
    assert chain["batches"].counts == {"batches": len(list(loader)), "tokens per global batch at most": 800}
    monkeypatch.setattr(chains, "_WORTH_COUNTING", 100)
    assert "batches" not in loader.describe()["batches"].counts


def test_a_mixture_shows_its_streams_and_its_schedule(folder: str, tmp_path: Path) -> None:
    streams = [Stream(write(tmp_path / f"s{k}", 8, seed=k), repeat=2 if k else None) for k in range(10)]
    chain = StreamingDataLoader(StreamingDataset(streams=streams), batch_size=4).describe()
    assert [part.counts["drawn per epoch"] for part in chain["streams"].parts] == [8] + [16] * 9
    assert chain["streams"].parts[1].settings == {"repeat": 2}
    assert "... and 2 more" in str(chain)
    code = write(tmp_path / "code", 100)
    points = [(0, {"web": 0.7, "code": 0.3}), (20_000, {"web": 1})]
    loader = StreamingDataLoader(
        StreamingDataset(streams=[Stream(folder), Stream(code)], schedule=points), batch_size=4
    )
    before = loader.describe()
    loader.change_mixture({"code": 1.0}, skip={"web": 8})
    chain = loader.describe()
    assert "from 20,000: web=1\n" in str(chain).replace(" \n", "\n").replace("  ", "")
    assert "changed at sample 0: 8 web skipped; code=1.0" in str(chain)
    assert chain["schedule"].counts == {"points": 2, "changes": 1}
    assert before["shuffle"].digest != chain["shuffle"].digest


def test_a_subset_and_the_orders_of_mosaicml_streaming_are_described(folder: str) -> None:
    chain = StreamingDataLoader(StreamingDataset(folder).subset(range(50)), batch_size=4).describe()
    assert chain["subset"].counts == {"samples kept": 50, "kept_percent": 12.5}
    assert "50 samples kept (12.50 %)" in str(chain)
    dataset = StreamingDataset(folder, shuffle=True, shuffle_algo="py1e", shuffle_block_size=64)
    settings = StreamingDataLoader(dataset, batch_size=4).describe()["shuffle"].settings
    assert (settings["shuffle_algo"], settings["partition_algo"], settings["shuffle_block_size"]) == (
        "py1e", "relaxed", 64
    )  # fmt: skip


def test_it_shows_no_credentials(folder: str, tmp_path: Path) -> None:
    with WebServer() as server:
        for file in Path(folder).rglob("*"):
            if file.is_file():
                server.objects[f"/web/{file.relative_to(folder)}"] = file.read_bytes()
        server.authorization = f"Basic {base64.b64encode(b'user:HUSH').decode()}"
        url = f"http://user:HUSH@127.0.0.1:{server.port}/web"
        chain = StreamingDataset(url, local=str(tmp_path), batch_size=4).describe()
    assert "HUSH" not in str(chain) + json.dumps(chain.to_json()) + repr(chain)
    assert chain["streams"].parts[0].name == f"http://127.0.0.1:{server.port}/web"


def test_a_notebook_shows_settings_and_chain_or_why_there_is_none(folder: str, tmp_path: Path) -> None:
    dataset = StreamingDataset(folder, shuffle=True)
    shown = dataset._repr_html_()
    assert re.match("<pre style=[^>]*>StreamingDataset[(]", shown)
    assert "400 samples" in shown
    assert "batch_size=16" in StreamingDataLoader(dataset, batch_size=16)._repr_html_()
    missing = StreamingDataset(str(tmp_path / "<nothing>"))._repr_html_()
    assert "no such file" in missing.lower()
    assert "<nothing>" not in missing
    for wrong in ("none://bucket/x", "s3://user:HUSH@bucket/x"):
        shown = repr(StreamingDataset(wrong)) + StreamingDataset(wrong)._repr_html_()
        assert wrong.partition("bucket")[1] in shown
        assert "HUSH" not in shown
    many = StreamingDataset(streams=[Stream(folder)] * 100)
    assert len(repr(many)) < 6 * len(folder) + 200
    assert "... 100 streams" in repr(many)
