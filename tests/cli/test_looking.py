"""``head``, ``preview``, ``stats`` and ``lint``: what a dataset holds, sample by sample."""

from __future__ import annotations

import errno
import io
import json
import os
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_stream import MDSWriter, shared_files
from lightning_stream.cli import main

Answer = Callable[..., tuple[int, Any]]
images = pytest.importorskip("PIL.Image", reason="images need Pillow: uv sync --extra images")


def jpeg(number: int, width: int = 40) -> bytes:
    out = io.BytesIO()
    images.fromarray(np.full((30, width, 3), 3 * number, np.uint8)).save(out, "JPEG")
    return out.getvalue()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 images with labels, texts, ragged arrays and values that may be missing, in several shards."""
    out = tmp_path_factory.mktemp("photos") / "photos"
    columns = {"image": "jpeg", "label": "int", "text": "str", "about": "json", "items": "ndarray:float32"}
    with MDSWriter(out=str(out), columns=columns, size_limit=8 << 10) as writer:
        for number in range(60):
            about = None if number % 10 == 0 else {"number": number}
            items = np.arange(number % 4, dtype=np.float32)
            text = f"<b>text {number % 7}</b>"
            writer.write({"image": jpeg(number), "label": number % 3, "text": text, "about": about, "items": items})
    (out / "manifest.json").write_text(json.dumps({"classes": {"label": ["daisy", "rose", "tulip"]}}))
    return out


def test_head_prints_the_first_samples_or_those_asked_for(photos: Path, answer: Answer) -> None:
    code, found = answer("head", str(photos), "-n", "2")
    assert code == 0
    (samples,) = [one["samples"] for one in found["datasets"]]
    assert [one["id"] for one in samples] == [0, 1]
    assert samples[0] == {
        "id": 0, "image": "JPEG 40x30", "label": 0, "text": "<b>text 0</b>", "about": None, "items": [],
    }  # fmt: skip
    _, found = answer("head", str(photos), "--ids", "58:,3")
    assert [one["id"] for one in found["datasets"][0]["samples"]] == [58, 59, 3]


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        (["--ids", "60"], "sample ids are 0 to 59 in this dataset; found 60"),
        (["--ids", "3,0:99999999999999"], "found 99,999,999,999,998"),
        (["--ids", "5:5"], "found none"),
        (["--ids", "x"], "--ids takes numbers and ranges"),
        (["-n", "0"], "--count is at least 1"),
    ],
)
def test_wrong_ids_are_refused_by_their_rule(photos: Path, answer: Answer, given: list[str], rule: str) -> None:
    code, found = answer("head", str(photos), *given)
    assert code == 2
    assert rule in found["error"]


def test_a_preview_is_one_page_with_every_image_and_no_markup_of_the_data(photos: Path, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    assert main(["preview", str(photos), "-n", "7", "--out", str(path)]) == 0
    page = path.read_text()
    assert page.count("<article>") == page.count('src="data:image/jpeg;base64,') == 7
    assert "&lt;b&gt;text 3&lt;/b&gt;" in page
    assert "<b>" not in page
    assert re.findall(r'(?:src|href)="(?!data:)', page) == []  # it loads nothing
    assert "<dd>rose</dd>" in page


def test_a_preview_as_a_picture_has_a_cell_for_each_image(photos: Path, tmp_path: Path) -> None:
    path = tmp_path / "sheet.png"
    assert main(["preview", str(photos), "--ids", "0,59", "--out", str(path)]) == 0
    with images.open(path) as sheet:
        middles = [sheet.convert("RGB").getpixel((8 + 80 + k * 168, 8 + 80)) for k in range(2)]
    assert all(abs(pixel - 3 * number) < 8 for number, middle in zip((0, 59), middles, strict=True) for pixel in middle)


def test_a_preview_of_texts_alone_is_no_picture(shards: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["preview", str(shards / "val"), "--out", str(tmp_path / "a.png")]) == 2
    assert "these samples have none" in capsys.readouterr().err
    assert main(["preview", str(shards), "--out", str(tmp_path / "a.html")]) == 2
    assert "is a folder of splits" in capsys.readouterr().err
    assert main(["preview", str(shards / "val"), "--out", str(tmp_path / "a.gif")]) == 2
    assert list(tmp_path.iterdir()) == []


def test_stats_are_those_of_the_values(photos: Path, answer: Answer) -> None:
    code, found = answer("stats", str(photos))
    columns = found["datasets"][0]["columns"]
    assert code == 0
    labels, items = np.arange(60) % 3, np.concatenate([np.arange(k % 4) for k in range(60)])
    assert columns["label"]["values"] == {"min": 0.0, "mean": 1.0, "max": 2.0, "std": pytest.approx(labels.std())}
    assert columns["label"]["most_common"] == {"daisy": 20, "rose": 20, "tulip": 20}
    assert columns["about"]["missing"] == 6
    assert columns["items"]["elements"]["mean"] == pytest.approx(items.mean())
    assert columns["items"]["elements"]["std"] == pytest.approx(items.std())
    assert columns["items"]["items"]["max"] == 3
    assert columns["image"]["width"]["min"] == 40
    assert columns["text"]["distinct"] == 7


def test_stats_count_numbers_that_are_not_finite(tmp_path: Path, answer: Answer) -> None:
    with MDSWriter(out=str(tmp_path), columns={"x": "float32"}) as writer:
        for value in (1.0, float("nan"), 3.0, float("inf")):
            writer.write({"x": np.float32(value)})
    _, found = answer("stats", str(tmp_path))
    assert found["datasets"][0]["columns"]["x"]["values"] == {
        "min": 1.0, "mean": 2.0, "max": 3.0, "std": 1.0, "not_finite": 2,
    }  # fmt: skip


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """50 images; the bytes of two of them are cut."""
    with MDSWriter(out=str(tmp_path / "damaged"), columns={"image": "jpeg"}, size_limit=8 << 10) as writer:
        for number in range(50):
            writer.write({"image": jpeg(number)[: 500 if number in (7, 40) else None]})
    return tmp_path / "damaged"


def test_lint_lists_every_sample_that_cannot_be_decoded(damaged: Path, photos: Path, answer: Answer) -> None:
    code, found = answer("lint", str(damaged), "--num-workers", "2")
    assert (code, [each["id"] for each in found["datasets"][0]["bad"]]) == (1, [7, 40])
    assert answer("lint", str(photos), "--num-workers", "1") == (0, {"datasets": [{"url": str(photos), "bad": []}]})


def test_lint_does_not_decode_again_what_its_file_notes(damaged: Path, tmp_path: Path, answer: Answer) -> None:
    notes = tmp_path / "lint.jsonl"
    first = answer("lint", str(damaged), "--num-workers", "1", "--resume", str(notes))
    for path in damaged.glob("*.mds"):
        path.unlink()
    assert answer("lint", str(damaged), "--num-workers", "1", "--resume", str(notes)) == first


def test_lint_decodes_again_what_its_file_notes_of_other_columns(tmp_path: Path, answer: Answer) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").write_text('{"x": 1, "y": 1}\n' * 4 + '{"x": 1, "y": "?"}\n')
    given = [str(tmp_path / "rows"), "--num-workers", "1", "--resume", str(tmp_path / "lint.jsonl")]
    assert answer("lint", *given, "--columns", "x")[0] == 0
    code, found = answer("lint", *given, "--columns", "y=int64")
    assert (code, [each["shard"] for each in found["datasets"][0]["bad"]]) == (1, [0])


def test_lint_names_a_shard_that_is_missing(damaged: Path, answer: Answer) -> None:
    (damaged / "shard.00000.mds").unlink()
    code, found = answer("lint", str(damaged), "--num-workers", "1")
    assert code == 1
    first = found["datasets"][0]["bad"][0]
    assert (first["shard"], first["id"]) == (0, None)
    assert "shard.00000.mds" in first["error"]


def test_a_preview_shows_the_samples_beside_an_image_that_cannot_be_decoded(tmp_path: Path) -> None:
    whole, bomb = jpeg(1, width=4000), io.BytesIO()
    images.new("1", (20_000, 20_000)).save(bomb, "PNG")  # more pixels than Pillow opens
    with MDSWriter(out=str(tmp_path / "data"), columns={"image": "bytes", "label": "str"}) as writer:
        for number, image in enumerate((whole, whole[:-20], bomb.getvalue())):
            writer.write({"image": image, "label": f"of two\nlines {number}"})
    for name in ("page.html", "page.png"):
        assert main(["preview", str(tmp_path / "data"), "--out", str(tmp_path / name)]) == 0
    page = (tmp_path / "page.html").read_text()
    assert page.count("<img ") == 1
    assert page.count("cannot be decoded") == 2
    with images.open(tmp_path / "page.png") as sheet:
        assert sheet.width > 2 * 160


def test_a_preview_of_no_samples_or_many_columns_stays_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, count in (("none", 0), ("wide", 1)):
        with MDSWriter(out=str(tmp_path / name), columns={f"c{k}": "int" for k in range(500)}) as writer:
            for _ in range(count):
                writer.write(dict.fromkeys((f"c{k}" for k in range(500)), 1))
        assert main(["preview", str(tmp_path / name), "--out", str(tmp_path / "page.html")]) == 0
        assert len(re.search('<p class="about">(.*)</p>', (tmp_path / "page.html").read_text())[1]) < 400
        assert main(["preview", str(tmp_path / name), "--out", str(tmp_path / "page.png")]) == 2
        assert len(capsys.readouterr().err) < 300


def test_a_preview_replaces_a_former_one_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with MDSWriter(out=str(tmp_path / "data"), columns={"about": "json"}) as writer:
        writer.write({"about": "half a character: \ud800"})
    path = tmp_path / "page.html"
    assert main(["preview", str(tmp_path / "data"), "--out", str(path)]) == 0
    former = path.read_text(encoding="utf-8")
    assert "half a character: ?" in former

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shared_files, "publish", full)
    assert main(["preview", str(tmp_path / "data"), "--out", str(path)]) == 2
    assert path.read_text(encoding="utf-8") == former
    assert sorted(one.name for one in tmp_path.iterdir()) == ["data", "page.html"]


def test_texts_do_not_act_on_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MDSWriter(out=str(tmp_path), columns={"text": "str"}) as writer:
        writer.write({"text": "\x1b[2Jred\nnew\u202e\x9b"})
    assert main(["head", str(tmp_path)]) == 0
    assert r"\x1b[2Jred\nnew\u202e\x9b" in capsys.readouterr().out


def test_numbers_that_are_not_finite_are_null_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = {"x": "float32", "v": "ndarray:float32:2", "d": "str_decimal"}
    with MDSWriter(out=str(tmp_path), columns=columns) as writer:
        writer.write({"x": np.nan, "v": np.array([1, np.inf], np.float32), "d": Decimal("1.10")})
    assert main(["head", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["datasets"][0]["samples"] == [{"id": 0, "x": None, "v": [1.0, None], "d": "1.10"}]


def test_a_label_that_is_no_number_keeps_its_value(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path), columns={"label": "json"}) as writer:
        for label in (None, 1, "other", 9):
            writer.write({"label": label})
    (tmp_path / "manifest.json").write_text(json.dumps({"classes": {"label": ["daisy", "rose"]}}))
    assert main(["preview", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    assert main(["stats", str(tmp_path)]) == 0
    page = (tmp_path / "page.html").read_text()
    assert re.findall("<dd>(.*?)</dd>", page) == ["none", "rose", "other", "9"]
