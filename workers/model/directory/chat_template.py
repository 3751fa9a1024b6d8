"""A model's chat template, in the dialect of Jinja that such templates use."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

OURS = ("messages", "add_generation_prompt")
"""Variables that callers cannot set."""

_FAULTS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
"""Errors of templates with messages that their authors did not foresee."""


class ChatTemplate:
    """A parsed template. Raises jinja2.TemplateSyntaxError if it is broken."""

    def __init__(self, source: str) -> None:
        self._template = _environment().from_string(source)

    def render(
        self, messages: Sequence[Mapping[str, str]], answer: bool, variables: Mapping[str, Any]
    ) -> str:
        """Return the prompt of a conversation. Raises jinja2.TemplateError if the template refuses it.

        Args:
            answer: Whether the prompt ends with the opening of the assistant's answer.
            variables: Further variables, such as `bos_token`.
        """
        try:
            return self._template.render(
                {"tools": None, "documents": None, **variables},
                messages=[dict(message) for message in messages],
                add_generation_prompt=answer,
            )
        except _FAULTS as error:
            raise jinja2.TemplateError(f"{type(error).__name__}: {error}") from error


class _Generation(jinja2.ext.Extension):
    """Accepts `{% generation %}…{% endgeneration %}`, which marks text to train on. Serving ignores it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
