"""`deltafront chat`: a conversation in the terminal, about a document if one is given.

The document is prefilled once and kept as a session. Each question continues this session with the
conversation so far, except failed and stopped questions.
"""

import contextlib
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from deltafront.service.cli import terminal
from deltafront.service.cli.terminal import (
    ADDRESS,
    Address,
    Bearer,
    Keep,
    Method,
    Options,
    Recompute,
    Tls,
    err,
)
from deltafront.service.client import DeltafrontClient
from deltafront.service.errors import DeltafrontError, NotFound
from deltafront.service.request.answers import PrefillFinished

Message = dict[str, str]


def chat_command(
    *,
    file: Annotated[str | None, typer.Argument(help="A text file to ask about.")] = None,
    system: Annotated[str, typer.Option(help="The system message.")] = "",
    address: Address = ADDRESS,
    token: Bearer = "",
    tls: Tls = False,
    method: Method = "",
    option: Options = [],  # noqa: B006
    max_tokens: Annotated[int | None, typer.Option(help="The longest answer in tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature; 0 is greedy.")] = None,
    recompute: Recompute = None,
    keep: Keep = None,
) -> None:
    """Chat with the model: one question per line of standard input. Ctrl-C stops an answer, Ctrl-D ends."""
    if file == "-":
        terminal.fail("standard input is for questions: give the document as a file")
    opening = [_message("system", system)] if system else []
    if file is not None:
        opening.append(_message("user", terminal.read_text(file)))
    prefill = {"method": method, "options": terminal.read_options(option)}
    decode = {"max_tokens": max_tokens, "temperature": temperature, "recompute_blocks": recompute}
    with terminal.connect(address, token, tls) as client:
        conversation = Conversation(client, opening, file is not None, prefill, decode, keep)
        conversation.read_document()
        try:
            while (question := _question()) is not None:
                try:
                    conversation.ask(question)
                except DeltafrontError as error:
                    terminal.show_error(terminal.with_advice(error, address))
                except KeyboardInterrupt:
                    err.print("\nstopped")
        finally:
            conversation.close()


@dataclass
class Conversation:
    """A conversation, optionally about a document.

    Attributes:
        opening: Messages before the questions, including the document.
        prefill, decode: Options of the requests.
        keep: Seconds to keep the document's session.
    """

    client: DeltafrontClient
    opening: list[Message]
    has_document: bool
    prefill: dict[str, Any]
    decode: dict[str, Any]
    keep: float | None
    session: str | None = None
    turns: list[Message] = field(default_factory=list)

    def read_document(self) -> None:
        if not self.has_document:
            return
        with terminal.ProgressBar(err) as bar:
            for event in self.client.prefill(self.opening, session_ttl_s=self.keep, **self.prefill):
                if isinstance(event, PrefillFinished):
                    self.session = event.session.session_id
                else:
                    bar.show(event)

    def ask(self, question: str) -> None:
        """Send a question and print the answer. If the session is gone, first prefill the document again."""
        turns = [*self.turns, _message("user", question)]
        try:
            text = self._answer(turns)
        except NotFound:
            if self.session is None:
                raise
            err.print("The session is gone; prefilling the document again.")
            self.read_document()
            text = self._answer(turns)
        self.turns = [*turns, _message("assistant", text)]

    def _answer(self, turns: list[Message]) -> str:
        if self.session is None:
            source: dict[str, Any] = {"prompt": [*self.opening, *turns], **self.prefill}
        else:
            source = {"session_id": self.session, "append": turns}
        text, finish = terminal.stream_answer(self.client, {**source, **self.decode}, quiet=False)
        usage, ttft_s = finish.usage, finish.timings.ttft_seconds
        read, cached = usage.prompt_tokens - usage.cached_tokens, usage.cached_tokens
        err.print(f"{read} tokens prefilled, {cached} cached; first token after {ttft_s:.2f} s", style="dim")
        return text

    def close(self) -> None:
        if self.session is not None:
            with contextlib.suppress(DeltafrontError):
                self.client.release(self.session)


def _question() -> str | None:
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


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
