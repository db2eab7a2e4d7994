"""The hand-over and a cluster that survives, measured: what splitting costs and saves, and what kills do to it.

head      4 streams decode while 1,500-token prompts arrive: split (shm, tcp) against unified
codecs    each KV codec's size, speed and loss
link      1 Gbit/s and 100 Mbit/s between prefill and decode: raw against the adaptive codec (root, iproute2)
goodput   the highest rate at which 90 % meet their goals: unified, split, adaptive
kills     workers killed at random under load: answers, pauses, prompts computed twice, what is left behind

python -m benchmarks.disagg --json results.json
python -m benchmarks.disagg --quick --only head
python -m benchmarks.disagg --only goodput --traces FOLDER_OF_AZURE_CSVS
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.handover import codec_quality, goodput, head_of_line, kills, link
from benchmarks.report import machine, show, write_json


def _show_head(result: dict[str, Any]) -> None:
    rows = []
    for name in head_of_line.MODES:
        one = result[name]
        itl, kv = one["itl_ms"], one.get("kv_exposed_ms")
        exposed = f"{kv['p50']:.1f} / {kv['p99']:.1f}" if kv else "–"
        rows.append([name, itl["p50"], itl["p99"], itl["max"], f"{one['long_ttft_s']:.2f}", exposed, one["gaps"]])
    show(
        f"{head_of_line.STREAMS} streams decoding while {head_of_line.LONG_PROMPT}-token prompts arrive",
        ["mode", "ITL p50 ms", "p99 ms", "max ms", "long TTFT s", "KV exposed p50 / p99 ms", "gaps"],
        rows,
    )
    for name, ratio in result["ratios"].items():
        print(f"{name.replace('_', ' ')}: {ratio}")


def _show_codecs(result: dict[str, Any]) -> None:
    columns = list(next(iter(result.values())))
    rows = [
        [name, *(one[column] if column != "ratio" else f"{one[column]:.2f}" for column in columns)]
        for name, one in result.items()
    ]
    show("KV codecs", ["codec", *(column.replace("_", " ") for column in columns)], [[str(c) for c in r] for r in rows])


def _show_link(result: dict[str, Any]) -> None:
    if "skipped" in result:
        return
    rows = []
    for rate, one in result.items():
        for codec in ("raw", "adaptive"):
            facts = one[codec]
            rows.append([rate, codec, *(f"{facts[key]:.3f}" for key in ("new_s", "cached_s", "four_at_once_s"))])
        ratios = one["raw_over_adaptive"]
        rows.append(
            [rate, "raw ÷ adaptive", *(f"{ratios[key]:.2f}" for key in ("new_s", "cached_s", "four_at_once_s"))]
        )
    columns = ["link", "codec", "new prompts s", "prompts cached at the prefill worker s", "four new ones at once s"]
    show(f"seconds until the decode worker's first token, {link.PROMPT}-token prompts", columns, rows)


def _show_kills(result: dict[str, Any]) -> None:
    rows = []
    for name, one in result.items():
        left = one["left_behind"]
        behind = sum(left[key] for key in ("blocks", "leases", "requests")) + sum(left["more_than_before"].values())
        rows.append(
            [
                name.replace("_", " "),
                one["kills"],
                one["answers"],
                one["different_from_undisturbed"],
                one["failed"],
                one["interrupted_streams"],
                f"{one['pause_p50_ms']:.0f} / {one['pause_p95_ms']:.0f}",
                f"{one['prompt_tokens_prefilled']:,} / {one['prompt_tokens_sent']:,}",
                behind,
            ]
        )
    columns = ["killed", "kills", "answers", "different", "failed", "interrupted", "pause p50 / p95 ms"]
    show("workers killed under load", [*columns, "prompt tokens computed / sent", "left behind"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.disagg",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a few rounds of each, not for the record")
    parser.add_argument("--only", help="parts by name, with commas between them (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--traces", type=Path, metavar="FOLDER", help="Azure LLM inference traces (*.csv), for goodput")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="for head")
    arguments = parser.parse_args()
    model, quick = arguments.model, arguments.quick
    parts: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[dict[str, Any]], None]]] = {
        "head": (lambda: head_of_line.run(model, quick, arguments.dtype), _show_head),
        "codecs": (lambda: codec_quality.run(model, quick), _show_codecs),
        "link": (lambda: link.run(model, quick), _show_link),
        "goodput": (lambda: goodput.run(model, quick, arguments.traces), goodput.plot),
        "kills": (lambda: kills.run(model, quick), _show_kills),
    }
    chosen = arguments.only.split(",") if arguments.only else list(parts)
    if unknown := [name for name in chosen if name not in parts]:
        parser.error(f"unknown part {unknown[0]!r}; there are {', '.join(parts)}")
    logging.getLogger("splitroute").setLevel(logging.CRITICAL)  # workers die here on purpose
    results: dict[str, Any] = {"machine": machine(), "model": model, "quick": quick}
    for name in chosen:
        run, show_part = parts[name]
        results[name] = run()
        show_part(results[name])
        write_json(arguments.json, results)


if __name__ == "__main__":
    main()
