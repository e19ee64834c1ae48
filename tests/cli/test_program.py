"""What all commands have in common: help, errors, exit codes, JSON, interrupts and pipes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lightning_stream
from lightning_stream import MDSWriter
from lightning_stream.cli import build_parser, main
from lightning_stream.cli.output import as_text
from lightning_stream.convert import convert

ROOT = Path(__file__).resolve().parent.parent.parent


def program(*arguments: str, before: str = "", **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, after some code."""
    code = f"import sys; {before}\nfrom lightning_stream.cli import main; sys.exit(main({list(arguments)!r}))"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, **kwargs)


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"lightning-stream {lightning_stream.__version__}\n"


def test_no_command_prints_the_help_as_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: lightning-stream ")
    assert "\nexit codes:\n  0 " in err


def test_python_m_names_itself_in_the_help() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lightning_stream", "convert", "--help"],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    assert done.stdout.startswith("usage: python -m lightning_stream convert ")


def test_every_command_has_help_and_json() -> None:
    (commands,) = (action for action in build_parser()._actions if hasattr(action, "choices") and action.choices)
    assert {"convert", "show", "check", "pull", "cache", "log", "position", "plan", "doctor"} <= set(commands.choices)
    for parser in commands.choices.values():
        assert "--json" in parser.format_help()
        assert "RUN" in parser.format_usage() or "--store-options " in parser.format_help()


OLD = "reshard inspect head preview stats verify lint merge lengths explain checkpoint diff simulate bench"


@pytest.mark.parametrize("old", [*OLD.split(), "cache verify", "cache path"])
def test_an_old_command_names_the_new_one(old: str, answer: Callable[..., tuple[int, Any]]) -> None:
    code, found = answer(*old.split(), "shards", "--out", "x")
    assert code == 2
    assert re.fullmatch(rf"`{old}` is now `lightning-stream [a-z]+ [^`]+`", found["error"])
    assert found["error"].split("`")[3].split()[1] not in OLD.split()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["chekc", "x"], "there is no command 'chekc'. Did you mean check?"),
        (["checkpoint", "convert", "last.ckpt"], "start_at(read_position(RUN), data)"),
        (["train", "+data=flowers"], "recipes live in the repository, not in the package; there, run: python train.py"),
        (["completion", "bash"], "shtab --shell bash lightning_stream.cli.build_parser"),
        (["show"], "the following arguments are required: PATH|URL. See: lightning-stream show --help"),
        (["show", "-dash"], "Pass the path -dash as ./-dash"),
        (["show", "nowhere"], "nowhere holds no files"),
        (["show", "x", "page.html"], "unrecognized arguments: page.html. See: lightning-stream show --help"),
        (["show", "x", "--sampels", "1"], "--sampels. Did you mean --samples? See: lightning-stream show --help"),
        (["check", "s3//bucket/x"], "Did you mean s3://BUCKET/FOLDER?"),
        (["show", "x", "--store-options", "endpoint"], "--store-options: expected KEY=VALUE"),
        (["show", "s3://b", "--store-options", "secret_access_key=hush"], "a secret must not be on a command line"),
        (["show", "s3://b", "--store-options", "AWS_SECRET_ACCESS_KEY=hush"], "a secret must not be on a command"),
        (["show", "s3://b", "--store-options", "connection_string=AccountName=a;AccountKey=hush"], "a secret must"),
        (["show", "s3://b", "--store-options", "x=AccountName=a;AccountKey=hush"], "a secret must"),
        (["show", "s3://b", "--store-options", "headers={'Authorization':'hush'}"], "a secret must"),
        (["show", "s3://b", "--store-options", "Hush+1"], "expected KEY=VALUE"),
        (["show", "s3://b", "--store-option", "k=hush"], "--store-option. Did you mean --store-options?"),
        (["show", "s3://b", "--password", "hush"], "unrecognized arguments: --password."),
        (["show", "s3://b", "--token=hush"], "unrecognized arguments: --token."),
        (["show", "azure://c/x?sv=1&sig=hushhush"], "takes no query"),
        (["position", "none.ckpt"], "there is no checkpoint at"),
        (["position", "."], "there is no checkpoint at"),
        (["convert", "nowhere.csv", "out"], "nowhere.csv"),
        (["plan", "--global-batch-size", "8"], "plan takes one of PATH|URL, --stream"),
        (["convert", "nowhere.csv"], "convert takes SOURCE and OUT, or one DATASET with --lengths"),
        (["log", "nowhere", "--merge"], "index.json"),
        (["doctor", "--read"], "--read measures reading a dataset: pass PATH|URL"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    answer: Callable[..., tuple[int, Any]],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-dash").mkdir()
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"error: [^\n]+\n", err)
    assert sentence in err
    assert "hush" not in err.lower()
    assert "hush" not in err
    code, data = answer(*arguments)
    assert code == 2
    assert data == {"error": err.removeprefix("error: ").strip()}


def test_a_missing_package_is_one_line_that_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").write_bytes(b"x")
    done = program("position", str(tmp_path), before="sys.modules['torch'] = None")
    assert done.returncode == 2, done.stderr
    assert re.fullmatch(r"error: [^\n]*'torch'[^\n]*lightning-stream\[torch\]'\n", done.stderr)
    done = program("show", "s3://bucket/x", before="sys.modules['botocore'] = None")
    assert done.returncode == 2, done.stderr
    assert re.fullmatch(r"error: [^\n]*'botocore'[^\n]*lightning-stream\[s3\]'\n", done.stderr)


