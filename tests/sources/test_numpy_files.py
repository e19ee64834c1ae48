"""Files of NumPy are read whatever the layout of their arrays is, and as a whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="pyarrow is not installed: uv sync --extra convert")

from lightning_stream import StreamingDataset
from lightning_stream.convert import convert
from lightning_stream.errors import FormatError

NUMBERS = np.arange(6000).reshape(2000, 3)
WIDE = np.zeros(50, [(f"a_field_with_a_long_name_{k}", "<i2") for k in range(200)])
WIDE["a_field_with_a_long_name_7"] = np.arange(50)
ARRAYS = {
    "C": NUMBERS,
    "Fortran": np.asfortranarray(NUMBERS),
    "big-endian": NUMBERS.astype(">i4"),
    "big-endian Fortran": np.asfortranarray(NUMBERS.astype(">f8")),
    "big-endian times": np.array(["2024-01-01", "2024-01-02"], ">M8[D]"),
    "a long head": WIDE,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_STREAM_CACHE", str(tmp_path / "cache"))


def rows(uri: Any) -> list[Any]:
    dataset = StreamingDataset(remote=str(uri))
    return [{name: np.asarray(value).tolist() for name, value in dataset[k].items()} for k in range(dataset.size)]


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_of_any_layout_is_read_in_place_and_converted(name: str, tmp_path: Path) -> None:
    array = ARRAYS[name]
    np.save(tmp_path / "a.npy", array)
    values = array.astype(int) if array.dtype.kind == "M" else array
    names = array.dtype.names
    wanted = [dict(zip(names, row.tolist(), strict=True)) if names else {"array": row.tolist()} for row in values]
    assert rows(tmp_path / "a.npy") == wanted
    assert rows(convert(tmp_path / "a.npy", tmp_path / "out", num_workers=1).uri) == wanted


@pytest.mark.parametrize(
    "array", [np.arange(5), np.asfortranarray(NUMBERS), NUMBERS], ids=["small", "Fortran", "large"]
)
def test_a_file_of_several_arrays_is_refused(array: Any, tmp_path: Path) -> None:
    with (tmp_path / "a.npy").open("wb") as file:
        np.save(file, array)
        np.save(file, array)
    with pytest.raises(FormatError, match=r"a\.npy cannot be read: .*(bytes follow|its head promises)"):
        rows(tmp_path / "a.npy")
    with pytest.raises(FormatError, match=r"a\.npy cannot be read"):
        convert(tmp_path / "a.npy", tmp_path / "out", num_workers=1)
