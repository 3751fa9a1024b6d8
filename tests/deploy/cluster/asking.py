"""Runs in a pod and sends a chat and a document question in turn, until /tmp/enough exists. It prints a line
of JSON for each request.

A request is lost if it ends with an error after the client's own retries. Its pause is the longest time
between two of its events; `paused_at` is the pause's end.
"""

import itertools
import json
import sys
import threading
import time
from pathlib import Path

from deltafront.service.client import DeltafrontClient, GenerateFinished
from deltafront.service.errors import DeltafrontError

DOCUMENT = "The captain looked at the sea, and the sea looked back at him. " * 20
PROMPTS = {"chat": [{"role": "user", "content": "Who are you?"}], "document": DOCUMENT}
TIMEOUT_S = 600.0


def ask(client: DeltafrontClient, kind: str, number: int) -> None:
    began = last = time.monotonic()
    pause, paused_at, error, done = 0.0, time.time(), "it ended without a result", False
    prompt = PROMPTS[kind] if kind == "chat" else f"{number} {PROMPTS[kind]}"
    try:
        for event in client.generate(prompt, max_tokens=12, ignore_eos=True, timeout_s=TIMEOUT_S):
            now = time.monotonic()
            if now - last > pause:
                pause, paused_at = now - last, time.time()
            last = now
            done = isinstance(event, GenerateFinished)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    line = {"kind": kind, "at": time.time(), "s": time.monotonic() - began}
    line |= {"pause": pause, "paused_at": paused_at}
    print(json.dumps(line | ({} if done else {"error": error})), flush=True)


def answers(client: DeltafrontClient) -> bool:
    try:
        return bool(client.info().model)
    except DeltafrontError:
        return False


def ask_always(address: str, kind: str) -> None:
    with DeltafrontClient(address, retry_s=TIMEOUT_S) as client:
        while not answers(client):  # network policies apply to a new pod after a moment
            time.sleep(0.5)
        for number in itertools.count():
            if Path("/tmp/enough").exists():
                return
            ask(client, kind, number)


if __name__ == "__main__":
    threads = [threading.Thread(target=ask_always, args=(sys.argv[1], kind)) for kind in PROMPTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
