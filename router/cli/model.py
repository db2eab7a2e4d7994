"""`splitroute model`: weights on this machine."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

from router.cli.parser import Parser, add_command

_LIST = """\
examples:
  splitroute model list                      names that can be pulled, and what is here already
"""
_PULL = """\
examples:
  splitroute model pull smollm2-135m         fetch, verify and cache; works offline afterwards
  splitroute model pull org/name             a model of the Hugging Face Hub
"""
_PATH = """\
examples:
  splitroute model path smollm2-135m         print where its files are
"""
_EXPORT = """\
examples:
  splitroute model export smollm2-135m ./smollm2             a Hugging Face folder, in bfloat16
  splitroute model export smollm2-135m ./f32 --dtype float32
"""


def register(commands: argparse._SubParsersAction[Parser], common: Parser) -> None:
    group = commands.add_parser("model", help="pull, list and export models", description="Weights on this machine.")
    actions = group.add_subparsers(title="commands", metavar="COMMAND", required=True)

    add = functools.partial(add_command, actions, common)
    listing = add("list", "show the models that can be pulled by name", _LIST)
    listing.set_defaults(run=_list, parser=listing)
    pulling = add("pull", "fetch a model, verify it and keep it", _PULL)
    pulling.add_argument("model", metavar="MODEL", help="a name from `splitroute model list`, or a Hub id org/name")
    pulling.set_defaults(run=_pull, parser=pulling)
    path = add("path", "print where a model's files are", _PATH)
    path.add_argument("model", metavar="MODEL", help="a name, a path or a Hub id")
    path.set_defaults(run=_path, parser=path)
    export = add("export", "write a model as a Hugging Face folder", _EXPORT)
    export.add_argument("model", metavar="MODEL", help="a name, a path or a Hub id")
    export.add_argument("folder", metavar="FOLDER", help="the folder to make")
    export.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="default: %(default)s"
    )
    export.set_defaults(run=_export, parser=export)


def _list(_: argparse.Namespace) -> int:
    from rich.table import Table

    from backends.models import MODELS, is_cached
    from router.cli.console import out

    shown = Table()
    for heading in ("name", "what it is", "size", "licence", "here"):
        shown.add_column(heading, justify="right" if heading == "size" else "left")
    for model in MODELS.values():
        shown.add_row(
            model.name, model.about, f"{model.size / 1e6:.0f} MB", model.licence, "yes" if is_cached(model) else "no"
        )
    out().print(shown)
    return 0


def _pull(args: argparse.Namespace) -> int:
    from backends.models import resolve
    from router.cli.console import download_bar, out

    with download_bar(args.model) as report:
        files = resolve(args.model, pull_missing=True, progress=report)
    out().print(f"{args.model} is here: {files.path}", markup=False, soft_wrap=True)
    return 0


def _path(args: argparse.Namespace) -> int:
    from backends.models import resolve

    print(resolve(args.model).path)
    return 0


def _export(args: argparse.Namespace) -> int:
    from backends.models import resolve
    from backends.models.export import export_hf
    from router.cli.console import err, out

    files = resolve(args.model)
    with err().status(f"writing {args.folder}"):
        export_hf(files, Path(args.folder).expanduser(), args.dtype)
    out().print(f"{args.model} as {args.dtype}: {args.folder}", markup=False, soft_wrap=True)
    return 0
