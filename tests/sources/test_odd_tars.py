"""Tars as different programs write them: what is read by whole pieces is what `tarfile` reads file by file."""

from __future__ import annotations

import gzip
import io
import random
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest

from lightning_stream import StreamingDataset
from lightning_stream.convert import convert
from lightning_stream.errors import FormatError
from lightning_stream.sources import webdataset
from lightning_stream.sources.webdataset import walk

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_STREAM_CACHE", str(tmp_path / "cache"))


def member(name: str, size: int = 0, **about: Any) -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.size = size
    for key, value in about.items():
        setattr(found, key, value)
    return found


def add(out: tarfile.TarFile, name: str, data: bytes = b"", **about: Any) -> None:
    out.addfile(member(name, len(data), **about), io.BytesIO(data))


def samples(folder: Path, **options: Any) -> list[dict[str, Any]]:
    dataset = StreamingDataset(remote=str(folder), **options)
    return [dataset[k] for k in range(dataset.size)]


def by_tarfile(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with tarfile.open(path) as archive:
        for each in archive:
            name = PurePosixPath(each.name)
            stem, dot, ending = name.name.partition(".")
            if each.isreg() and dot and stem and not stem.startswith("__"):
                key, data = str(name.with_name(stem)), archive.extractfile(each)
                if not found or found[-1]["__key__"] != key:
                    found.append({"__key__": key})
                assert data is not None
                found[-1][ending.lower()] = data.read()
    return found


def as_bytes(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value.encode() if key == "txt" else value for key, value in one.items()} for one in found]


def random_names(seed: int) -> list[str]:
    pick, names = random.Random(seed), []
    for number in range(300):
        folder = pick.choice(["", "", "a/", "a.b/c/", "./", "long" * 40 + "/", "é/"])
        stem = f"{number:05}" if pick.random() < 0.9 else pick.choice(["__meta", ".hidden", "é", "n" * 120])
        names += [f"{folder}{stem}{number if stem[0] in 'én' else ''}.{ending}" for ending in ("txt", "bin")]
    return names


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("form", FORMATS)
def test_pieces_hold_what_tarfile_reads(form: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webdataset, "_PIECE_BYTES", 40_000)
    pick, path = random.Random(seed), tmp_path / "data" / "a.tar"
    path.parent.mkdir()
    sizes = [0, 1, 511, 512, 513, 4000] if seed % 2 else [700]  # equal sizes are read by their repetition
    with tarfile.open(path, "w", format=FORMATS[form]) as out:
        for name in random_names(seed):
            mtime: Any = 1_700_000_000.25 if seed > 1 else 17  # a fraction is a pax record
            try:
                add(out, name, bytes(pick.choices(b"abc", k=pick.choice(sizes))), mtime=mtime, uname="user")
            except ValueError:
                assert form == "ustar", "only ustar has no place for a long name"
            if pick.random() < 0.05:
                add(out, f"folder{pick.random()}", type=tarfile.DIRTYPE, mtime=3)
    wanted = by_tarfile(path)
    assert len(wanted) > 200
    assert as_bytes(samples(path.parent)) == wanted
    monkeypatch.setattr(webdataset, "_PART_BYTES", 30_000)
    for packed in (path, tmp_path / "b.tar.gz"):
        if packed != path:
            packed.write_bytes(gzip.compress(path.read_bytes(), 1))
        done = convert(packed, tmp_path / f"out {packed.name}", size_limit=50_000, num_workers=1, progress_bar=False)
        assert as_bytes([*StreamingDataset(local=done.uri)]) == wanted


def raw_header(name: bytes, size: bytes, kind: bytes = b"0", magic: bytes = b"ustar\00000") -> bytes:
    head = bytearray(512)
    head[: len(name)], head[124 : 124 + len(size)], head[156:157], head[257 : 257 + len(magic)] = (
        name,
        size,
        kind,
        magic,
    )
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head)


def test_old_tars_without_a_magic_are_read(tmp_path: Path) -> None:
    files = b""
    for number in range(100):
        text = b"text %d" % number
        files += raw_header(b"folder/", b"00000000000\0", b"\0", b"")
        files += raw_header(b"folder/%03d.txt" % number, b"%11o " % len(text), b"\0", b"") + text.ljust(512, b"\0")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.tar").write_bytes(files + bytes(1024))
    assert [sample["txt"] for sample in samples(tmp_path / "data")] == [f"text {number}" for number in range(100)]


