"""Requests of every kind, so that every panel has something to show: over gRPC and HTTP, with what callers do
wrong, give up and come back to."""

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
    """grpc: host and port. http: URL of the HTTP door. model: the name that it serves. text: what prompts are
    taken from. lengths: of prompts, in characters, the shortest first."""

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
        """A prompt of each length, by one method after the other; then what else there is."""
        reads = [
            partial(self.read, *one) for one in zip(self._lengths, itertools.cycle(_METHODS), strict=False)
        ]
        return (*reads, self.session, self.chat, self.refused, self.wrong, self.cancelled, self.stopped)

    def round(self) -> None:
        """One of each kind."""
        for kind in self.kinds:
            kind()

    def _prompt(self, length: int) -> str:
        """Of text that no session holds the beginning of."""
        self._begins = (self._begins + 997) % max(len(self._text) - length, 1)
        return self._text[self._begins : self._begins + length]

    def read(self, length: int, method: str) -> None:
        options = {} if method == "dense" else _SPARSE
        _read(self._client.generate(self._prompt(length), method=method, options=options, **_ANSWER))

    def session(self) -> None:
        """A document, a question to it, and a prompt that begins with it."""
        document = self._prompt(self._lengths[1])
        *_, made = self._client.prefill(document, session_ttl_s=60, method="dense")
        assert isinstance(made, PrefillFinished)
        session = made.session.session_id
        _read(self._client.generate(session_id=session, append="\nWho is speaking?", **_ANSWER))
        _read(self._client.generate(document, append="\nWhere is it?", method="dense", **_ANSWER))
        self._client.release(session)

    def chat(self) -> None:
        """OpenAI's API, streamed."""
        message = {"role": "user", "content": self._prompt(self._lengths[0])}
        body = {"model": self._model, "messages": [message], "max_tokens": 8, "stream": True}
        with self._post("/v1/chat/completions", body) as reply:
            assert b"[DONE]" in reply.read()

    def refused(self) -> None:
        """An answer that is longer than all pages."""
        _expect("resource_exhausted", self._client.generate("Call me", max_tokens=100_000, ignore_eos=True))

    def wrong(self) -> None:
        """Over gRPC and HTTP."""
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
