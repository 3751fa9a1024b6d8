"""Requests of every kind over gRPC and HTTP, including invalid, cancelled and repeated ones, so that every
dashboard panel has data."""

from __future__ import annotations

import contextlib
import itertools
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from deltafront.service.client import DeltafrontClient, DeltafrontError, PrefillFinished, Token

_ANSWER: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
_SPARSE = {"min_tokens": 0}
_METHODS = ("dense", "dpxa", "xattention", "dpxa+delta")


class Traffic:
    """A source of requests. grpc: host and port. http: URL of the HTTP API. model: the model's name. text:
    the text for prompts. lengths: lengths of prompts in characters, the shortest first."""

    def __init__(self, grpc: str, http: str, model: str, text: str, lengths: Sequence[int]) -> None:
        self._client = DeltafrontClient(grpc)
        self._http = http
        self._model = model
        self._text = text
        self._lengths = lengths
        self._begins = 0

    def close(self) -> None:
        self._client.close()

    @property
    def kinds(self) -> Sequence[Callable[[], None]]:
        """Return the kinds of requests: a prompt of each length, with alternating methods, and all others."""
        reads = [
            partial(self.read, *one) for one in zip(self._lengths, itertools.cycle(_METHODS), strict=False)
        ]
        return (*reads, self.session, self.chat, self.refused, self.wrong, self.cancelled, self.stopped)

    def round(self) -> None:
        """Send one request of each kind."""
        for kind in self.kinds:
            kind()

    def _prompt(self, length: int) -> str:
        """Make a prompt without a prefix hit."""
        self._begins = (self._begins + 997) % max(len(self._text) - length, 1)
        return self._text[self._begins : self._begins + length]

    def read(self, length: int, method: str) -> None:
        options = {} if method == "dense" else _SPARSE
        _read(self._client.generate(self._prompt(length), method=method, options=options, **_ANSWER))

    def session(self) -> None:
        """Send a document, a question to it, and a prompt that begins with the document."""
        document = self._prompt(self._lengths[1])
        *_, made = self._client.prefill(document, session_ttl_s=60, method="dense")
        assert isinstance(made, PrefillFinished)
        session = made.session.session_id
        _read(self._client.generate(session_id=session, append="\nWho is speaking?", **_ANSWER))
        _read(self._client.generate(document, append="\nWhere is it?", method="dense", **_ANSWER))
        self._client.release(session)

    def chat(self) -> None:
        """Stream a chat over OpenAI's API."""
        message = {"role": "user", "content": self._prompt(self._lengths[0])}
        body = {"model": self._model, "messages": [message], "max_tokens": 8, "stream": True}
        with self._post("/v1/chat/completions", body) as reply:
            assert b"[DONE]" in reply.read()

    def refused(self) -> None:
        """Request an answer that is longer than all pages."""
        _expect("resource_exhausted", self._client.generate("Call me", max_tokens=100_000, ignore_eos=True))

    def wrong(self) -> None:
        """Send invalid requests over gRPC and HTTP."""
        _expect("invalid_argument", self._client.generate("Call me", max_tokens=-1))
        _expect("not_found", self._client.generate(session_id="gone.x", append="Who?"))
        body = {"model": self._model, "messages": []}
        with contextlib.suppress(urllib.error.HTTPError), self._post("/v1/chat/completions", body):
            raise AssertionError("an empty chat was answered")

    def cancelled(self) -> None:
        events: Any = self._client.generate(self._prompt(self._lengths[0]), max_tokens=500, ignore_eos=True)
        next(event for event in events if isinstance(event, Token))
        events.close()

    def stopped(self) -> None:
        _read(self._client.generate("Call me Ishmael. " * 8, max_tokens=64, stop=("e",)))

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        content = json.dumps(body).encode()
        request = urllib.request.Request(self._http + path, content, {"content-type": "application/json"})
        return urllib.request.urlopen(request, timeout=600)


def _read(events: Iterable[object]) -> None:
    for _event in events:
        pass


def _expect(code: str, events: Iterable[object]) -> None:
    try:
        _read(events)
    except DeltafrontError as error:
        assert error.code == code, error
    else:
        raise AssertionError(f"there was no {code}")
