"""What is asked for wrongly, or is not there, is said before anything is read."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from lightning_stream import LocalDataset, MDSWriter, Stream, StreamingDataLoader, StreamingDataset


def test_an_empty_dataset_has_no_samples_and_says_so_when_it_is_iterated(tmp_path: Path) -> None:
    with MDSWriter(out=tmp_path / "empty", columns={"a": "int"}):
        pass
    dataset = StreamingDataset(local=tmp_path / "empty")
    assert (dataset.size, len(LocalDataset(tmp_path / "empty")), dataset[:]) == (0, 0, [])
    for start in (lambda: iter(StreamingDataLoader(dataset, 2)), lambda: iter(dataset)):
        with pytest.raises(ValueError, match=r"must be samples to iterate over; .*empty has none in 0 shards"):
            next(start())
    with pytest.raises(ValueError, match="at least one sample id"):
        dataset.read_batch([])


@pytest.mark.parametrize("place", ["s3://bucket/set/index.json", "/data/set/index.json", Path("set/index.json")])
@pytest.mark.parametrize("argument", ["remote", "local"])
def test_a_stream_is_named_by_its_folder_not_by_its_index(place: str | Path, argument: str) -> None:
    with pytest.raises(ValueError, match=r"by its folder, not by its index; found .* Pass '.*set'"):
        Stream(**{argument: place})  # type: ignore[arg-type]


def test_pickled_columns_are_refused_with_the_remedy(tmp_path: Path) -> None:
    with MDSWriter(out=tmp_path / "set", columns={"p": "pkl"}) as writer:
        writer.write({"p": {1, 2}})
    for read in (lambda d: d[0], lambda d: d.read_batch([0])):
        with pytest.raises(ValueError, match=r"column 'p' is stored as 'pkl'.*pass allow_unsafe_types=True"):
            read(StreamingDataset(local=tmp_path / "set"))
    assert LocalDataset(tmp_path / "set", allow_unsafe_types=True)[-1] == {"p": {1, 2}}
