"""Turns text and chat messages into token ids and back, without transformers."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import tokenizers
from tokenizers import Tokenizer

from deltafront.service.request.calls import Ending, SpecialTokens, Tools
from deltafront.service.request.text import harmony
from deltafront.service.request.text.control_tokens import (
    TEMPLATE_READS_TOKENS,
    ControlTokens,
    MaskingError,
    map_message,
    strings_of,
)
from deltafront.service.request.text.detokenize import Detokenizer
from deltafront.service.request.text.pieces import TokenLimit, longest_token, splits_at_spaces, tokenised
from deltafront.service.request.text.token_bytes import TokenBytes
from deltafront.service.request.text.tool_calls import MARKS, ToolFormat, format_of
from deltafront.workers.model.directory.chat_template import OURS, ChatTemplate
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.model.directory.tokenizer_files import (
    CHANNEL,
    TOKENIZER,
    AddedToken,
    TokenizerFiles,
    has_tokenizer,
    tokenizer_json,
)

Message = Mapping[str, Any]

_PLACEHOLDER = re.compile("\N{ASTERISM}([^\N{ASTERISM}]+)\N{ASTERISM}")


class TemplateError(ValueError): ...


class TextTokenizer:
    """Encodes and decodes. Thread-safe. Encoding releases the interpreter lock, so call it in a thread.

    It packs ids as little-endian uint32, and raises TextTooLong or TokenizationStopped.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, special: Mapping[str, str]
    ) -> None:
        self._tokenizer = tokenizer
        state = json.loads(tokenizer.to_str())
        self._divisible = splits_at_spaces(tokenizer, state)
        self.token_bytes = TokenBytes(tokenizer, state)
        self._special = dict(special)
        self._template = template
        self._variables: Mapping[str, Any] = {}
        self._limit = TokenLimit()
        self._ending = Ending.ANSWER
        self._control = ControlTokens(tokenizer, self._template_tokens())
        self.longest_token = longest_token(tokenizer, state)
        """Bytes of text that one token can stand for."""

    @classmethod
    def load(cls, directory: Path) -> TextTokenizer:
        """Load a model directory's tokenizer. Raises FileNotFoundError or ModelError."""
        path = directory / TOKENIZER
        if not has_tokenizer(directory):
            raise FileNotFoundError(f"{path} does not exist: the model directory has no tokenizer")
        files, tokenizer = TokenizerFiles.read(directory), _read(directory)
        _add(tokenizer, files.added, path)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return cls(tokenizer, files.template, files.special)

    def with_variables(self, variables: Mapping[str, Any]) -> TextTokenizer:
        """Return a tokenizer whose chat template gets these variables. Raises TemplateError for a variable
        that requests may not set, or a value with a control token.
        """
        for name in variables:
            if name in OURS or name in self._special:
                raise TemplateError(f"{name} is not for a request to set")
        for text in strings_of(variables):
            for token in self._control.find(text):
                raise TemplateError(f"the control token {token!r} may not stand in it")
        return self._with(_variables=dict(variables))

    def with_tools(self, tools: Tools | None) -> TextTokenizer:
        """Return a tokenizer whose chat template sees these tools. Raises TemplateError if it has none, or
        for a text with a control token."""
        if tools is None:
            return self
        if self.tool_format is None and not self.is_harmony:
            raise TemplateError(
                "this model's chat template has no tools, or the model writes calls in a form not read here"
            )
        shown = [{"type": "function", "function": dict(function)} for function in tools.functions]
        return self.with_variables({**self._variables, "tools": shown})

    @functools.cached_property
    def tool_format(self) -> ToolFormat | None:
        """The model's format of tool calls; None if there is no template, or one without tools."""
        return None if self._template is None else format_of(self._template.source)

    @functools.cached_property
    def is_harmony(self) -> bool:
        """True if answers come in gpt-oss's channels (`harmony`)."""
        source = "" if self._template is None else self._template.source
        return CHANNEL in source and self._special_ids(harmony.MARKS).keys() == {*harmony.MARKS}

    @functools.cached_property
    def tool_tokens(self) -> Mapping[str, int]:
        """Special tokens of tool calls and channels, which plain text cannot produce."""
        return self._special_ids(harmony.MARKS if self.is_harmony else MARKS)

    def _special_ids(self, texts: Sequence[str]) -> dict[str, int]:
        added = self._tokenizer.get_added_tokens_decoder().items()
        return {token.content: number for number, token in added if token.special and token.content in texts}

    def with_limit(self, limit: TokenLimit) -> TextTokenizer:
        return self._with(_limit=limit)

    def with_ending(self, ending: Ending) -> TextTokenizer:
        """Return a tokenizer that ends rendered conversations with `ending`."""
        return self._with(_ending=ending)

    def _with(self, **changes: Any) -> TextTokenizer:
        other = copy.copy(self)
        vars(other).update(changes)
        return other

    @property
    def has_template(self) -> bool:
        return self._template is not None

    def encode(
        self, text: str, *, add_bos: bool, special_tokens: SpecialTokens = SpecialTokens.TEXT
    ) -> bytes:
        control = self._control
        if special_tokens is SpecialTokens.PARSE or not (control.may_be_normalised or control.find(text)):
            return self._ids(self._tokenizer, text, add_bos)
        return self._ids_with_aliases(text, add_bos)

    def encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, add_bos: bool = False
    ) -> bytes:
        """Encode a conversation. Raises TemplateError, also if the template leaves out a message.

        Args:
            add_bos: True to add BOS before the template's output.
        """
        return self._chat([], messages, add_generation_prompt, add_bos)

    def encode_chat_append(self, messages: Sequence[Message]) -> bytes:
        """Encode messages that continue a conversation. Leave out the text that the template writes before a
        conversation.

        The messages are rendered after a sample conversation that the template accepts. Raises TemplateError,
        also if the template rewrites earlier messages or leaves out a new one.
        """
        refusal: TemplateError | None = None
        for before in _SAMPLE_CONVERSATIONS:
            try:
                return self._chat(before, messages, True)
            except TemplateError as error:
                refusal = error
        assert refusal is not None, "there are sample conversations"
        raise refusal

    def generation_prompt(self) -> str:
        """Return the text that the template writes before an answer, if necessary after a sample
        conversation.
        """
        for conversation in _SAMPLE_CONVERSATIONS:
            with contextlib.suppress(TemplateError):
                return self._render(conversation, True).removeprefix(self._render(conversation, False))
        return ""

    def spells(self, text: str) -> bool:
        """Return whether an answer's text can contain `text`. Special tokens decode to no text."""
        return text in self.decode(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """Return the vocabulary's spelling of each token; empty for ids that it lacks."""
        return [self._tokenizer.id_to_token(number) or "" for number in ids]

    def detokenizer(self, tools: bool = False, split: bool = False) -> Detokenizer:
        """Make a detokenizer. With `tools`, special tokens around tool calls are also decoded to text. With
        `split` (the answer is split into reasoning and content), those around channels are."""
        is_spoken = tools or (split and self.is_harmony)
        spoken = {number: text for text, number in self.tool_tokens.items()} if is_spoken else {}
        return Detokenizer(self._tokenizer, spoken)

    def _ids(self, tokenizer: Tokenizer, text: str, add_bos: bool) -> bytes:
        return tokenised(tokenizer, text, self._limit, add_bos=add_bos, divisible=self._divisible)

    def _ids_with_aliases(self, text: str, add_bos: bool) -> bytes:
        ids = self._ids(self._control.alias_tokenizer, text, add_bos)
        return self._control.model_ids.take(np.frombuffer(ids, dtype="<u4")).tobytes()

    def _chat(
        self,
        before: Sequence[Message],
        messages: Sequence[Message],
        add_generation_prompt: bool,
        add_bos: bool = False,
    ) -> bytes:
        """Encode messages that follow `before`. Only the template's control tokens stay control tokens."""
        rendered, harmless = self._render_after(before, messages, add_generation_prompt)
        control = self._control
        own_tokens = control.find(harmless)
        if not control.may_be_normalised and control.find(rendered) == own_tokens:
            return self._ids(self._tokenizer, rendered, add_bos)
        head = len(self._render(before, False)) if before else 0
        try:
            for masking in control.maskings(messages):
                added = self._render_all([*before, *masking.messages], add_generation_prompt)[head:]
                if masking.unmask(added) == rendered:
                    text = control.with_aliases(added, masking, own_tokens)
                    return self._ids_with_aliases(text, add_bos)
        except MaskingError as error:
            raise TemplateError(str(error)) from None
        raise TemplateError(TEMPLATE_READS_TOKENS)

    def _template_tokens(self) -> set[str]:
        """Added tokens that the template writes. Some models do not flag these tokens as special."""
        added = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
        tokens = {text for text in self._special.values() if text in added}
        for conversation in _SAMPLE_CONVERSATIONS if self._template is not None else ():
            with contextlib.suppress(TemplateError):
                rendered = self._render(conversation, True)
                tokens |= {token for token in added if token in rendered}
        return tokens

    def _render_after(
        self, before: Sequence[Message], messages: Sequence[Message], add_generation_prompt: bool
    ) -> tuple[str, str]:
        """Render the text that messages add after earlier ones, once as given and once with numbered
        placeholders.

        Raises TemplateError if a message is missing, or an earlier one is repeated.
        """
        head = self._render(before, False) if before else ""
        rendered = self._render_all([*before, *messages], add_generation_prompt)
        parts = [self._control.parts(message) for message in messages]
        numbered = [
            map_message(functools.partial(self._harmless, number), message, said)
            for number, (message, said) in enumerate(zip(messages, parts, strict=True))
        ]
        harmless = self._render_all([*before, *numbered], add_generation_prompt)[len(head) :]
        shown = set(_PLACEHOLDER.findall(harmless))
        if not rendered.startswith(head) or any(message["role"] in shown for message in before):
            raise TemplateError("this model's chat template cannot append messages: append text instead")
        for number, message in enumerate(messages):
            said = parts[number][-1].strip() or message.get("tool_calls")
            if said and str(number) not in shown:
                raise TemplateError(
                    f"this model's chat template leaves out a message of the role {message['role']!r} here: "
                    "say it in a user's message"
                )
        return rendered[len(head) :], harmless

    def _harmless(self, number: int, text: str) -> str:
        """Return a placeholder for a text. White space stays, because templates test for empty texts."""
        return f"\N{ASTERISM}{number}\N{ASTERISM}" if text.strip() or self._control.find(text) else text

    def _render_all(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        rendered = self._render(messages, add_generation_prompt and self._ending is Ending.ANSWER)
        return _open(rendered, messages[-1]["content"]) if self._ending is Ending.OPEN else rendered

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        if self._template is None:
            raise TemplateError("this model has no chat template: send text instead of messages")
        variables = {**self._special, **self._variables}
        try:
            return self._template.render(messages, add_generation_prompt, variables)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the model's chat template refuses these messages: {error}") from None


def _read(directory: Path) -> Tokenizer:
    text = tokenizer_json(directory)
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises nothing narrower
        raise ModelError(
            f"{directory / TOKENIZER} cannot be read as a tokenizer: {error}: download it again"
        ) from None


def _add(tokenizer: Tokenizer, added: Mapping[int, AddedToken], path: Path) -> None:
    """Add tokens that tokenizer.json lacks. Raises ModelError if their ids differ."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for number, token in added.items():
        if token.content not in known:
            tokenizer.add_tokens([tokenizers.AddedToken(**vars(token))])
            assigned = tokenizer.token_to_id(token.content)
            if assigned != number:
                raise ModelError(
                    f"{path} would number {token.content!r} as {assigned}, the files beside it say {number}: "
                    "they belong to different models"
                )


def _open(rendered: str, last: str) -> str:
    """Cut a rendered conversation after its last message's text, as transformers does. Raises
    TemplateError."""
    text = last.strip()
    if not text or text not in rendered:
        raise TemplateError("the last message has no text that this model's chat template keeps to continue")
    begin = rendered.rindex(text)
    kept = last.lstrip()
    return rendered[: begin + len(kept if rendered.startswith(kept, begin) else text)]


def _placeholder(role: str, name: str) -> Message:
    return {"role": role, "content": f"\N{ASTERISM}{name}\N{ASTERISM}"}


_SYSTEM, _USER, _ASSISTANT = (_placeholder(role, role) for role in ("system", "user", "assistant"))
_SAMPLE_CONVERSATIONS = [[_SYSTEM, _USER], [_SYSTEM, _USER, _ASSISTANT], [_USER], [_USER, _ASSISTANT]]
"""Conversations before the appended messages. A template may refuse some of them."""
