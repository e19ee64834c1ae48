"""What release 9621097 wrote is read as it did, and written with the same bytes: indexes, lengths, logs of versions."""

from __future__ import annotations

import json
from pathlib import Path
from zipfile import ZipFile

import pytest

pytest.importorskip("torch", reason="StreamingDataset needs torch: uv sync")

from support.released import DATASETS, files_of, read, write

from lightning_stream.formats.index import Index

ARCHIVES = ("golden_9621097", "golden_e46f85b2")
NEWER = ("changed", "compacted", "unpublished")
ALL = [(ARCHIVES[0], name) for name in DATASETS] + [(ARCHIVES[1], name) for name in NEWER]


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("released")
    for name in ARCHIVES:
        with ZipFile(Path(__file__).with_name(f"{name}.zip")) as archive:
            archive.extractall(folder / name)
    return folder


@pytest.mark.parametrize(("archive", "name"), ALL)
def test_a_released_dataset_has_the_same_versions_samples_and_lengths(released: Path, archive: str, name: str) -> None:
    wanted = json.loads((released / archive / f"{name}.json").read_bytes())
    assert json.loads(json.dumps(read(released / archive / name))) == wanted


@pytest.mark.parametrize(
    ("archive", "name"), [(archive, name) for archive, name in ALL if (archive == ARCHIVES[1]) == (name in NEWER)]
)
def test_the_same_calls_write_the_same_files(released: Path, tmp_path: Path, archive: str, name: str) -> None:
    write(name, tmp_path / name)
    written, wanted = files_of(tmp_path / name), files_of(released / archive / name)
    if name == "compressed":  # the bytes of a codec differ between its releases
        indexes = [Index.from_bytes(files["index.json"], "") for files in (written, wanted)]
        entries = [[(one.schema, one.num_samples, one.raw) for one in map(index.entry, range(3))] for index in indexes]
        assert entries[0] == entries[1]
    else:
        assert written == wanted
