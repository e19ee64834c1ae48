"""``show``: what a dataset holds, sample by sample."""

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


def test_show_describes_every_split(shards: Path, capsys: pytest.CaptureFixture[str], answer: Answer) -> None:
    assert main(["show", str(shards / "train"), "--samples", "1"]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    for pair in (["samples", "64"], ["compression", "zstd"], ["hashes", "sha1, xxh3_64"], ["x", "ndarray:int32:8"]):
        assert pair in lines
    assert ["name", "n0"] in lines
    code, about = answer("show", str(shards), "--samples", "1")
    assert code == 0
    assert [(one["url"], one["samples"]) for one in about["datasets"]] == [
        (str(shards / "train"), 64),
        (str(shards / "val"), 16),
    ]
    assert about["datasets"][0]["columns"] == {"label": "int", "name": "str", "x": "ndarray:int32:8"}
    assert about["datasets"][0]["printed"][0] == {"id": 0, "label": 0, "name": "n0", "x": list(range(8))}


def test_show_prints_images_and_class_names(tmp_path: Path, answer: Answer) -> None:
    images = pytest.importorskip("PIL.Image", reason="images need Pillow: uv sync --extra images")
    for name in ("rose", "daisy"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(4):
            pixels = np.full((6, 8, 3), 40 * number, dtype=np.uint8)
            images.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.jpg")
    out = str(tmp_path / "out")
    arguments = [str(tmp_path / "photos"), out, "--num-workers", "1"]
    code, done = answer("convert", *arguments)
    assert (code, done["num_samples"], done["is_new"]) == (0, {"": 8}, True)
    _, about = answer("show", out, "--samples", "2")
    assert about["datasets"][0]["classes"] == {"label": ["daisy", "rose"]}
    assert about["datasets"][0]["printed"][1]["image"] == "JPEG 8x6"


def test_show_prints_the_first_samples_or_those_asked_for(photos: Path, answer: Answer) -> None:
    code, found = answer("show", str(photos), "--samples", "2")
    assert code == 0
    (samples,) = [one["printed"] for one in found["datasets"]]
    assert [one["id"] for one in samples] == [0, 1]
    assert samples[0] == {
        "id": 0, "image": "JPEG 40x30", "label": 0, "text": "<b>text 0</b>", "about": None, "items": [],
    }  # fmt: skip
    _, found = answer("show", str(photos), "--ids", "58:,3")
    assert [one["id"] for one in found["datasets"][0]["printed"]] == [58, 59, 3]


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        (["--ids", "3,60"], "--ids takes numbers and ranges of the 60 samples, e.g. 0:10,500; found '60'"),
        (["--ids", "x"], "found 'x'"),
        (["--ids", ""], "found ''"),
        (["--ids", "3:1"], "at least one sample; found '3:1'"),
        (["--samples", "two"], "--samples: takes a whole number, 1 or more"),
    ],
)
def test_wrong_ids_are_refused_by_their_rule(photos: Path, answer: Answer, given: list[str], rule: str) -> None:
    code, found = answer("show", str(photos), *given)
    assert code == 2
    assert rule in found["error"]


