"""The tokens of a request's prompt, and the prefix-cache key that they make."""

import asyncio
from dataclasses import dataclass

import numpy as np

from deltafront.service.request.calls import Call
from deltafront.service.request.context import Resources
from deltafront.service.request.run.plan import tokenize
from deltafront.service.request.run.prefix import prompt_key
from deltafront.service.request.text.text_budget import HeldText
from deltafront.workers.messages.prompts import PromptKey
from deltafront.workers.messages.requests import ID_BYTES


@dataclass(frozen=True)
class PromptTokens:
    """Packed token ids (little-endian uint32).

    Args:
        append: The tokens that follow the prompt or session.
        distinct: The distinct ids of prompt and append; empty unless the request has a repetition penalty.
        key: None: the prefix cache is not used.
    """

    prompt: bytes = b""
    append: bytes = b""
    distinct: bytes = b""
    key: PromptKey | None = None

    @property
    def ids(self) -> bytes:
        return self.prompt + self.append

    @property
    def count(self) -> int:
        return len(self.ids) // ID_BYTES


async def prompt_tokens(resources: Resources, text: HeldText, call: Call) -> PromptTokens:
    """Tokenise a call's texts. Raises InvalidArgument or TooLong."""
    prompt = append = b""
    if call.prompt is not None:
        answer = call.append is None and not call.prefill_only
        prompt = await tokenize(resources, text, call.prompt, appended=False, answer=answer)
    if call.append is not None:
        append = await tokenize(resources, text, call.append, appended=True, answer=True)
    return await asyncio.to_thread(_described, resources, call, prompt, append)


def _described(resources: Resources, call: Call, prompt: bytes, append: bytes) -> PromptTokens:
    ids, settings = prompt + append, resources.settings
    penalised = call.sampling.repetition_penalty != 1
    distinct = np.unique(np.frombuffer(ids, dtype="<u4")).tobytes() if penalised else b""
    if call.prompt is None or not settings.prefix_reuse:
        return PromptTokens(prompt, append, distinct)
    key = prompt_key(
        ids,
        owner="" if settings.prefix_scope == "all" else call.owner,
        salt=call.cache_salt,
        model=resources.model,
        method=call.method,
        profile=resources.profile,
        remembers=call.remembers,
        retain_s=call.retain_s,
    )
    return PromptTokens(prompt, append, distinct, key)
