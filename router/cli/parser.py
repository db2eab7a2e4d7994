"""argparse with the manners the CLI wants: it suggests what was meant, and says where to read on."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

USAGE = 2
"""Exit status for a command line that cannot be understood."""


class Parser(argparse.ArgumentParser):
    """Options are never guessed from a prefix; a wrong word gets a suggestion; usage errors exit 2."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}", file=sys.stderr)
        print(f"  try: {self.prog} --help", file=sys.stderr)
        raise SystemExit(USAGE)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        # The one place argparse leaves to put a suggestion beside an unknown command.
        if isinstance(action.choices, Iterable) and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            what = "command" if isinstance(action, argparse._SubParsersAction) else "value"
            raise argparse.ArgumentError(
                None if what == "command" else action,
                f"unknown {what} {value!r}{_suggest(str(value), choices)}; known: {', '.join(choices)}",
            )

    def refuse_unknown(self, words: Sequence[str]) -> NoReturn:
        """Exit 2 over words that no argument takes."""
        options = sorted(set(re.findall(r"--[a-z][a-z-]*", self.format_help())))
        word = words[0].partition("=")[0]
        if word.startswith("-"):
            self.error(f"unknown option {word}{_suggest(word, options)}")
        self.error(f"unexpected argument {word!r}")


def add_command(
    actions: argparse._SubParsersAction[Parser], common: Parser, name: str, about: str, examples: str
) -> Parser:
    """A command of a group: `about` is its help, and with a capital and a full stop its description."""
    return actions.add_parser(
        name, parents=[common], help=about, description=f"{about[0].upper()}{about[1:]}.", epilog=examples
    )


class Version(argparse.Action):
    """Print the installed version and exit; looked up only when asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import version

        print(f"splitroute {version('splitroute')}")
        parser.exit()


def _suggest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def port(text: str) -> int:
    """A TCP port; 0 takes a free one."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: give a number from 0 to 65535")
    return value


def positive(text: str) -> int:
    """A whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def milliseconds(text: str) -> float:
    """A latency goal, in milliseconds, above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of milliseconds above 0")
    return value
