from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from deltafront.workers.messages.events import DecodeReport


@dataclass(kw_only=True)
class RequestTimes:
    """The time at which a request reached each point, in seconds of one monotonic clock; None: not yet.

    Attributes:
        complete: The last KV was written to the pages.
        ready: The job, the KV and the logits had arrived.
        admitted: The scheduler admitted it.
        blocks_selected: Appended text was prefilled and blocks were selected.
        read: The worker's own prefill was done and the logits computed.
        first: The first token was sampled.
    """

    job: float | None = None
    logits: float | None = None
    complete: float | None = None
    ready: float | None = None
    admitted: float | None = None
    blocks_selected: float | None = None
    read: float | None = None
    first: float | None = None
    handoff_bytes: int = 0
    handoff_seconds: float = 0.0
    """Seconds during which some of its KV was being received."""
    pages_attended: int = 0
    pages_held: int = 0
    steps: int = 0
    own_steps: float = 0.0
    recomputed_tokens: int = 0
    _under_way: int = 0
    _since: float = 0.0

    @contextmanager
    def receiving_kv(self, clock: Callable[[], float]) -> Iterator[None]:
        if not self._under_way:
            self._since = clock()
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self.handoff_seconds += clock() - self._since

    def record_step(self, pages_attended: int, pages_held: int, batch: int) -> None:
        self.pages_attended += pages_attended
        self.pages_held += pages_held
        self.steps += 1
        self.own_steps += 1 / batch

    @property
    def parts(self) -> dict[str, tuple[float | None, float | None]]:
        began = None if self.job is None else max(self.job, self.logits or self.job)
        return {
            "handoff_exposed": (began, self.complete),
            "decode_wait": (self.ready, self.admitted),
            "append_prefill": (
                self.admitted,
                self.read if self.blocks_selected is None else self.blocks_selected,
            ),
            "recompute": (self.blocks_selected, self.read),
            "first_step": (self.read, self.first),
        }

    def report(self) -> DecodeReport:
        """Report the parts of the time from the job's (or the logits') arrival to the first token. They are
        disjoint and add up to it."""
        return DecodeReport(
            **{part: _length(*moments) for part, moments in self.parts.items()},
            handoff_bytes=self.handoff_bytes,
            handoff_seconds=self.handoff_seconds,
            pages_attended=self.pages_attended,
            pages_held=self.pages_held,
            steps=self.steps,
            own_steps=self.own_steps,
            recomputed_tokens=self.recomputed_tokens,
        )


def _length(start: float | None, stop: float | None) -> float:
    return 0.0 if start is None or stop is None else max(0.0, stop - start)
