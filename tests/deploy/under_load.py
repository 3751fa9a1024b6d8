"""Clients that send requests while a cluster changes, and checks of their answers."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from deltafront.service.client import GenerateFinished, PrefillFinished

from ..chaos import checks
from ..chaos.checks import Log
from ..chaos.load import Clients
from ..chaos.references import Key, key_of
from ..chaos.running import Service
from ..chaos.schedule import MAX_TOKENS, PROMPTS, Ask, Form, prompt

FORMS = (Form.GREEDY, Form.GREEDY, Form.SAMPLED, Form.SESSION, Form.HTTP)
SHORT = range(0, PROMPTS, 2)
"""Prompts that are short enough for one group even on a slow machine."""
References = dict[Key, checks.Reference]


class Load:
    """A number of clients, each of which sends one request after the other until `end`. prompts: the prompts
    that they send."""

    def __init__(
        self, service: Service, clients: int, seed: int = 0, prompts: Sequence[int] = range(PROMPTS)
    ) -> None:
        self._service, self._prompts = service, prompts
        self._enough = threading.Event()
        self._pool = ThreadPoolExecutor(clients)
        self.logs: list[Log] = []
        draws = [random.Random(f"{seed} {number}") for number in range(clients)]
        self._running = [self._pool.submit(self._ask, draw) for draw in draws]

    def _ask(self, draw: random.Random) -> None:
        while not self._enough.is_set():
            ask = Ask(draw.choice(FORMS), draw.choice(self._prompts), draw.randint(8, MAX_TOKENS), 0)
            one = Clients(self._service, (ask,))
            one.join()
            self.logs += one.logs

    def wait_for(self, more: int) -> None:
        """Wait until this number of further requests has ended. Raises a client's unexpected exception."""
        wanted = len(self.logs) + more
        while len(self.logs) < wanted:
            for one in self._running:
                if one.done():
                    one.result()
            time.sleep(0.05)

    def end(self) -> list[Log]:
        self._enough.set()
        for one in self._running:
            one.result()
        self._pool.shutdown()
        return self.logs


def problems(logs: Iterable[Log], *known: References) -> list[str]:
    """Return lost requests, broken streams, and answers that no model gives. known: each model's answers."""
    found = list[str]()
    for log in logs:
        differ = [checks.differs(log, answers[key_of(log.ask)]) for answers in known]
        found += filter(None, [checks.lost(log), *(differ if all(differ) else ())])
        if log.lost:
            found.append(f"{log.ask}: {log.lost} streams broke")
    return found


def longest(logs: Iterable[Log]) -> str:
    """Describe the longest pause of a client."""
    seen = list(logs)
    pause, again = max(log.longest_pause_s for log in seen), sum(log.again for log in seen)
    return f"{len(seen)} requests, longest pause {pause:.1f} s, {again} documents sent again"


def kept(client: Any, number: int = 0) -> str:
    """Keep a session. number: selects the document. The same document again would go to the worker that
    caches it."""
    *_, read = client.prefill(f"{number:04} {prompt(0) * 4}")
    assert isinstance(read, PrefillFinished)
    return read.session.session_id


def remembered(client: Any, session: str) -> bool:
    """Return whether the session still has its document."""
    *_, done = client.generate(session_id=session, append="\nWho?", max_tokens=4, ignore_eos=True)
    return isinstance(done, GenerateFinished) and done.usage.cached_tokens > 40