def test_a_size_in_base_256_is_read() -> None:
    size = (8 << 30) + 5
    head = raw_header(b"a.bin", b"\x80" + size.to_bytes(11, "big"))
    found = walk(memoryview(head), "a.tar", is_whole=False, checked=True)
    assert (found.sizes.tolist(), found.next, found.is_end) == ([size], 512 + (8 << 30) + 512, False)
    with pytest.raises(FormatError, match=r"a.tar must be a whole tar; found .* behind the end, at byte 512"):
        walk(memoryview(head), "a.tar", is_whole=True, checked=True)


def test_a_pax_record_of_a_size_is_read() -> None:
    out = io.BytesIO()
    size = (8 << 30) + 5
    data = member("é" * 80 + ".bin", size).tobuf(tarfile.PAX_FORMAT)
    out.write(data)
    found = walk(memoryview(out.getvalue()), "a.tar", is_whole=False, checked=True)
    assert found.sizes.tolist() == [size]
    assert found.odd == {0: "é" * 80 + ".bin"}


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"type": tarfile.LNKTYPE, "linkname": "00000.txt"}, r"'x.txt' is a link to '00000.txt'.*--hard-dereference"),
        ({"type": tarfile.SYMTYPE, "linkname": "other"}, r"'x.txt' is a link to 'other'.*--dereference"),
        (
            {"pax_headers": {"GNU.sparse.size": "9", "GNU.sparse.map": "0,1"}},
            r"'x.txt' is a sparse file.*without --sparse",
        ),
    ],
)
@pytest.mark.parametrize("count", [1, 200])
def test_files_without_bytes_of_their_own_are_refused(
    about: dict[str, Any], message: str, count: int, tmp_path: Path
) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as out:
        for number in range(count):
            add(out, f"{number:05}.txt", b"text")
        add(out, "x.txt", **about)
    with pytest.raises(FormatError, match=rf"a.tar: {message}"):
        samples(tmp_path)


