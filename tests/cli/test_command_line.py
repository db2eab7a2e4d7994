"""The command line's manners: help, suggestions, exit statuses, and never a traceback unasked."""

import argparse
import subprocess
import sys
from importlib.metadata import version

import pytest

from router.cli import main
from router.cli.errors import CliError, told

COMMANDS = [
    ["up"],
    ["demo"],
    ["model", "list"],
    ["model", "pull"],
    ["model", "path"],
    ["model", "export"],
    ["policy", "check"],
    ["explain"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_of_every_command_has_examples(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"usage: splitroute {' '.join(command)}" in shown
    assert f"  splitroute {' '.join(command)}" in shown.partition("examples:")[2]


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n    {name} " in shown for name in ("up", "demo", "model", "policy", "explain"))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"splitroute {version('splitroute')}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "COMMAND"),
        (["upp"], "unknown command 'upp'; did you mean 'up'?"),
        (["model", "lst"], "unknown command 'lst'; did you mean 'list'?"),
        (["frobnicate"], "known: up, demo, cluster, worker, model, policy, explain"),
        (["up", "--polcy", "x.yaml"], "unknown option --polcy; did you mean '--policy'?"),
        (["up", "--poli", "x.yaml"], "unknown option --poli"),
        (["up", "now"], "unexpected argument 'now'"),
        (["up", "--port", "70000"], "'70000' is not a port: give a number from 0 to 65535"),
        (["explain", "--model", "chat"], "--policy"),
        (
            ["explain", "--policy", "p.yaml", "--model", "chat", "--prompt-tokens", "0"],
            "'0' is not a whole number of at least 1",
        ),
        (
            ["explain", "--policy", "p", "--model", "c", "--prompt-tokens", "9", "--ttft-ms", "soon"],
            "'soon' is not a number of milliseconds above 0",
        ),
    ],
)
def test_a_wrong_command_line_exits_2_and_says_what_is_meant(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert "--help" in captured.err
    assert captured.out == ""


def test_a_missing_policy_file_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", "check", "nowhere.yaml"]) == 1
    captured = capsys.readouterr()
    assert "nowhere.yaml: no such file" in captured.err
    assert "Traceback" not in captured.err


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(FileNotFoundError):
        main(["policy", "check", "nowhere.yaml", "--debug"])


def test_module_runs_like_the_command() -> None:
    ran = subprocess.run([sys.executable, "-m", "router.cli", "upp"], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2
    assert "did you mean 'up'?" in ran.stderr


def test_a_closed_pipe_is_no_traceback() -> None:
    shell = f"{sys.executable} -m router.cli model list --help | head -c 1"
    ran = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in ran.stderr


def test_a_missing_extra_names_the_install_command() -> None:
    shown = told(ModuleNotFoundError("No module named 'torch'", name="torch"))
    assert shown.hint == "pip install 'splitroute[local]'"
    assert told(ModuleNotFoundError("No module named 'litellm.x'", name="litellm.x")).hint == (
        "pip install 'splitroute[providers]'"
    )


def test_an_unexpected_error_points_at_debug() -> None:
    shown = told(ZeroDivisionError("division by zero"))
    assert shown.message == "unexpected ZeroDivisionError: division by zero"
    assert shown.hint is not None and "--debug" in shown.hint


def test_ctrl_c_exits_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("router.cli.policy._check", interrupted)
    assert main(["policy", "check", "any.yaml"]) == 130


def test_a_failure_prints_message_and_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(_: argparse.Namespace) -> int:
        raise CliError("port [8080] is taken", hint="--port 0")

    monkeypatch.setattr("router.cli.policy._check", failing)
    assert main(["policy", "check", "any.yaml"]) == 1
    assert capsys.readouterr().err == "splitroute: port [8080] is taken\n  try: --port 0\n"
