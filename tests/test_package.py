"""The package as others install it: what the wheel holds, what its page shows, and its types in a user's project."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
USER = ROOT / "tests" / "support" / "typed_user.py"
CHECKERS = {
    "mypy": ["mypy", "--strict", "--config-file=", "--cache-dir=types"],
    "basedpyright": ["basedpyright", "--level", "error", "--pythonpath", sys.executable],
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    if not shutil.which("uv"):
        pytest.skip("no uv, which builds the wheel: pip install uv")
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(["uv", "build", "--quiet", "--wheel", "--out-dir", out, ROOT], check=True)
    return zipfile.ZipFile(next(out.glob("*.whl")))


@pytest.mark.slow
def test_a_wheel_holds_the_package_alone_with_its_types(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"lightning_stream"}
    assert "lightning_stream/py.typed" in names
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "lightning_stream").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules


@pytest.mark.slow
def test_the_page_of_the_package_has_no_link_into_the_repository(wheel: zipfile.ZipFile) -> None:
    name = next(name for name in wheel.namelist() if name.endswith("METADATA"))
    metadata = message_from_string(wheel.read(name).decode())
    assert metadata["Requires-Python"] == "<3.16,>=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    page = metadata.get_payload()
    assert isinstance(page, str)
    links = re.findall(r"\]\((.+?)\)", page)
    assert len(links) > 10
    assert all(link.startswith(("https://", "http://")) for link in links)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("checker", [pytest.param("mypy", marks=pytest.mark.nightly), "basedpyright"])
def test_a_users_project_is_typed(checker: str, tmp_path: Path) -> None:
    """A right program has no error, and one with two mistakes has those two. CI's mypy checks the right one, too."""
    if find_spec(checker) is None:
        pytest.skip(f"no {checker}: uv sync --group lint")
    right = USER.read_text()
    (tmp_path / "right.py").write_text(right)
    (tmp_path / "wrong.py").write_text(right.replace("shuffle=True", "shufle=True").replace("-> int:", "-> str:"))
    command = [sys.executable, "-m", *CHECKERS[checker], "right.py", "wrong.py"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 1, run.stdout + run.stderr
    errors = [line for line in run.stdout.splitlines() if " error" in line and not re.match(r"\d+ error|Found", line)]
    assert len(errors) == 2, errors
    assert all("wrong.py" in line for line in errors)
    assert any("shufle" in line for line in errors)
