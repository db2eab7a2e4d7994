"""The layering rules of docs/architecture.md hold, and a broken one would be caught."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("router", "policies", "backends")


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_every_layering_contract_holds() -> None:
    linted = lint_imports(ROOT)
    assert linted.returncode == 0, linted.stdout + linted.stderr
    assert "0 broken" in linted.stdout


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("backends/intruder.py", "import router"),
        ("backends/intruder.py", "import policies"),
        ("policies/intruder.py", "import backends.options"),
        ("policies/intruder.py", "import router"),
        ("backends/disagg/engine/intruder.py", "import backends.disagg.transfer"),
        ("backends/disagg/engine/scheduler.py", "import torch"),
    ],
)
def test_a_forbidden_import_breaks_a_contract(tmp_path: Path, module: str, forbidden: str) -> None:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / module).open("a") as source:
        source.write(f"\n{forbidden}\n")
    linted = lint_imports(tmp_path)
    assert linted.returncode != 0, f"{module} may {forbidden}:\n{linted.stdout}"
    assert "1 broken" in linted.stdout or "2 broken" in linted.stdout, linted.stdout
