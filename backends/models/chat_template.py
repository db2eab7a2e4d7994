"""Chat templates: Jinja that comes with a model, so it runs in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from backends.models.errors import ModelError


class ChatTemplate:
    """Hugging Face's conventions for such templates: block trimming, `raise_exception`, `tojson`."""

    def __init__(self, source: str, bos_token: str, eos_token: str) -> None:
        from jinja2 import TemplateError
        from jinja2.meta import find_undeclared_variables
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._names = {"bos_token": bos_token, "eos_token": eos_token}
        self._error = TemplateError
        try:
            self.takes_tools = "tools" in find_undeclared_variables(environment.parse(source))
            self.source = source
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ModelError(f"the model's chat template cannot be read: {error}") from None

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
        """The conversation up to the assistant's next words. Raises ModelError where the template refuses."""
        flat = [{**message, "content": _text(message.get("content"))} for message in messages]
        try:
            return self._template.render(messages=flat, tools=tools, add_generation_prompt=True, **self._names)
        except (self._error, TypeError, ValueError, KeyError) as error:
            raise ModelError(f"the model's chat template refuses these messages: {error}") from None


def _text(content: Any) -> Any:
    """Text parts joined: most templates know only strings."""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, Mapping))
    return content


def _to_json(value: Any, indent: int | None = None) -> str:
    # Not Jinja's own, which escapes for HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise ValueError(message)