def test_links_and_folders_that_are_no_samples_are_skipped(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as out:
        add(out, "folder.d", type=tarfile.DIRTYPE)
        add(out, "latest", type=tarfile.SYMTYPE, linkname="folder.d")
        add(out, "fifo.x", type=tarfile.FIFOTYPE)
        add(out, "README", b"no ending")
        add(out, "folder.d/1.TXT", b"one")
    assert samples(tmp_path) == [{"__key__": "folder.d/1", "txt": "one"}]


def damaged(data: bytes, change: str) -> bytes:
    if change == "no end mark":
        return data[: 200 * 1024]
    if change == "cut in a file":
        return data[: 100 * 1024 + 700]
    if change == "cut between files":
        return data[: 100 * 1024]
    if change == "a header":
        return data[: 51 * 1024 + 3] + b"?" + data[51 * 1024 + 4 :]
    if change == "a size":
        return data[: 51 * 1024 + 124] + b"00000002000" + data[51 * 1024 + 135 :]
    return data + raw_header(b"b.txt", b"00000000001\0") + b"b".ljust(512, b"\0") + bytes(1024)


@pytest.mark.parametrize(
    "change", ["no end mark", "cut in a file", "cut between files", "a header", "a size", "a second tar behind it"]
)
def test_a_damaged_tar_is_an_error_and_loses_nothing(change: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with tarfile.open(tmp_path / "data" / "a.tar", "w") as out:
        for number in range(200):  # of 1,024 bytes each
            add(out, f"{number:05}.txt", b"text")
    path = tmp_path / "data" / "a.tar"
    path.write_bytes(damaged(path.read_bytes(), change))
    with pytest.raises(FormatError, match=r"a.tar"):
        samples(tmp_path / "data")


def test_tars_that_were_joined_are_refused_where_they_are_compressed_too(tmp_path: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        add(archive, "0.txt", b"text")
    path = tmp_path / "a.tar.gz"
    for data in (gzip.compress(2 * out.getvalue()), 2 * gzip.compress(out.getvalue())):
        path.write_bytes(data)
        with pytest.raises(FormatError, match=r"a.tar.gz holds bytes behind the end mark"):
            convert(path, tmp_path / "out", num_workers=1, progress_bar=False)


def test_two_files_of_one_ending_are_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as out:
        for name in ("0.txt", "0.cls", "0.TXT"):
            add(out, name, b"1")
    with pytest.raises(FormatError, match=r"sample '0' has two files 'txt'"):
        samples(tmp_path)


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def test_arrays_of_one_and_of_several_shapes_are_those_that_were_stored(tmp_path: Path) -> None:
    for name, arrays in {
        "equal": [np.arange(k, k + 6, dtype=np.int32).reshape(2, 3) for k in range(100)],
        "ragged": [np.arange(k % 7, dtype=np.int32) for k in range(100)],
        "fortran": [np.asfortranarray(np.arange(k, k + 6, dtype=np.int32).reshape(2, 3)) for k in range(100)],
        "big_endian": [np.arange(k, k + 6, dtype=">i4") for k in range(100)],
    }.items():
        (tmp_path / name).mkdir()
        with tarfile.open(tmp_path / name / "a.tar", "w") as out:
            for k, array in enumerate(arrays):
                add(out, f"{k:05}.npy", npy(array))
        found = samples(tmp_path / name)
        assert all(np.array_equal(one["npy"], array) for one, array in zip(found, arrays, strict=True)), name


def test_a_wrong_value_is_named_with_its_sample(tmp_path: Path) -> None:
    for name, ending, good, bad in (
        ("n", "cls", b"1", b"one"),
        ("t", "txt", b"text", b"\xff\xfe"),
        ("j", "json", b"1", b"{"),
    ):
        (tmp_path / name).mkdir()
        with tarfile.open(tmp_path / name / "a.tar", "w") as out:
            for k in range(150):
                add(out, f"{k:05}.{ending}", bad if k == 140 else good)
        with pytest.raises(FormatError, match=r"a.tar: sample '00140'"):
            samples(tmp_path / name)


def test_a_sample_that_lacks_a_file_is_an_error_unless_its_column_may_have_nulls(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as out:
        for k in range(5):
            add(out, f"{k}.cls", b"7")
            if k != 3:
                add(out, f"{k}.json", b'{"a": 1}')
    assert [sample["json"] for sample in samples(tmp_path)] == [{"a": 1}] * 3 + [None, {"a": 1}]
    with pytest.raises(FormatError, match=r"nulls; found json: 1"):
        samples(tmp_path, columns={"json": "bytes"})


def equal_sizes(seed: int) -> bytes:
    """A tar whose members repeat in size, as samples of tokens or of classes do."""
    pick, out = random.Random(seed), io.BytesIO()
    sizes = [pick.choice([0, 1, 5, 511, 512, 513, 600, 3000, 3073, 3584]) for _ in range(pick.randint(1, 4))]
    with tarfile.open(fileobj=out, mode="w", format=pick.choice([*FORMATS.values()])) as archive:
        for number in range(pick.randint(5, 60)):
            for k, size in enumerate(sizes):
                data = bytes([48 + number % 10]) * (size + pick.choice([0] * 30 + [400]))
                add(archive, f"{number:06}.{'abcd'[k]}", data)
    return out.getvalue()


@pytest.mark.parametrize("seed", range(15))
def test_members_of_equal_sizes_are_found_wherever_a_part_ends(seed: int) -> None:
    data = equal_sizes(seed)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        expected = [(member.offset_data - 512, member.size) for member in archive]
    whole = walk(memoryview(data), "x", is_whole=True, checked=True)
    assert [*zip(whole.headers.tolist(), whole.sizes.tolist(), strict=True)] == expected
    for stop in random.Random(seed).sample(range(512, len(data)), 20):
        part = walk(memoryview(data)[:stop], "x", is_whole=False, checked=False)
        begun = [*zip(part.headers.tolist(), part.sizes.tolist(), strict=True)]
        assert begun == expected[: len(begun)]
        rest = walk(memoryview(data)[part.next :], "x", is_whole=True, checked=True)
        ends = [*zip((rest.headers + part.next).tolist(), rest.sizes.tolist(), strict=True)]
        assert begun + ends == expected or part.is_end
