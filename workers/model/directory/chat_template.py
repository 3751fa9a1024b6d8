"""Chat templates, in the Jinja dialect of transformers.

`check_template` runs this module as a program, which parses a template and renders samples.
"""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

OURS = ("messages", "add_generation_prompt")
"""Template variables that callers cannot set."""

_FAULTS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
"""Exceptions that a template may raise for messages that its author did not expect."""


_CPU_S, _MEMORY = 5, 256 << 20
"""CPU seconds and bytes of memory that `check_template` allows. Ordinary templates take milliseconds
and a few MiB. Filling the memory takes far less than the time, even where new pages are slow."""
_LIMITS = {resource.RLIMIT_CPU: _CPU_S, resource.RLIMIT_AS: _MEMORY, resource.RLIMIT_CORE: 0}
_SAMPLES = (
    ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}),
    ({"role": "system", "content": "a"}, {"role": "user", "content": "b"}),
)


class ChatTemplate:
    """A parsed chat template. Raises jinja2.TemplateSyntaxError if the source is broken."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._template = _environment().from_string(source)

    def render(
        self, messages: Sequence[Mapping[str, Any]], answer: bool, variables: Mapping[str, Any]
    ) -> str:
        """Render a conversation into a prompt. Raises jinja2.TemplateError if the template refuses it.

        Args:
            answer: The template's add_generation_prompt: True if the prompt ends with the assistant's header.
            variables: Further template variables, such as `bos_token`.
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
    """Accepts the tags `{% generation %}…{% endgeneration %}`. They mark training text and have no effect
    here."""

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


def check_template(source: str, variables: Mapping[str, Any]) -> str | None:
    """Return the reason why a template cannot be used; None if it can.

    A template must not nest too deeply or take too much time or memory. It runs in another process, since
    jinja limits neither time nor memory. It may refuse the sample messages.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    asked = json.dumps({"source": source, "variables": dict(variables)})
    command = [sys.executable, "-m", __name__]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, env=environment, check=False)
    if done.returncode == 0:
        return done.stdout.strip() or None
    if -done.returncode in (signal.SIGXCPU, signal.SIGKILL):
        return f"a short conversation takes more than {_CPU_S} s to render"
    return (done.stderr.strip() or "it cannot be read").splitlines()[-1]


def _check_in_bounds(source: str, variables: Mapping[str, Any]) -> str:
    try:
        template = ChatTemplate(source)
        for messages in _SAMPLES:
            for answer in (False, True):
                template.render(messages, answer, variables)
    except jinja2.TemplateError as error:
        return "it nests too deeply" if isinstance(error.__cause__, RecursionError) else ""
    except RecursionError:
        return "it nests too deeply"
    except (MemoryError, OverflowError):
        return f"a short conversation takes more than {_MEMORY >> 20} MiB of memory to render"
    return ""


if __name__ == "__main__":
    for kind, most in _LIMITS.items():
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    print(_check_in_bounds(**json.load(sys.stdin)))
