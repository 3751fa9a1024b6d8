"""`deltafront chat`: a conversation in the terminal, about a document if one is given.

The document is read once and kept as a session. Each question goes to that session with what was said since:
only the conversation is read again. A question that fails, or whose answer is stopped, leaves no trace in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from ..client import DeltafrontClient
from ..errors import DeltafrontError, NotFound
from ..request.answers import PrefillFinished
from . import terminal
from .terminal import ADDRESS, Address, Bearer, Method, Options, Recompute, Tls, err

_Message = dict[str, str]


def chat_command(
    file: Annotated[str | None, typer.Argument(help="Text file to talk about.")] = None,
    system: Annotated[str, typer.Option(help="What the model is told first.")] = "",
    address: Address = ADDRESS,
    token: Bearer = "",
    tls: Tls = False,
    method: Method = "",
    option: Options = [],  # noqa: B006
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    recompute: Recompute = None,
    keep: Annotated[float | None, typer.Option(help="Seconds to keep the document.")] = None,
) -> None:
    """Talk with the model; questions from standard input, one a line. Ctrl-C stops an answer, Ctrl-D ends."""
    if file == "-":
        terminal.fail("standard input is for questions: give the document as a file")
    opening = [_said("system", system)] if system else []
    document = None if file is None else terminal.read_text(file)
    reading = {"method": method, "options": terminal.read_options(option)}
    answering = {"max_tokens": max_tokens, "temperature": temperature, "recompute_blocks": recompute}
    with terminal.calling(address, token, tls) as client:
        talk = Conversation(client, opening, document, reading, answering, keep)
        talk.read()
        try:
            while (question := _question()) is not None:
                with _forgiven(address):
                    talk.ask(question)
        finally:
            talk.end()


class Conversation:
    """What was said, and the session of the document. opening, document: what comes first; reading,
    answering: the client's options for reading a prompt and for answering."""

    def __init__(
        self,
        client: DeltafrontClient,
        opening: list[_Message],
        document: str | None,
        reading: dict[str, Any],
        answering: dict[str, Any],
        keep: float | None,
    ) -> None:
        self._client = client
        self._opening = opening if document is None else [*opening, _said("user", document)]
        self._has_document = document is not None
        self._reading = reading
        self._answering = answering
        self._keep = keep
        self._session: str | None = None
        self._turns: list[_Message] = []

    def read(self) -> None:
        """Make the document's session, if there is a document."""
        if not self._has_document:
            return
        with terminal.reading_bar(err) as bar:
            for event in self._client.prefill(self._opening, session_ttl_s=self._keep, **self._reading):
                if isinstance(event, PrefillFinished):
                    self._session = event.session.session_id
                else:
                    bar.show(event)

    def ask(self, question: str) -> None:
        """Print the answer as it comes. A document whose session is gone is read again."""
        turns = [*self._turns, _said("user", question)]
        try:
            text = self._answer(turns)
        except NotFound:
            if self._session is None:
                raise
            err.print("The session is gone; reading the document again.")
            self.read()
            text = self._answer(turns)
        self._turns = [*turns, _said("assistant", text)]

    def _answer(self, turns: list[_Message]) -> str:
        if self._session is None:
            source: dict[str, Any] = {"prompt": [*self._opening, *turns], **self._reading}
        else:
            source = {"session_id": self._session, "append": turns}
        text, finish = terminal.stream_answer(self._client, {**source, **self._answering}, quiet=False)
        usage, wait = finish.usage, finish.timings.ttft_seconds
        read = usage.prompt_tokens - usage.cached_tokens
        err.print(
            f"{read} tokens read, {usage.cached_tokens} kept; first token after {wait:.2f} s", style="dim"
        )
        return text

    def end(self) -> None:
        """Give the session's pages back."""
        if self._session is not None:
            with contextlib.suppress(DeltafrontError):
                self._client.release(self._session)


def _question() -> str | None:
    """The next line that is not empty; None at the end of the input."""
    question = ""
    while not question:
        err.print("> ", end="")
        try:
            question = input().strip()
        except (EOFError, KeyboardInterrupt):
            err.print()
            return None
        except UnicodeDecodeError:
            terminal.fail("standard input cannot be read: it is not UTF-8 text")
    return question


@contextlib.contextmanager
def _forgiven(address: str) -> Iterator[None]:
    """An answer that fails or is stopped does not end the conversation."""
    try:
        yield
    except DeltafrontError as error:
        terminal.complain(terminal.with_advice(error, address))
    except KeyboardInterrupt:
        err.print("\nstopped")


def _said(role: str, content: str) -> _Message:
    return {"role": role, "content": content}
