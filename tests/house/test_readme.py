"""The documents tell the truth where a test can tell: commands exist and links lead somewhere."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


def blocks(text: str) -> str:
    """What stands in fenced code blocks."""
    return "\n".join(re.findall(r"^```[a-z]*\n(.*?)^```", text, flags=re.S | re.M))


def anchors(text: str) -> set[str]:
    """The anchors that a forge makes of a document's headings."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve(document: Path) -> None:
    text = document.read_text()
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        missing = not target.exists() or (anchor and anchor not in anchors(target.read_text()))
        if missing:
            broken.append(link)
    assert not broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_make_commands_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    named = set(re.findall(r"^\s*make ([a-z]+)", blocks(document.read_text()), flags=re.M))
    assert named <= targets


def test_readme_names_its_two_commands() -> None:
    readme = blocks((ROOT / "README.md").read_text())
    assert "make run" in readme
    assert "make test" in readme


@pytest.mark.parametrize("target", ["setup", "run", "test", "lint", "bench", "clean"])
def test_make_target_is_complete(target: str) -> None:
    planned = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert planned.returncode == 0, planned.stderr
