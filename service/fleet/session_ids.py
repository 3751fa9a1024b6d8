"""Session ids have the form `<worker>.<random>`, from which every door finds the worker."""

import re

from deltafront.service.errors import NotFound
from deltafront.workers.messages.states import DECODE_PREFIX

NO_SESSION = "there is no such session: unknown, expired, released, or made with another token"
_ID = re.compile(r"((?:decode:)?[A-Za-z0-9_-]{1,64})\.[A-Za-z0-9_-]{1,128}")


def worker_of(session_id: str) -> str:
    """Return the worker's actor name. Raises NotFound for a malformed id."""
    match = _ID.fullmatch(session_id)
    if match is None:
        raise NotFound(NO_SESSION)
    return DECODE_PREFIX + match[1].removeprefix(DECODE_PREFIX)
