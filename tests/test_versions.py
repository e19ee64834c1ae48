"""A dataset's versions: a run continues with the one that it began with, after others were appended."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.data import write_ids

from lightning_stream import Stream, StreamingDataLoader, StreamingDataset, versions
from lightning_stream.errors import AccessError, FormatError, NotFoundError, SnapshotMismatch
from lightning_stream.formats.index import Index, version_name
from lightning_stream.stores import LocalStore


def write(out: Path, first: int, count: int = 60, **how: Any) -> str:
    """Write ids from `first`; give the digest of the index."""
    write_ids(out, np.arange(first, first + count), size_limit=300, **how)
    return Index.from_file(out / "index.json").digest


def loader(remote: Path, **how: Any) -> StreamingDataLoader:
    return StreamingDataLoader(StreamingDataset(remote=remote, shuffle=True, **how), 5)


def ids(batches: Any) -> list[int]:
    return [one for batch in batches for one in batch["id"].tolist()]


@pytest.mark.parametrize("cached", [False, True])
def test_a_run_resumed_after_an_append_goes_on_exactly_with_the_version_that_the_error_names(
    tmp_path: Path, cached: bool
) -> None:
    place: dict[str, Any] = {"remote": tmp_path / "set", **({"local": tmp_path / "cache"} if cached else {})}
    write(tmp_path / "set", 0)
    whole = ids(loader(**place))
    first = loader(**place)
    batches = iter(first)
    seen = ids(next(batches) for _ in range(4))
    state = first.state_dict()
    write(tmp_path / "set", 60, append=True)
    write(tmp_path / "set", 120, append=True)
    with pytest.raises(SnapshotMismatch) as refused:
        loader(**place).load_state_dict(state)
    found = re.search(r"version='([0-9a-f]{16})'", str(refused.value))
    assert found is not None
    later = loader(**place, version=found[1])
    later.load_state_dict(state)
    assert seen + ids(later) == whole
    assert sorted(ids(loader(**place))) == list(range(180))
    if cached:  # the pinned index is cached under its own name
        assert Index.from_file(tmp_path / "cache" / "index.json").num_samples == 180
        assert Index.from_file(tmp_path / "cache" / version_name(found[1])).num_samples == 60


def test_a_version_is_named_by_digits_or_by_its_file_and_may_be_the_newest(tmp_path: Path) -> None:
    digests = [write(tmp_path / "set", 60 * k, append=k > 0) for k in range(3)]
    for k, digest in enumerate(digests):
        for version in (digest, digest[:16], digest[:6], version_name(digest)):
            dataset = StreamingDataset(streams=[Stream(tmp_path / "set", version=version)])
            assert [sample["id"] for sample in dataset[:]] == list(range(60 * (k + 1)))


@pytest.mark.parametrize("version", ["", "1", "a"])
def test_a_change_takes_no_fewer_digits_of_a_version_than_a_stream(tmp_path: Path, version: str) -> None:
    for k in range(2):
        write(tmp_path / "set", 60 * k, append=k > 0)
    with pytest.raises(ValueError, match="6 or more"):
        versions.delete_rows(tmp_path / "set", [0], version=version)
    with pytest.raises(ValueError, match="6 or more"):
        versions.add_column(tmp_path / "set", "x", "int", range(120), version=version)


def test_a_version_after_a_change_that_is_absent_is_not_said_to_be_none(tmp_path: Path) -> None:
    for k in range(5):
        write(tmp_path / "set", 60 * k, append=k > 0)
    (change,) = (tmp_path / "set").glob("versions/*/00000002.json")
    change.unlink()
    with pytest.raises(FormatError, match="00000002"):
        len(StreamingDataset(streams=[Stream(tmp_path / "set", version=3)]))


def test_a_version_is_named_by_its_number_where_nothing_can_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for k in range(2):
        write(tmp_path / "set", 60 * k, append=k > 0)

    def refused(store: LocalStore, prefix: str = "") -> Any:
        raise AccessError(f"403: {store.url}/{prefix} may not be listed")

    monkeypatch.setattr(LocalStore, "list", refused)
    for k in range(2):
        assert len(StreamingDataset(remote=tmp_path / "set", version=k, batch_size=1)) == 60 * (k + 1)


def test_a_version_that_is_not_there_or_no_digest_is_refused_and_says_which_there_are(tmp_path: Path) -> None:
    digests = [write(tmp_path / "set", 60 * k, append=k > 0) for k in range(2)]
    missing = "0" * 16
    with pytest.raises(NotFoundError, match=f"{digests[1][:16]}, {digests[0][:16]}, from the newest"):
        len(StreamingDataset(remote=tmp_path / "set", version=missing))
    for wrong in ("abc", "index.json", "newest"):
        with pytest.raises(ValueError, match="hex digits of an index's digest"):
            Stream(tmp_path / "set", version=wrong)
    with pytest.raises(ValueError, match="not both"):
        StreamingDataset(streams=[Stream(tmp_path / "set")], version=digests[0])


def test_a_mix_names_the_streams_that_changed(tmp_path: Path) -> None:
    before = [write(tmp_path / name, 60 * k) for k, name in enumerate("ab")]

    def mix(*versions: str | None) -> StreamingDataLoader:
        streams = [Stream(tmp_path / name, version=one) for name, one in zip("ab", versions, strict=True)]
        return StreamingDataLoader(StreamingDataset(streams=streams), 5)

    state = mix(None, None).state_dict()
    write(tmp_path / "b", 120, append=True)
    with pytest.raises(SnapshotMismatch, match=f"version='{before[1][:16]}' for .*/b ") as refused:
        mix(None, None).load_state_dict(state)
    assert before[0][:16] not in str(refused.value)
    mix(None, before[1]).load_state_dict(state)


def test_a_pinned_run_needs_no_store_once_all_is_in_its_cache(tmp_path: Path) -> None:
    digest = write(tmp_path / "set", 0)
    write(tmp_path / "set", 60, append=True)
    place: dict[str, Any] = {"remote": tmp_path / "set", "local": tmp_path / "cache", "version": digest}
    assert len(StreamingDataset(**place)[:]) == 60
    (tmp_path / "set").rename(tmp_path / "away")
    assert [sample["id"] for sample in StreamingDataset(**place)[:]] == list(range(60))


def test_a_pinned_version_of_another_dataset_is_refused_by_a_cache_folder(tmp_path: Path) -> None:
    write(tmp_path / "a", 0)
    digest = write(tmp_path / "b", 60)
    write(tmp_path / "b", 120, append=True)
    assert len(StreamingDataset(remote=tmp_path / "a", local=tmp_path / "cache")[:]) == 60
    with pytest.raises(Exception, match="holds one dataset"):
        len(StreamingDataset(remote=tmp_path / "b", local=tmp_path / "cache", version=digest))
    assert StreamingDataset(remote=tmp_path / "a", local=tmp_path / "cache")[0]["id"] == 0


def test_a_state_from_before_versions_were_kept_still_loads(tmp_path: Path) -> None:
    write(tmp_path / "set", 0)
    state = loader(tmp_path / "set").state_dict()
    assert len(state["snapshot"].pop("versions")) == 1
    del state["checksum"]
    loader(tmp_path / "set").load_state_dict(state)
    write(tmp_path / "set", 60, append=True)
    with pytest.raises(SnapshotMismatch, match="Read the former data"):
        loader(tmp_path / "set").load_state_dict(state)


@pytest.mark.parametrize("answer", ["refused", "page"])
def test_the_newest_version_is_read_where_a_store_does_not_say_plainly_that_a_file_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    digest = write(tmp_path / "data", 0)
    get = LocalStore.get

    def other(self: LocalStore, name: str, to: Any, *rest: Any) -> int:
        if name != version_name(digest):
            return get(self, name, to, *rest)
        if answer == "refused":
            raise AccessError("403: this bucket may not be listed")
        return to.write_bytes(b"<html>no such page")

    monkeypatch.setattr(LocalStore, "get", other)
    for version in (digest, digest[:16], digest[:8]):
        stream = Stream(str(tmp_path / "data"), local=str(tmp_path / "cache"), version=version)
        assert len(StreamingDataset(streams=[stream], batch_size=1)) == 60


def test_a_stream_that_is_named_by_its_index_is_refused_without_showing_a_secret() -> None:
    with pytest.raises(ValueError, match="takes a folder, not its index") as caught:
        Stream("https://me:S3CRET@host/data/index.json")
    assert "S3CRET" not in str(caught.value)
