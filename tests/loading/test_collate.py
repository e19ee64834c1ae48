"""What a column becomes in a batch depends on the column, never on what else is in the batch."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from lightning_stream import MDSWriter, Stream, StreamingDataLoader, StreamingDataset  # noqa: E402
from lightning_stream.loading.collate import collate_samples, collating_as_torch  # noqa: E402

LENGTHS = [3, 3, 3, 3, 2, 3, 4, 3]
COLUMNS = {
    "any": "ndarray", "ints": "ndarray:int32", "fixed": "ndarray:int32:2", "x": "float32", "named": "tensors",
    "text": "str", "whole": "str_int",
}  # fmt: skip


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    with MDSWriter(out=tmp_path / "set", columns=COLUMNS) as writer:
        for k, length in enumerate(LENGTHS):
            array = np.full(length, k, np.int32)
            row = {"any": array, "ints": array, "fixed": np.full(2, k, np.int32), "x": k, "named": {"a": array}}
            writer.write({**row, "text": "t", "whole": k})
    return tmp_path / "set"


@pytest.mark.parametrize("batch_size", [1, 2, 4, 8])
def test_arrays_of_any_shape_are_a_list_in_every_batch_and_those_of_one_shape_a_tensor(
    shards: Path, batch_size: int
) -> None:
    seen = 0
    for batch in StreamingDataLoader(StreamingDataset(local=shards), batch_size):
        for name in ("any", "ints", "named", "text"):
            assert type(batch[name]) is list
        assert [array.tolist() for array in batch["any"]] == [array.tolist() for array in batch["ints"]]
        assert [array.tolist() for array in batch["ints"]] == [sample["a"].tolist() for sample in batch["named"]]
        assert [len(array) for array in batch["any"]] == LENGTHS[seen : seen + batch_size]
        assert (batch["fixed"].shape, batch["fixed"].dtype) == ((batch_size, 2), torch.int32)
        assert (batch["x"].dtype, batch["whole"].dtype) == (torch.float32, torch.int64)
        seen += batch_size
    assert seen == len(LENGTHS)


def test_what_a_transform_or_a_decoder_makes_of_one_shape_is_stacked(shards: Path) -> None:
    def padded(sample: dict[str, Any]) -> dict[str, Any]:
        return {"ints": np.resize(sample["ints"], 4)}

    (batch,) = StreamingDataLoader(StreamingDataset(local=shards, transform=padded), 8)
    assert batch["ints"].shape == (8, 4)
    dataset = StreamingDataset(local=shards, decoders={"text": lambda data: np.frombuffer(data, np.uint8)})
    (batch,) = StreamingDataLoader(dataset, 8)
    assert batch["text"].shape == (8, 1)


def test_columns_that_some_streams_lack_are_lists_in_every_batch(tmp_path: Path) -> None:
    left = {"id": "int", "own": "int", "kind": "int32", "array": "ndarray:int32:2", "text": "str"}
    right = {"id": "int", "other": "float32", "kind": "int64", "array": "ndarray:int32:2", "text": "str"}
    for name, columns in (("left", left), ("right", right)):
        with MDSWriter(out=tmp_path / name, columns=columns) as writer:
            values = {"id": 1, "own": 2, "other": 3, "kind": 4, "array": np.ones(2, np.int32), "text": name}
            for _ in range(4):
                writer.write({key: values[key] for key in columns})
    dataset = StreamingDataset(streams=[Stream(local=tmp_path / name) for name in ("left", "right")])
    wants = {"left": {"own": 2, "other": None}, "right": {"own": None, "other": 3}}
    for batch_size in (2, 8):
        for batch in StreamingDataLoader(dataset, batch_size):
            assert batch.keys() == {"id", "own", "other", "kind", "array", "text"}
            assert (batch["id"].dtype, batch["array"].shape) == (torch.int64, (batch_size, 2))
            assert batch["kind"] == [4] * batch_size
            for name in ("own", "other"):
                assert type(batch[name]) is list
                assert batch[name] == [wants[text][name] for text in batch["text"]]
    out = np.zeros((3, 2), np.int32)
    assert dataset.read_batch([7, 0, 4], out={"array": out})["array"] is out
    assert out.all()
    with pytest.raises(ValueError, match="no column 'own' of fixed size in all of the data"):
        dataset.read_batch([0], out={"own": np.zeros(1, np.int64)})


def test_a_none_among_numbers_or_arrays_makes_a_list() -> None:
    samples = [{"n": 1, "a": np.ones(2), "t": torch.ones(2)}, {"n": None, "a": None, "t": None}]
    batch = collate_samples(samples)
    assert (batch["n"], type(batch["a"]), type(batch["t"])) == ([1, None], list, list)


class Encoding(UserDict):  # type: ignore[type-arg]
    """Like the BatchEncoding of transformers: more than its keys."""

    def __init__(self, data: Any, encodings: str = "none") -> None:
        super().__init__(data)
        self.encodings = encodings


def test_a_mapping_stays_what_torch_makes_of_it() -> None:
    for make in (dict, OrderedDict, MappingProxyType, lambda one: Encoding(one, "fast")):
        samples: list[Any] = [make({"x": k, "y": [k], "z": "text"}) for k in range(3)]
        batch, of_torch = collate_samples(samples), torch.utils.data.default_collate(samples)
        assert type(batch) is type(of_torch) is type(samples[0])
        assert batch["x"].tolist() == of_torch["x"].tolist() == [0, 1, 2]
        assert batch["z"] == of_torch["z"]
        assert batch["y"] == [[0], [1], [2]]  # torch turns lists over
        assert samples[0]["x"] == 0
    assert batch.encodings == "fast"


@pytest.mark.parametrize(
    "values",
    [
        [torch.full((3, 4), k, dtype=torch.bfloat16) for k in range(5)],
        [torch.full((3,), k) for k in range(5)],
        [torch.ones(2, dtype=torch.int32), torch.full((2,), 0.5)],
        [torch.arange(6.0).reshape(2, 3).T] * 2,
        [torch.ones(2, requires_grad=True)] * 2,
        [torch.empty(0, 3)] * 2,
        [np.full((2, 3), k, np.uint16) for k in range(5)],
        [np.asfortranarray(np.arange(6).reshape(2, 3))] * 2,
        [np.array(["a"]), np.array(["b"])],
        [np.empty((0, 2))] * 2,
    ],
    ids=lambda values: f"{type(values[0]).__name__} {values[0].dtype} {tuple(values[0].shape)}",
)
def test_samples_are_stacked_in_given_memory_as_they_are_elsewhere(values: list[Any]) -> None:
    given: list[bytearray] = []

    def out(num_bytes: int) -> bytearray:
        given.append(bytearray(num_bytes))
        return given[-1]

    samples = [{"x": value} for value in values]
    found, none_left = collate_samples(samples, out)["x"], collate_samples(samples, lambda _: None)["x"]
    expected = collate_samples(samples)["x"]
    for one in (found, none_left):
        assert type(one) is type(expected)
        assert one.dtype == expected.dtype
        assert one.shape == expected.shape
        assert bool((one == expected).all())
        if isinstance(one, torch.Tensor):
            assert one.stride() == expected.stride()
            assert one.requires_grad == expected.requires_grad
    for memory in given:
        assert bytes(memory) == expected.contiguous().view(torch.uint8).numpy().tobytes()


READ_ONLY = np.arange(4)
READ_ONLY.setflags(write=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of numpy, at the old way of torch 2.7
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize(
    "values",
    [
        [1, 2, 3],
        [0.5, 1.5],
        [True, False],
        [1, 2.5],
        [2.5, 1],
        [True, 3],
        [2**63, 1],
        [-(2**63), 2**63 - 1],
        [1, None],
        [1, "a"],
        [1j],
        *([kind(1)] * 3 for kind in (np.bool_, np.int8, np.uint16, np.float16, np.float64, np.complex64, np.longlong)),
        [np.float32(1), np.float64(2)],
        [np.datetime64(1, "s")],
        [np.full((2, 3), k, np.int16) for k in range(5)],
        [np.full(2, k, np.complex64) for k in range(2)],
        [np.array(k) for k in range(3)],
        [np.empty((0, 3))] * 2,
        [READ_ONLY] * 2,
        [READ_ONLY[::2]] * 2,
        [READ_ONLY[::-1]] * 2,
        [np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1)] * 2,
        [np.ones(2), np.ones(3)],
        [np.ones(2), np.ones(2, np.int64)],
        [np.ones(2), [1.0, 2.0]],
        [np.ones(2), 1.0],
        [np.array(["a"])] * 2,
        [np.array([None])] * 2,
        [np.ma.array([1, 2], mask=[True, False])] * 2,
        [torch.arange(6.0).reshape(2, 3).T] * 2,
        [torch.ones(2, requires_grad=True)] * 2,
        [torch.ones(2), torch.ones(3)],
        [torch.ones(2), [1.0, 2.0]],
        [torch.ones(2).to_sparse()] * 2,
        [{"x": np.ones(2), "y": (1, "a")}, {"x": np.zeros(2), "y": (2, "b")}],
        [[1, np.ones(2)], [2, np.zeros(2)]],
        [b"a", b"b"],
    ],
    ids=repr,
)
def test_samples_of_a_map_style_dataset_are_collated_to_what_torch_makes_of_them(values: list[Any]) -> None:
    def outcome(collate: Any) -> Any:
        try:
            return collate(values)
        except Exception as error:  # noqa: BLE001 - what torch refuses
            return type(error)

    def described(batch: Any) -> Any:
        if isinstance(batch, torch.Tensor):
            return batch.dtype, batch.stride(), batch.requires_grad, batch.tolist()
        if isinstance(batch, dict):
            return {name: described(value) for name, value in batch.items()}
        return [*map(described, batch)] if isinstance(batch, (list, tuple)) else batch

    expected = described(outcome(torch.utils.data.default_collate))
    for out in (None, bytearray, lambda _: None):
        assert repr(described(outcome(collating_as_torch(out)))) == repr(expected)


def test_a_transform_that_returns_nothing_is_named(shards: Path) -> None:
    def forgetful(sample: dict[str, Any]) -> None:
        sample.clear()

    loader = StreamingDataLoader(StreamingDataset(local=shards, transform=forgetful), 8)
    with pytest.raises(TypeError, match=r"found None from .*forgetful"):
        next(iter(loader))
