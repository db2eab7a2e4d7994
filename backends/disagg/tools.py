"""Tool calls: what a request offers, how the model's chat template has it write a call, and reading it back.

Two styles cover the supported families: `tagged`, JSON between `<tool_call>` and `</tool_call>` (Hermes, Qwen), and
`bare`, an answer that is nothing but JSON (Llama 3; Mistral, whose marker is a special token and so not in the text).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from backends.disagg.refusals import bad, unsupported

Style = Literal["tagged", "bare"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class Tools:
    """Validated `tools` and `tool_choice`."""

    definitions: tuple[dict[str, Any], ...]
    """As the client gave them: what chat templates expect."""
    forced: tuple[str, ...]
    """The answer must be a call of one of these; empty where the model is free."""

    def parameters(self, name: str) -> dict[str, Any]:
        """The JSON schema of a tool's arguments."""
        for definition in self.definitions:
            if definition["function"]["name"] == name:
                return dict(definition["function"].get("parameters") or {"type": "object"})
        raise KeyError(name)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(definition["function"]["name"] for definition in self.definitions)


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str
    """JSON"""
    id: str


def parse_tools(body: Mapping[str, Any]) -> Tools | None:
    """None where no tool may be called. Raises BackendError (400)."""
    given, choice = body.get("tools"), body.get("tool_choice")
    if given is not None and not isinstance(given, list):
        raise bad("tools", given, "use a list of functions")
    definitions = [_definition(f"tools[{index}]", tool) for index, tool in enumerate(given or [])]
    names = [definition["function"]["name"] for definition in definitions]
    if len(set(names)) != len(names):
        raise bad("tools", names, "give every function a name of its own")
    if choice in (None, "auto", "none"):
        forced: tuple[str, ...] = ()
    elif choice == "required":
        forced = tuple(names)
    elif isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or name not in names:
            raise bad("tool_choice", choice, f"name one of the tools: {', '.join(names) or 'there are none'}")
        forced = (name,)
    else:
        remedy = 'use "none", "auto", "required" or {"type": "function", "function": {"name": "…"}}'
        raise bad("tool_choice", choice, remedy)
    if choice == "required" and not definitions:
        raise bad("tool_choice", choice, "give `tools`, of which one is to be called")
    return None if choice == "none" or not definitions else Tools(tuple(definitions), forced)


def _definition(at: str, tool: Any) -> dict[str, Any]:
    remedy = 'use {"type": "function", "function": {"name": "…", "parameters": {…}}}'
    if not isinstance(tool, dict):
        raise bad(at, tool, remedy)
    if tool.get("type") != "function":
        raise unsupported(f"{at}.type", tool.get("type"), "the bundled cluster calls functions only")
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise bad(at, tool, remedy)
    if not isinstance(function.get("parameters") or {}, dict):
        raise bad(f"{at}.function.parameters", function["parameters"], "use a JSON schema")
    return tool


def call_grammar(tools: Tools, style: Style) -> str:
    """A Lark grammar (llguidance's dialect) of one call of a forced tool."""
    schemas = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": tools.parameters(name)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name in tools.forced
    ]
    schema = json.dumps({"anyOf": schemas, "x-guidance": JSON_STYLE})
    start = r'"<tool_call>\n" call "\n</tool_call>"' if style == "tagged" else "call"
    return f"start: {start}\ncall: %json {schema}"


JSON_STYLE: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One way to write JSON: a small model that may put blanks anywhere goes on putting them."""


class CallReader:
    """Tells calls from text in an answer as it comes. Whatever pieces it comes in, the result is the same.

    Blanks beside a call and before the first word are dropped. What looks like a call but is none, or of a tool
    that nobody offered, is text.
    """

    def __init__(self, style: Style, names: frozenset[str]) -> None:
        self._style = style
        self._names = names
        self._held = ""
        self._inside = False
        """After an opening tag; in the bare style: the answer may turn out to be a call."""
        self._begun = False
        """Something but blanks was shown since the beginning or the last call."""

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Take more text; (what is certainly text, the calls completed by it)."""
        self._held += text
        return self._tagged() if self._style == "tagged" else self._bare()

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The answer is over: what was held back."""
        held, self._held = self._held, ""
        if not self._inside:
            return held if self._begun else held.strip(), []
        if self._style == "tagged":
            return OPEN + held, []
        calls = self._read(held)
        return ("", calls) if calls else (held, [])

    def _bare(self) -> tuple[str, list[ToolCall]]:
        if not self._begun and not self._inside:
            first = self._held.lstrip()[:1]
            self._inside, self._begun = first in ("{", "["), first not in ("", "{", "[")
        if not self._begun:
            return "", []
        shown, self._held = self._held, ""
        return shown, []

    def _tagged(self) -> tuple[str, list[ToolCall]]:
        shown = ""
        calls: list[ToolCall] = []
        while True:
            if not self._inside:
                at = self._held.find(OPEN)
                ready = self._held[:at] if at >= 0 else self._held[: len(self._held) - _unfinished(self._held)]
                # Blanks wait for what comes after them: before a call they are dropped.
                text = ready.rstrip() if self._begun else ready.strip()
                shown += text
                self._begun = self._begun or bool(text)
                if at < 0:
                    kept = len(ready.rstrip())
                    self._held = self._held[kept:]
                    return shown, calls
                self._held, self._inside = self._held[at + len(OPEN) :], True
            end = self._held.find(CLOSE)
            if end < 0:
                return shown, calls
            inner, self._held, self._inside = self._held[:end], self._held[end + len(CLOSE) :], False
            if found := self._read(inner):
                calls += found
                self._begun = False
            else:
                shown += OPEN + inner + CLOSE
                self._begun = True

    def _read(self, text: str) -> list[ToolCall]:
        """The calls that `text` is; none where it is anything else."""
        try:
            value = json.loads(text)
        except ValueError:
            return []
        calls = []
        for one in value if isinstance(value, list) else [value]:
            if not isinstance(one, dict) or one.get("name") not in self._names:
                return []
            arguments = one.get("arguments", one.get("parameters", {}))
            written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            calls.append(ToolCall(one["name"], written, f"call_{secrets.token_hex(12)}"))
        return calls


def _unfinished(text: str) -> int:
    """The length of the longest end of `text` that begins an opening tag."""
    return next((n for n in range(min(len(OPEN) - 1, len(text)), 0, -1) if OPEN.startswith(text[-n:])), 0)
