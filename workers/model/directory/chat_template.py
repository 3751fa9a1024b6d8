"""A model's chat template: the dialect of Jinja that such templates are written in, and its variables."""

from __future__ import annotations

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
"""Variables of a template that only a rendering itself sets."""

_FAULTS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
"""Expressions in a template may raise these, for messages that its author did not think of."""


class ChatTemplate:
    """Raises jinja2.TemplateSyntaxError."""

    def __init__(self, source: str) -> None:
        self._template = _environment().from_string(source)

    def render(
        self, messages: Sequence[Mapping[str, str]], answer: bool, variables: Mapping[str, Any]
    ) -> str:
        """answer: end with the assistant's opening. variables: such as `bos_token`; tools and documents are
        None without them. Raises jinja2.TemplateError."""
        try:
            return self._template.render(
                {"tools": None, "documents": None, **variables},
                messages=[dict(message) for message in messages],
                add_generation_prompt=answer,
            )
        except _FAULTS as error:
            raise jinja2.TemplateError(f"{type(error).__name__}: {error}") from error


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what to train on; for serving it means nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    """The dialect that chat templates are written in, without access to anything outside."""
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
