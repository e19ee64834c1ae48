"""Installed from a wheel, far from a checkout: the configs come along, and a user's folder adds to them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
TINY = ["data.image_size=32", "+model.network_options.width_mult=0.25", "scale=cpu", "trainer.max_epochs=1"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("uv") is None, reason="wheels are built with uv: pip install uv"),
]


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=250, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel, and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    built = run("uv", "build", "--wheel", "-q", "-o", str(folder), cwd=ROOT)
    if built.returncode:
        pytest.skip(f"the wheel's build tools are not here; `uv build --wheel` needs the network once: {built.stderr}")
    (wheel,) = folder.glob("*.whl")
    done = run(
        "uv", "pip", "install", "-q", "--no-deps", "--python", sys.executable, "--target", str(folder / "site"),
        str(wheel), cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "site"


def test_an_installed_wheel_trains_with_its_own_configs_and_the_user_s(site: Path, tmp_path: Path) -> None:
    (tmp_path / "mine" / "data").mkdir(parents=True)
    settings = "drawn_count: 30\nheld_out: 0.2\nnum_workers: 0\n"
    (tmp_path / "mine" / "data" / "mine.yaml").write_text(f"defaults: [flowers]\n{settings}")
    script = [sys.executable, str(site / "bin" / "lightning-stream")]
    where = run(
        sys.executable, "-c", "import lightning_stream; print(lightning_stream.__file__)",
        cwd=tmp_path, PYTHONPATH=str(site),
    )  # fmt: skip
    assert where.stdout.startswith(str(site))
    shown = run(*script, "train", "--help", cwd=tmp_path, PYTHONPATH=str(site))
    assert "lightning-stream train +data=flowers" in shown.stdout, shown.stderr
    done = run(*script, "train", "--config-dir", "mine", "+data=mine", *TINY, cwd=tmp_path, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs" / "mine" / "predictions.png").is_file()
    told = run(*script, "explain", "runs/mine", cwd=tmp_path, PYTHONPATH=str(site))
    assert "epoch         1" in told.stdout, told.stderr


def test_a_program_of_the_user_s_own_finds_the_packaged_configs(site: Path, tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "top.yaml").write_text(
        "defaults: [data: flowers, store: local, _self_]\nroot: r\nseed: 3\n"
        "hydra: {searchpath: ['pkg://lightning_stream.configs']}\n"
    )
    program = (
        "import hydra\nimport lightning_stream.recipes.resolvers\n"
        "@hydra.main(version_base='1.3', config_path='conf', config_name='top')\n"
        "def main(config): print(config.data.remote, config.data.seed)\nmain()\n"
    )
    (tmp_path / "own.py").write_text(program)
    done = run(sys.executable, "own.py", cwd=tmp_path, PYTHONPATH=str(site))
    assert done.stdout.strip() == "r/shards/flowers 3", done.stderr
