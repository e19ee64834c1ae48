"""Documents are tokenized without losing a token, and come out of the shards as they were."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("lightning", reason="the recipes need Lightning: uv sync")
from lightning_stream import LocalDataset, StreamingDataLoader
from lightning_stream.errors import FormatError, NotFoundError
from recipes.data.synthetic_text import story
from recipes.data.text import ByteTokenizer, FileTokenizer, TextData, TextMixture, Tokenize, token_dtype

STORIES = [story(number) for number in range(30)]


def text(folder: Path, source: Path | str | None, **settings: Any) -> TextData:
    """Converted text, in rows of 32 bytes."""
    paths = {"remote": str(folder / "shards"), "local": str(folder / "cache"), "conversion_workers": 1}
    given = None if source is None else str(source)
    data = TextData(**{"source": given, "seq_len": 32, "val_fraction": 0.3, "size_limit": "4kb", **paths, **settings})
    data.prepare_data()
    return data


def documents(data: TextData, split: str) -> list[str]:
    """The documents of a split, in order."""
    samples = LocalDataset(f"{data.uri}/{split}")[:]
    assert all(sample["tokens"][0] == ByteTokenizer.bos_token for sample in samples)
    return [ByteTokenizer().decode(sample["tokens"][1:].tolist()) for sample in samples]


def json_lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": one, "url": "x"}) + "\n" for one in texts).encode()


@given(st.lists(st.text(min_size=1).filter(str.strip), max_size=8))
def test_each_document_is_its_tokens_behind_the_bos_token(texts: list[str]) -> None:
    found = [sample["tokens"] for sample in Tokenize()({"text": one} for one in texts)]
    assert [tokens.tolist() for tokens in found] == [[256, *one.encode()] for one in texts]
    assert all(tokens.dtype == np.uint16 for tokens in found)
    assert (token_dtype(1 << 16), token_dtype((1 << 16) + 1)) == ("uint16", "uint32")


def test_an_epoch_of_rows_has_every_token_once(tmp_path: Path) -> None:
    data = text(tmp_path, "synthetic", synthetic_count=30)
    lengths = [int(batch["num_tokens"].sum()) for batch in StreamingDataLoader(data.train_dataset, 1, tail="drop")]
    assert sum(lengths) == int(data.train_dataset.lengths("tokens").sum())


@pytest.mark.parametrize("separator", ["\n\n", "\\n\\n"], ids=["from Python", "from a command line"])
def test_every_document_is_whole_in_one_split(tmp_path: Path, separator: str) -> None:
    (tmp_path / "stories.txt").write_text("\n\n".join(STORIES))
    data = text(tmp_path, tmp_path / "stories.txt", separator=separator)
    train, val = documents(data, "train"), documents(data, "val")
    assert sorted(train + val) == sorted(STORIES)
    assert 0 < len(val) < len(train)


def test_a_single_document_is_cut_in_two(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("\n".join(STORIES))
    data = text(tmp_path, tmp_path / "one.txt")
    (train,), (val,) = documents(data, "train"), documents(data, "val")
    assert train + val == "\n".join(STORIES)
    assert train.endswith("\n")
    assert 0.2 < len(val) / len(train + val) < 0.4


def test_c4_and_the_pile_have_their_own_validation_files(tmp_path: Path) -> None:
    c4, pile = tmp_path / "c4 [en]", tmp_path / "pile"
    c4.mkdir()
    (pile / "train").mkdir(parents=True)
    train, val = STORIES[:8], STORIES[8:11]
    (c4 / "c4-train.00000-of-00002.json.gz").write_bytes(gzip.compress(json_lines(train[:5])))
    (c4 / "c4-train.00001-of-00002.json.gz").write_bytes(gzip.compress(json_lines(train[5:])))
    (c4 / "c4-validation.00000-of-00001.json.gz").write_bytes(gzip.compress(json_lines(val)))
    frame = zstandard.ZstdCompressor().compress
    (pile / "train" / "00.jsonl.zst").write_bytes(frame(json_lines(train[:5])) + frame(json_lines(train[5:])))
    (pile / "val.jsonl.zst").write_bytes(frame(json_lines(val)))
    for folder, files in ((c4, ("c4-train.*", "c4-validation.*")), (pile, ("train/*.jsonl.zst", "val.jsonl.zst"))):
        data = text(tmp_path, folder, train_files=files[0], val_files=files[1])
        assert (documents(data, "train"), documents(data, "val")) == (train, val)
    with pytest.raises(ValueError, match="set both"):
        text(tmp_path, c4, train_files="c4-train.*")
    with pytest.raises(NotFoundError, match="no files none"):
        text(tmp_path, c4, train_files="none", val_files="none")


def test_any_number_of_processes_writes_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(3):
        (tmp_path / "texts" / f"{number}.jsonl").write_bytes(json_lines(STORIES[10 * number : 10 * number + 10]))
    written = []
    for workers in (1, 2):
        data = text(tmp_path / f"by {workers}", tmp_path / "texts", conversion_workers=workers)
        shards = {str(one.relative_to(data.uri)): one.read_bytes() for one in Path(data.uri).rglob("*.mds.zstd")}
        written.append(shards)
    assert len(written[0]) >= 4
    assert written[0] == written[1]


def test_what_is_not_text_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"content": "one"}\n')
    with pytest.raises(FormatError, match="text under 'text'; found content"):
        text(tmp_path, path)
    (tmp_path / "one.jsonl").write_bytes(json_lines(["one"]))
    with pytest.raises(FormatError, match=r"the (train|val) split cannot be written"):
        text(tmp_path, tmp_path / "one.jsonl")


def test_converted_text_is_read_with_the_tokenizer_that_made_it(tmp_path: Path) -> None:
    made = text(tmp_path, "synthetic", synthetic_count=30)
    assert text(tmp_path, None, remote=made.uri).train_dataset.size == made.train_dataset.size
    assert text(tmp_path, None, remote=made.uri, seq_len=64).pack.row_length == 64
    (Path(made.uri) / "text.json").write_text('{"tokenizer": "other"}')
    with pytest.raises(FormatError, match=r"were made with .*'other'.* found .*'bytes'"):
        text(tmp_path, None, remote=made.uri)
    with pytest.raises(NotFoundError):
        text(tmp_path, None, remote=str(tmp_path / "nothing"))


def test_a_hugging_face_tokenizer_file_is_read(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install tokenizers")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        STORIES,
        tokenizers.trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    path = str(tmp_path / "tokenizer.json")
    bpe.save(path)
    tokenizer = FileTokenizer(path)
    tokens = tokenizer.encode(STORIES[0]).tolist()
    assert len(tokens) < len(STORIES[0])
    assert tokenizer.decode([tokenizer.bos_token, *tokens]) == STORIES[0]
    with pytest.raises(ValueError, match="has none of <none>"):
        FileTokenizer(path, "<none>")
    data = text(tmp_path, "synthetic", synthetic_count=30, tokenizer=path)
    assert int(np.max(data.train_dataset[0]["tokens"])) < data.tokenizer.vocab_size


def test_a_mixture_has_each_parts_share_of_documents_and_validates_each_row_once(tmp_path: Path) -> None:
    parts = {"much": {"proportion": 3}, "little": {"synthetic_seed": 2}}
    paths = {"remote": str(tmp_path / "shards"), "local": str(tmp_path / "cache"), "conversion_workers": 1}
    settings = {"source": "synthetic", "synthetic_count": 60, "seq_len": 32, "size_limit": "8kb"}
    data = TextMixture(parts=parts, **paths, **settings)
    data.prepare_data()
    train, val = data.train_dataset, data.val_dataset
    loader = StreamingDataLoader(train, 8, tail="drop")
    counts = Counter[int]()
    for _ in loader:
        batch = loader.last_batch
        assert batch is not None
        counts.update(train.snapshot.streams_of(np.unique(batch.sample_ids)).tolist())
    assert counts[0] == pytest.approx(3 * counts[1], rel=0.1)
    tokens = [int(batch["num_tokens"].sum()) for batch in StreamingDataLoader(val, 8, evaluation=True)]
    assert sum(tokens) == int(val.lengths("tokens").sum())
    for wrong in ({}, {"much": {"proportion": 0}}):
        with pytest.raises(ValueError, match="a proportion above 0"):
            TextMixture(parts=wrong, **paths)
