"""A prompt to its token ids."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...errors import InvalidArgument, TooLong
from ..calls import Prompt
from ..resources import Resources
from ..text.text_budget import HeldText
from ..text.tokenizer import Limit, TemplateError, TextTooLong


async def tokenize(
    resources: Resources, text: HeldText, prompt: Prompt, *, follows: bool, answer: bool
) -> bytes:
    """Ids as little-endian uint32, computed in a thread.

    Args:
        follows: it is appended to something, so it opens nothing.
        answer: messages end with the assistant's opening.
    Raises: InvalidArgument or TooLong, which name the field.
    """
    if prompt.token_ids is not None:
        return prompt.token_ids
    name = "append" if follows else "prompt"
    messages = prompt.messages or ()
    try:
        tokenizer = resources.tokenizer.with_variables(prompt.chat_template_kwargs)
    except TemplateError as error:
        raise InvalidArgument(f"{name}.messages.chat_template_kwargs", str(error)) from None

    def encode(stopped: Callable[[], bool]) -> bytes:
        limit = Limit(resources.positions, stopped)
        if prompt.text is not None:
            rule = prompt.special_tokens
            return tokenizer.encode(prompt.text, opening=not follows, special_tokens=rule, limit=limit)
        if follows:
            return tokenizer.encode_chat_append(messages, limit=limit)
        return tokenizer.encode_chat(messages, answer=answer, limit=limit)

    try:
        ids = await text.work(encode)
    except TemplateError as error:
        raise InvalidArgument(f"{name}.messages", str(error)) from None
    except TextTooLong as error:
        raise TooLong(name, str(error)) from None
    if not ids:
        raise InvalidArgument(name, "has no tokens: it is empty to the model's tokenizer")
    if int(np.frombuffer(ids, dtype="<u4").max()) >= resources.vocabulary:
        raise InvalidArgument(name, "contains a special token that this model has no embedding for")
    return ids
