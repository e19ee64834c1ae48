"""Documents are packed into blocks with nothing lost, and come out of the shards as they went in."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from lightning_stream import StreamingDataset
from lightning_stream.errors import FormatError, NotFoundError
from lightning_stream.recipes.converted_set import Made
from lightning_stream.recipes.documents import TextFiles, text_source
from lightning_stream.recipes.stories import stories
from lightning_stream.recipes.text_conversion import TextConfig, TextConversion
from lightning_stream.recipes.tokens import PADDING, Block, ByteTokenizer, FileTokenizer, Packer, token_dtype


@given(st.lists(st.lists(st.integers(0, 255), max_size=20), max_size=8), st.integers(1, 9))
def test_unpacked_blocks_are_the_documents(documents: list[list[int]], size: int) -> None:
    packer = Packer(size, 256, "uint16")
    blocks: list[Block] = []
    for number, document in enumerate(documents):
        blocks += packer.add(np.array(document, np.int64), number)
    blocks += packer.rest()
    assert all(block.tokens.shape == block.documents.shape == (size,) for block in blocks)
    tokens = np.concatenate([np.empty(0, np.uint16), *(block.tokens for block in blocks)])
    numbers = np.concatenate([np.empty(0, np.int32), *(block.documents for block in blocks)])
    assert [tokens[numbers == number].tolist() for number in range(len(documents))] == [[256, *d] for d in documents]
    assert (numbers == PADDING).sum() < size
    assert list(packer.rest()) == []


@given(st.text())
def test_bytes_come_back_as_the_text(text: str) -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text).tolist()
    assert all(0 <= token < tokenizer.vocabulary for token in tokens)
    assert tokenizer.decode([tokenizer.boundary, *tokens]) == text


def test_tokens_take_the_smallest_type_that_holds_them() -> None:
    assert token_dtype(1 << 16) == "uint16"
    assert token_dtype((1 << 16) + 1) == "uint32"


def _held(conversion: TextConversion, split: str, tmp_path: Path) -> list[str]:
    dataset = StreamingDataset(remote=f"{conversion.place}/{split}", local=str(tmp_path / "cache" / split))
    blocks = [dataset[index] for index in range(dataset.size)]
    tokens = np.concatenate([block["tokens"] for block in blocks])
    numbers = np.concatenate([block["documents"] for block in blocks])
    return [ByteTokenizer().decode(tokens[numbers == n].tolist()) for n in sorted({*numbers.tolist()} - {PADDING})]


def _in_order(conversion: TextConversion, split: str, tmp_path: Path) -> list[str]:
    """The documents one after the other, also where their numbers begin anew with each file."""
    dataset = StreamingDataset(remote=f"{conversion.place}/{split}", local=str(tmp_path / "cache" / split))
    blocks = [dataset[index] for index in range(dataset.size)]
    tokens = np.concatenate([block["tokens"] for block in blocks])
    kept = tokens[np.concatenate([block["documents"] for block in blocks]) != PADDING]
    begins = [*np.flatnonzero(kept == ByteTokenizer.boundary), len(kept)]
    return [ByteTokenizer().decode(kept[begin + 1 : end].tolist()) for begin, end in pairwise(begins)]


def _convert(source: object, tmp_path: Path) -> TextConversion:
    conversion = TextConversion.plan(source, ByteTokenizer(), str(tmp_path / "shards"), TextConfig(32, 0.3))  # type: ignore[arg-type]
    conversion.run()
    return conversion


def test_every_document_is_in_one_split_whole(tmp_path: Path) -> None:
    texts = list(stories(30, 1))
    (tmp_path / "stories.txt").write_text("\n\n".join(texts))
    conversion = _convert(TextFiles(tmp_path / "stories.txt", "\n\n"), tmp_path)
    train, val = (_held(conversion, split, tmp_path) for split in ("train", "val"))
    assert sorted(train + val) == sorted(texts)
    assert 0 < len(val) < len(train)
    done = conversion.describe()
    assert done is not None
    assert done.documents == {"train": len(train), "val": len(val)}
    assert done.tokens["train"] == sum(len(text.encode()) + 1 for text in train)


def test_a_single_document_is_cut_in_two(tmp_path: Path) -> None:
    text = "\n".join(stories(20, 1))
    (tmp_path / "one.txt").write_text(text)
    conversion = _convert(TextFiles(tmp_path / "one.txt"), tmp_path)
    (train,), (val,) = (_held(conversion, split, tmp_path) for split in ("train", "val"))
    assert train + val == text
    assert train.endswith("\n")
    assert 0.2 < len(val) / len(text) < 0.4


def _lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text, "url": "x"}) + "\n" for text in texts).encode()


def test_json_lines_as_c4_and_the_pile_have_them_are_read(tmp_path: Path) -> None:
    train, val = list(stories(8, 1)), list(stories(3, 2))
    (tmp_path / "c4-train.00000-of-00002.json.gz").write_bytes(gzip.compress(_lines(train[:5])))
    (tmp_path / "c4-train.00001-of-00002.json.gz").write_bytes(gzip.compress(_lines(train[5:])))
    (tmp_path / "c4-validation.00000-of-00001.json.gz").write_bytes(gzip.compress(_lines(val)))
    c4 = text_source(str(tmp_path), count=0, seed=0, train_files="c4-train.*", val_files="c4-validation.*")
    conversion = _convert(c4, tmp_path)
    assert _in_order(conversion, "train", tmp_path) == train
    done = conversion.describe()
    assert done is not None
    assert done.documents == {"train": 8, "val": 3}
    assert done.tokens["train"] == sum(len(text.encode()) + 1 for text in train)
    assert _held(conversion, "val", tmp_path / "v") == val
    pile = tmp_path / "pile"
    (pile / "train").mkdir(parents=True)
    whole = zstandard.ZstdCompressor().compress
    (pile / "train" / "00.jsonl.zst").write_bytes(whole(_lines(train[:5])) + whole(_lines(train[5:])))
    (pile / "val.jsonl.zst").write_bytes(whole(_lines(val)))
    source = text_source(str(pile), count=0, seed=0, train_files="train/*.jsonl.zst", val_files="val.jsonl.zst")
    assert list(source.documents("train")) == train
    assert list(source.documents("val")) == val


def test_any_number_of_processes_writes_the_same_bytes(tmp_path: Path) -> None:
    texts = list(stories(40, 1))
    (tmp_path / "texts").mkdir()
    for number in range(4):
        (tmp_path / "texts" / f"{number}.jsonl").write_bytes(_lines(texts[10 * number : 10 * number + 10]))
    written = []
    for workers in (1, 2):
        source = TextFiles(tmp_path / "texts")
        conversion = TextConversion.plan(
            source, ByteTokenizer(), str(tmp_path / f"by{workers}"), TextConfig(32, 0.3), workers
        )
        assert conversion.run().is_new
        place = Path(conversion.place)
        written.append({str(p.relative_to(place)): p.read_bytes() for p in place.rglob("*") if p.is_file()})
    names = {name for name in written[0] if "manifest" not in name}
    assert len([name for name in names if name.endswith(".zstd")]) >= 8
    assert {name: written[0][name] for name in names} == {name: written[1][name] for name in names}
    found = [text for split in ("train", "val") for text in _in_order(conversion, split, tmp_path)]
    assert sorted(found) == sorted(texts)


def test_a_line_that_is_no_text_ends_a_conversion_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(_lines(["one", "two"]) + b"{broken\n")
    with pytest.raises(FormatError, match="line 3 is not"):
        _convert(TextFiles(tmp_path / "a.jsonl"), tmp_path)


def test_what_is_no_text_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(_lines(["one"]) + b"{broken\n")
    with pytest.raises(FormatError, match="line 2 is not"):
        list(TextFiles(path).documents("train"))
    path.write_bytes(b'{"content": "one"}\n')
    with pytest.raises(FormatError, match=r"line 1 has \['content'\]"):
        list(TextFiles(path).documents("train"))
    with pytest.raises(NotFoundError, match="found none at"):
        TextFiles(tmp_path / "none").fingerprint()
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    with pytest.raises(FormatError, match="a train set needs text"):
        _convert(TextFiles(empty), tmp_path)


def test_changed_text_gets_a_place_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    places = set()
    for content in ("one\ntwo\n", "one\nnew\n"):
        path.write_text(content)
        places.add(_convert(TextFiles(path), tmp_path).place)
    assert len(places) == 2


def test_shards_alone_suffice_where_they_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    made = _convert(text_source("generated", count=20, seed=1), tmp_path)
    found = TextConversion.plan(None, ByteTokenizer(), made.place, TextConfig(32, 0.3))
    assert found.run() == Made(made.describe(), is_new=False)
    other = ByteTokenizer()
    other.fingerprint = "another"
    with pytest.raises(FormatError, match="read with the tokenizer that made them"):
        TextConversion.plan(None, other, made.place, TextConfig(32)).run()
    with pytest.raises(FormatError, match=r"without data\.source"):
        TextConversion.plan(None, ByteTokenizer(), str(tmp_path / "nothing"), TextConfig(32)).run()


def test_a_hugging_face_tokenizer_file_is_read(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(stories(50, 1), trainer)
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    tokenizer = FileTokenizer(str(path))
    text = next(stories(1, 1))
    tokens = tokenizer.encode(text).tolist()
    assert len(tokens) < len(text)
    assert tokenizer.decode([tokenizer.boundary, *tokens]) == text
    with pytest.raises(ValueError, match="has none of <none>"):
        FileTokenizer(str(path), "<none>")
