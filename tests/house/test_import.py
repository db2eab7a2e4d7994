"""What an import drags in: seconds of torch or litellm never load before something uses them."""

import json
import subprocess
import sys

import pytest

HEAVY = {"torch", "litellm", "transformers", "numpy", "safetensors", "tokenizers", "openai"}


def loaded_by(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after running `code`."""
    report = "import json, sys; print(json.dumps([name.partition('.')[0] for name in sys.modules]))"
    ran = subprocess.run([sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return set(json.loads(ran.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "code",
    [
        "import router",
        "from router import Router, SyncRouter",
        "import router.cli",
        "import policies",
        "import backends",
        "import backends.models",
        "import backends.disagg.engine.scheduler, backends.disagg.engine.blocks",
    ],
)
def test_import_loads_nothing_heavy(code: str) -> None:
    assert not loaded_by(code) & HEAVY


def test_help_loads_no_room_it_does_not_need() -> None:
    loaded = loaded_by("from router.cli import main\nassert main(['--help']) == 0")
    assert not loaded & (HEAVY | {"rich", "pydantic", "uvicorn", "starlette", "ruamel"})
