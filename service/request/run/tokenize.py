"""A prompt to its token ids."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ...errors import InvalidArgument, TooLong
from ..calls import Prompt
from ..context import Resources
from ..text.text_budget import HeldText
from ..text.tokenizer import TemplateError, TextTooLong, TokenLimit


async def tokenize(
    resources: Resources, text: HeldText, prompt: Prompt, *, appended: bool, answer: bool
) -> bytes:
    """Return little-endian uint32.

    Args:
        appended: nothing is written before it.
        answer: messages end with the generation prompt.
    Raises:
        InvalidArgument or TooLong, which name the field.
    """
    if prompt.token_ids is not None:
        return prompt.token_ids
    name = "append" if appended else "prompt"
    messages = prompt.messages or ()
    try:
        tokenizer = resources.tokenizer.with_variables(prompt.chat_template_kwargs)
    except TemplateError as error:
        raise InvalidArgument(f"{name}.messages.chat_template_kwargs", str(error)) from None

    def encode(stopped: Callable[[], bool]) -> bytes:
        limited = tokenizer.with_limit(TokenLimit(resources.positions, stopped))
        if prompt.text is not None:
            rule = prompt.special_tokens
            return limited.encode(prompt.text, add_bos=not appended, special_tokens=rule)
        if appended:
            return limited.encode_chat_append(messages)
        return limited.encode_chat(messages, add_generation_prompt=answer)

    try:
        ids = await text.budget.work(text.size, encode)
    except TemplateError as error:
        raise InvalidArgument(f"{name}.messages", str(error)) from None
    except TextTooLong as error:
        raise TooLong(name, str(error)) from None
    if not ids:
        raise InvalidArgument(name, "has no tokens: it is empty to the model's tokenizer")
    if int(np.frombuffer(ids, dtype="<u4").max()) >= resources.vocabulary:
        raise InvalidArgument(name, "contains a special token that this model has no embedding for")
    return ids
