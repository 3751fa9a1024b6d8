"""Clients of every kind, each in its own thread and with its own connection, so that both doors have some.

Each client gets an answer before its request, because the library does not retry at an address that never
answered. Real clients, too, live longer than one request.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import openai

from deltafront.service.client import (
    DeltafrontClient,
    DeltafrontError,
    GenerateFinished,
    PrefillFinished,
    Token,
)
from deltafront.service.errors import ConnectionLost, NotFound

from .checks import Log
from .running import PATIENCE_S, Service
from .schedule import OPTIONS, Ask, Form, prompt, question

_BROKEN = (httpx.TransportError, openai.APIConnectionError)
_PAUSE_S = 0.3


class Counting(DeltafrontClient):
    """Counts calls and broken calls in a log."""

    log: Log

    def _stream_once(self, rpc: Any, request: Any, deadline: float | None) -> Iterator[Any]:
        self.log.calls += 1
        try:
            yield from super()._stream_once(rpc, request, deadline)
        except ConnectionLost:
            self.log.lost += 1
            raise


class Clients:
    """Concurrent clients. asked: their requests. seen(): number of events that all clients have received."""

    def __init__(self, service: Service, asks: Sequence[Ask]) -> None:
        self._service = service
        self._seen = 0
        self._lock = threading.Lock()
        self.logs = [Log(ask) for ask in asks]
        self._pool = ThreadPoolExecutor(len(asks))
        self._running: list[Future[None]] = [self._pool.submit(self._ask, log) for log in self.logs]

    @property
    def expected(self) -> int:
        """Estimate the number of events without faults. Progress events count little."""
        return sum(log.ask.tokens for log in self.logs)

    def seen(self) -> int:
        return self._seen

    def done(self) -> bool:
        return all(one.done() for one in self._running)

    def join(self) -> None:
        """Wait for all clients. Raises a client's unexpected exception, or TimeoutError with the name of a
        client that hangs."""
        try:
            for log, one in zip(self.logs, self._running, strict=True):
                try:
                    one.result(PATIENCE_S)
                except TimeoutError:
                    raise TimeoutError(f"it hangs: {log}") from None
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _ask(self, log: Log) -> None:
        try:
            if log.ask.form is Form.HTTP:
                self._over_http(log)
                return
            with Counting(self._service.address, retry_s=60.0) as client:
                client.log = log
                self._service.seconds_to_an_answer(client)
                _FORMS.get(log.ask.form, Clients._answer)(self, client, log)
        except DeltafrontError as error:
            plain = error.code.value if error.code.value == "cancelled" else f"{error.code}: {error.message}"
            log.ends.append(plain)

    def _answer(self, client: Counting, log: Log) -> None:
        options: dict[str, Any] = {"method": "dense"} | OPTIONS.get(log.ask.form, {})
        self._read(
            log,
            client.generate(
                prompt(log.ask.prompt),
                max_tokens=log.ask.tokens,
                ignore_eos=True,
                **options,
            ),
        )

    def _session(self, client: Counting, log: Log) -> None:
        """Use a session. If it has died with its worker, send the document again."""
        while True:
            try:
                session = self._document(client, log)
                for number in range(2):
                    log.ids, log.indices, log.text = [], [], ""
                    asked = question(log.ask.prompt)
                    self._read(
                        log,
                        client.generate(
                            session_id=session, append=asked, max_tokens=log.ask.tokens, ignore_eos=True
                        ),
                        last=number == 1,
                    )
                with contextlib.suppress(NotFound):
                    client.release(session)
                return
            except NotFound:
                log.again += 1
                if log.again > 5:
                    raise

    def _document(self, client: Counting, log: Log) -> str:
        for event in self._events(client.prefill(prompt(log.ask.prompt), method="dense"), log):
            if isinstance(event, PrefillFinished):
                return event.session.session_id
        raise AssertionError("Prefill ended without a result")

    def _cancel(self, client: Counting, log: Log) -> None:
        request_id = uuid.uuid4().hex
        events = client.generate(
            prompt(log.ask.prompt), max_tokens=log.ask.tokens, ignore_eos=True, request_id=request_id
        )

        def cancel() -> None:
            with self._service.client() as other, contextlib.suppress(DeltafrontError):
                other.cancel(request_id)

        self._read(log, events, after=cancel)

    def _leave(self, client: Counting, log: Log) -> None:
        events = client.generate(prompt(log.ask.prompt), max_tokens=log.ask.tokens, ignore_eos=True)

        def leave() -> None:
            events.close()  # type: ignore[attr-defined]
            log.ends.append("left")

        self._read(log, events, after=leave)

    def _read(
        self,
        log: Log,
        events: Iterator[Any],
        last: bool = True,
        after: Callable[[], None] | None = None,
    ) -> None:
        """Read a stream. after: called once, after the client's number of events. last: whether the finish
        event ends the client's request."""
        for seen, event in enumerate(self._events(events, log), 1):
            if isinstance(event, Token):
                log.indices.append(event.index)
                log.ids.append(event.token_id)
                log.text += event.text
            elif isinstance(event, GenerateFinished) and last:
                log.text += event.text
                log.ends.append("finished")
            if after is not None and seen > log.ask.events and "finished" not in log.ends:
                after, once = None, after
                once()

    def _events(self, events: Iterator[Any], log: Log) -> Iterator[Any]:
        at = time.monotonic()
        for event in events:
            now = time.monotonic()
            log.longest_pause_s, at = max(log.longest_pause_s, now - at), now
            with self._lock:
                self._seen += 1
            yield event

    def _over_http(self, log: Log) -> None:
        until = time.monotonic() + PATIENCE_S
        while True:
            log.calls, log.text = log.calls + 1, ""
            try:
                self._stream_http(log)
                return
            except _BROKEN:
                pass
            except openai.APIStatusError as error:
                if isinstance(error.body, dict):  # the service's own error
                    log.ends.append(f"HTTP {error.status_code}: {error.message}")
                    return
            except openai.APIError as error:
                log.ends.append(f"HTTP stream: {error.message}")
                return
            log.lost += 1
            if time.monotonic() > until:
                log.ends.append("the connection breaks again and again")
                return
            time.sleep(_PAUSE_S)

    def _stream_http(self, log: Log) -> None:
        """Stream over HTTP. Raises one of _BROKEN for a broken stream, also if it ends too early."""
        with openai.OpenAI(base_url=f"{self._service.http}/v1", api_key="-", max_retries=0) as client:
            chunks = client.completions.create(
                model=self._service.model,
                prompt=prompt(log.ask.prompt),
                max_tokens=log.ask.tokens,
                stream=True,
                extra_body={"ignore_eos": True, "method": "dense"},
            )
            ended = False
            for chunk in self._events(iter(chunks), log):
                log.text += "".join(choice.text for choice in chunk.choices)
                ended = ended or any(choice.finish_reason for choice in chunk.choices)
        if not ended:
            raise httpx.RemoteProtocolError("the stream ended before its last event")
        log.ends.append("finished")


_FORMS: dict[Form, Callable[[Clients, Counting, Log], None]] = {
    Form.SESSION: Clients._session,
    Form.CANCEL: Clients._cancel,
    Form.LEAVE: Clients._leave,
}