def test_ctrl_c_is_one_line_and_exit_code_130(shards: Path) -> None:
    # The signal comes while a command's modules are imported, and while a command reads.
    during_import = "import os, signal, importlib.abc\nclass Hook(importlib.abc.MetaPathFinder):\n"
    during_import += "    def find_spec(self, name, path=None, target=None):\n"
    during_import += f"        if name.endswith('cli.check'): os.kill(os.getpid(), {int(signal.SIGINT)})\n"
    during_import += "sys.meta_path.insert(0, Hook())"
    during_read = "import os\nfrom lightning_stream.stores import LocalStore\n"
    during_read += f"LocalStore.get = lambda *a: os.kill(os.getpid(), {int(signal.SIGINT)})"
    for before in (during_import, during_read):
        done = program("check", str(shards), "--json", before=before, timeout=250)
        assert (done.returncode, done.stderr) == (130, "error: interrupted\n")
        assert json.loads(done.stdout) == {"error": "interrupted"}


def test_a_closed_pipe_is_quiet(shards: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    code = f"import sys; from lightning_stream.cli import main; sys.exit(main(['show', {str(shards)!r}]))"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True, check=False, env=env
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_an_output_that_cannot_be_written_is_one_line(shards: Path) -> None:
    code = f"import sys; from lightning_stream.cli import main; sys.exit(main(['show', {str(shards)!r}, '--json']))"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    assert done.returncode == 2
    assert re.fullmatch(r"error: the output: [^\n]*No space left on device\n", done.stderr)


def test_a_program_without_an_output_succeeds(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["show", str(shards)]) == 0


def test_a_program_without_stderr_succeeds(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr", None)
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"x": 1}\n{"x": 2}\n')
    assert main(["check", str(shards)]) == 0
    assert convert(lines, tmp_path / "out", num_workers=1, progress_bar=True).num_samples == {"": 2}
    with MDSWriter(out=tmp_path / "written", columns={"x": "int"}, progress_bar=True) as writer:
        writer.write({"x": 1})
    capsys.readouterr()
    assert main(["check", str(tmp_path / "nothing"), "--json"]) == 2
    assert "no such file" in json.loads(capsys.readouterr().out)["error"]


def test_large_numbers_have_no_exponent() -> None:
    assert as_text("mean", [27896.4, 1234567.0, 0.000012, 1e300]) == "27,896, 1,234,567, 1.2e-05, 1e+300"


def test_a_store_that_does_not_answer_is_named_within_seconds(answer: Callable[..., tuple[int, Any]]) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))  # and does not listen: connections are refused
        endpoint = f"endpoint_url=http://127.0.0.1:{server.getsockname()[1]}"
        begin = time.monotonic()
        for command in ("show", "check", "pull", "position"):
            code, found = answer(command, "s3://bucket/x", "--store-options", endpoint)
            assert code == 2
            assert "s3://bucket/x" in found["error"]
    assert time.monotonic() - begin < 60


def test_pipes_get_no_control_codes(shards: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    converted = program("convert", str(tmp_path / "rows.jsonl"), str(tmp_path / "out"))
    verified = program("check", str(shards))
    for done in (converted, verified):
        assert done.returncode == 0, done.stderr
        assert not re.search("[\r\x1b]", done.stdout + done.stderr)


def test_looking_at_datasets_needs_no_torch(shards: Path) -> None:
    for command in (["show", str(shards)], ["check", str(shards)]):
        done = program(*command, before="sys.modules['torch'] = None")
        assert done.returncode == 0, done.stderr


def test_a_terminal_that_lacks_characters_gets_escapes(tmp_path: Path) -> None:
    with MDSWriter(out=str(tmp_path), columns={"name": "str"}) as writer:
        writer.write({"name": "café ☕"})
    for options in ({}, {"PYTHONIOENCODING": "ascii"}, {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}):
        done = subprocess.run(
            [sys.executable, "-m", "lightning_stream", "show", str(tmp_path), "--samples", "1"],
            capture_output=True, check=False, env={**os.environ, "PYTHONPATH": str(ROOT), **options},
        )  # fmt: skip
        shown = "café ☕".encode() if not options else rb"caf\xe9 \u2615"
        assert (done.returncode, shown in done.stdout) == (0, True), done


def test_columns_and_files_that_are_not_there_are_named(
    shards: Path, tmp_path: Path, answer: Callable[..., tuple[int, Any]]
) -> None:
    code, found = answer("show", str(shards), "--columns", "label", "--stats", "--samples", "3")
    assert (code, [list(one["stats"]) for one in found["datasets"]]) == (0, [["label"], ["label"]])
    assert "has no column nope; it has label, name, x" in answer("show", str(shards), "--columns", "nope")[1]["error"]
    (tmp_path / "file").touch()
    error = answer("show", str(shards / "val"), "--page", str(tmp_path / "file" / "page.html"))[1]["error"]
    assert error == f"{tmp_path}/file: File exists. Check the path"
    assert answer("show", str(shards / "val"), "--page", str(tmp_path / "new" / "page.html"))[0] == 0
    error = answer("convert", str(shards / "val"), "--lengths", "label")[1]["error"]
    assert "--lengths COLUMN=MODULE:FUNCTION" in error