def test_a_page_is_one_page_with_every_image_and_no_markup_of_the_data(photos: Path, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    assert main(["show", str(photos), "--samples", "7", "--page", str(path)]) == 0
    page = path.read_text()
    assert page.count("<article>") == page.count('src="data:image/jpeg;base64,') == 7
    assert "&lt;b&gt;text 3&lt;/b&gt;" in page
    assert "<b>" not in page
    assert re.findall(r'(?:src|href)="(?!data:)', page) == []  # it loads nothing
    assert "<dd>rose</dd>" in page


def test_a_page_shows_one_dataset_and_ends_with_html(shards: Path, tmp_path: Path, answer: Answer) -> None:
    assert "is a folder of splits" in answer("show", str(shards), "--page", str(tmp_path / "a.html"))[1]["error"]
    assert "ends with .html" in answer("show", str(shards / "val"), "--page", str(tmp_path / "a.png"))[1]["error"]
    assert list(tmp_path.iterdir()) == []


def test_stats_are_those_of_the_values(photos: Path, answer: Answer) -> None:
    code, found = answer("show", str(photos), "--stats")
    columns = found["datasets"][0]["stats"]
    assert code == 0
    items = np.concatenate([np.arange(k % 4) for k in range(60)])
    assert columns["label"]["values"] == {"min": 0.0, "mean": 1.0, "max": 2.0}
    assert columns["label"]["most_common"] == {"daisy": 20, "rose": 20, "tulip": 20}
    assert columns["about"]["kinds"]["missing"] == 6
    assert columns["items"]["elements"]["mean"] == pytest.approx(items.mean())
    assert columns["items"]["items"]["max"] == 3
    assert columns["image"]["width"]["min"] == 40
    assert columns["text"]["distinct"] == 7


def test_stats_count_numbers_that_are_not_finite(tmp_path: Path, answer: Answer) -> None:
    with MDSWriter(out=str(tmp_path), columns={"x": "float32"}) as writer:
        for value in (1.0, float("nan"), 3.0, float("inf")):
            writer.write({"x": np.float32(value)})
    _, found = answer("show", str(tmp_path), "--stats")
    assert found["datasets"][0]["stats"]["x"]["values"] == {
        "min": 1.0, "mean": 2.0, "max": 3.0, "not_finite": 2,
    }  # fmt: skip


def test_stats_tell_long_texts_apart_that_begin_alike(tmp_path: Path, answer: Answer) -> None:
    with MDSWriter(out=str(tmp_path), columns={"chat": "str", "turns": "json"}) as writer:
        for number in range(6):
            writer.write({"chat": "You are a " * 20 + str(number % 3), "turns": ["You are a " * 20, number // 2]})
    columns = answer("show", str(tmp_path), "--stats")[1]["datasets"][0]["stats"]
    assert [columns[name]["distinct"] for name in ("chat", "turns")] == [3, 3]


def test_a_page_shows_the_samples_beside_an_image_that_cannot_be_decoded(tmp_path: Path) -> None:
    whole, bomb = jpeg(1, width=4000), io.BytesIO()
    images.new("1", (20_000, 20_000)).save(bomb, "PNG")  # more pixels than Pillow opens
    with MDSWriter(out=str(tmp_path / "data"), columns={"image": "bytes", "label": "str"}) as writer:
        for number, image in enumerate((whole, whole[:-20], bomb.getvalue())):
            writer.write({"image": image, "label": f"of two\nlines {number}"})
    assert main(["show", str(tmp_path / "data"), "--page", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert page.count("<img ") == 1
    assert page.count("cannot be decoded") == 2


def test_a_page_of_no_samples_or_many_columns_stays_short(tmp_path: Path) -> None:
    for name, count in (("none", 0), ("wide", 1)):
        with MDSWriter(out=str(tmp_path / name), columns={f"c{k}": "int" for k in range(500)}) as writer:
            for _ in range(count):
                writer.write(dict.fromkeys((f"c{k}" for k in range(500)), 1))
        assert main(["show", str(tmp_path / name), "--page", str(tmp_path / "page.html")]) == 0
        assert len(re.search('<p class="about">(.*)</p>', (tmp_path / "page.html").read_text())[1]) < 400


def test_a_page_replaces_a_former_one_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with MDSWriter(out=str(tmp_path / "data"), columns={"about": "json"}) as writer:
        writer.write({"about": "half a character: \ud800"})
    path = tmp_path / "page.html"
    assert main(["show", str(tmp_path / "data"), "--page", str(path)]) == 0
    former = path.read_text(encoding="utf-8")
    assert "half a character: ?" in former

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shared_files, "publish", full)
    assert main(["show", str(tmp_path / "data"), "--page", str(path)]) == 2
    assert path.read_text(encoding="utf-8") == former
    assert sorted(one.name for one in tmp_path.iterdir()) == ["data", "page.html"]


def test_texts_do_not_act_on_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MDSWriter(out=str(tmp_path), columns={"text": "str"}) as writer:
        writer.write({"text": "\x1b[2Jred\nnew\u202e\x9b"})
    assert main(["show", str(tmp_path), "--samples", "1"]) == 0
    assert r"\x1b[2Jred\nnew\u202e\x9b" in capsys.readouterr().out


def test_numbers_that_are_not_finite_are_null_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = {"x": "float32", "v": "ndarray:float32:2", "d": "str_decimal"}
    with MDSWriter(out=str(tmp_path), columns=columns) as writer:
        writer.write({"x": np.nan, "v": np.array([1, np.inf], np.float32), "d": Decimal("1.10")})
    assert main(["show", str(tmp_path), "--samples", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["datasets"][0]["printed"] == [{"id": 0, "x": None, "v": [1.0, None], "d": "1.10"}]


def test_a_label_that_is_no_number_keeps_its_value(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path), columns={"label": "json"}) as writer:
        for label in (None, 1, "other", 9):
            writer.write({"label": label})
    (tmp_path / "manifest.json").write_text(json.dumps({"classes": {"label": ["daisy", "rose"]}}))
    assert main(["show", str(tmp_path), "--stats", "--page", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert re.findall("<dd>(.*?)</dd>", page) == ["none", "rose", "other", "9"]


def test_a_missing_bucket_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    moto = pytest.importorskip("moto.server", reason="a local S3 needs moto: uv sync --group test")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEY")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SECRET")
    server = moto.ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    try:
        endpoint = "http://{}:{}".format(*server.get_host_and_port())
        assert main(["show", "s3://nowhere/x", "--store-options", f"endpoint_url={endpoint}"]) == 2
    finally:
        server.stop()
    assert capsys.readouterr().err.count("there is no bucket 'nowhere'") == 1
