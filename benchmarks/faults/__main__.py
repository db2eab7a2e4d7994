"""What a client gets when providers fail: every fault at ours, LiteLLM and Portkey, and ours under load.

    python -m benchmarks.faults --json faults.json --litellm bin/litellm --portkey node_modules/@portkey-ai/gateway

A peer that is not installed is left out, and that is said: `pip install 'litellm[proxy]'` (in an environment of its
own); `npm install --legacy-peer-deps @portkey-ai/gateway @hono/node-server@1.13.7 hono@4.6.10`, as with what npm takes
on its own Portkey 1.15.2 answers every stream with a 500.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from benchmarks.faults.load import run_hammer, run_hedge, run_mixed, run_overload
from benchmarks.faults.servers import Gateway, LiteLLM, Portkey, Splitroute
from benchmarks.faults.table import run_table
from benchmarks.report import machine, progress, show, write_json

_LOADS = {"mixed": run_mixed, "hammer": run_hammer, "hedge": run_hedge, "overload": run_overload}
_PARTS = ("table", *_LOADS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer requests")
    parser.add_argument("--only", metavar="PART,…", default=",".join(_PARTS), help=", ".join(_PARTS))
    parser.add_argument("--litellm", metavar="FILE", default=shutil.which("litellm"), help="its command")
    parser.add_argument("--portkey", metavar="DIR", type=Path, help="its npm package")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results there")
    arguments = parser.parse_args()
    chosen = arguments.only.split(",")
    if unknown := [name for name in chosen if name not in _PARTS]:
        parser.error(f"unknown part {unknown[0]!r}; there are {', '.join(_PARTS)}")
    results: dict[str, Any] = {"machine": machine(), "quick": arguments.quick}
    if "table" in chosen:
        results["table"] = run_table(_gateways(arguments.litellm, arguments.portkey))
    loads = [name for name in chosen if name in _LOADS]
    for name in progress(loads, "load"):
        results[name] = _LOADS[name](arguments.quick)
    for name in loads:
        rows = [
            (key, ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value))
            for key, value in results[name].items()
        ]
        show(f"{name}: {_LOADS[name].__doc__}", ("", "measured"), rows)
    write_json(arguments.json, results)


def _gateways(litellm: str | None, portkey: Path | None) -> list[Gateway]:
    gateways: list[Gateway] = [Splitroute()]
    if litellm is None:
        print("LiteLLM left out: no `litellm` command; --litellm says where one is")
    else:
        gateways.append(LiteLLM(litellm))
    if portkey is None or shutil.which("node") is None:
        print("Portkey left out: --portkey DIR, and `node`, are needed")
    else:
        gateways.append(Portkey(str(portkey / "build" / "start-server.js")))
    return gateways


if __name__ == "__main__":
    main()
