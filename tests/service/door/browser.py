"""Drives a headless Chromium by the DevTools protocol over a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..inprocess import HANG_S

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --remote-debugging-pipe"
)
_QUIET = "--disable-background-networking --disable-component-update --disable-sync"


class Page:
    """A tab of the browser.

    Attributes:
        events: The browser's events so far.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._write, self._read = to_browser, from_browser
        self._received, self._last = b"", 0
        self._session: dict[str, str] = {}
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Network", "Runtime", "Log", "Page"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> Any:
        """Send a command, and return its result."""
        self._last += 1
        command = {"id": self._last, "method": method, "params": params, **self._session}
        os.write(self._write, json.dumps(command).encode() + b"\0")
        while (message := self._next()).get("id") != self._last:
            self.events.append(message)
        assert "error" not in message, message
        return message["result"]

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + HANG_S
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until - time.monotonic()))
            part = os.read(self._read, 1 << 16) if ready else b""
            assert part, "the browser does not answer"
            self._received += part
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)  # type: ignore[no-any-return]

    def run(self, script: str) -> Any:
        """Run JavaScript, and return its value."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, userGesture=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        """Return the text of the last element of a selector; empty if the page shows none."""
        last = f"[...document.querySelectorAll({json.dumps(selector)})].at(-1)"
        return str(self.run(f"{last}?.checkVisibility() ? {last}.innerText : ''"))

    def wait_for(self, selector: str, words: str) -> None:
        until = time.monotonic() + HANG_S
        while words not in (shown := self.text(selector)):
            assert time.monotonic() < until, f"{selector} shows {shown!r}, not {words!r}"
            time.sleep(0.02)

    def fill(self, selector: str, text: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).select()")
        self.send("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def called(self, method: str) -> list[dict[str, Any]]:
        """Return the parameters of events so far."""
        self.run("0")  # receive what has come
        return [event["params"] for event in self.events if event.get("method") == method]


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[Page]:
    """Run a browser until the block ends. folder: for its profile."""
    assert CHROMIUM is not None
    commands, answers = os.pipe(), os.pipe()
    flags = f"{_FLAGS} {_QUIET} --user-data-dir={folder}"
    script = f"exec {CHROMIUM} {flags} 3<&{commands[0]} 4>&{answers[1]}"
    passed = (commands[0], answers[1])
    process = subprocess.Popen(["bash", "-c", script], pass_fds=passed, stderr=subprocess.DEVNULL)
    for end in passed:
        os.close(end)
    try:
        yield Page(commands[1], answers[0])
    finally:
        os.close(commands[1])  # this ends the browser
        try:
            process.wait(HANG_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(HANG_S)
        os.close(answers[0])
