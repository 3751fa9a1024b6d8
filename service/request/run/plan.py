"""Plans which tokens an attempt prefills, and how many it may still generate.

A decode worker prefills answer tokens that were already streamed, because sparse prefill would compute
different KV for them.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from deltafront.kernels.constants import PAGE_TOKENS
from deltafront.kernels.methods import MethodSpec, is_exact
from deltafront.service.errors import InvalidArgument, TooLong
from deltafront.service.request.calls import Call, Ending, Prompt, pack_ids, tools_of
from deltafront.service.request.context import Resources
from deltafront.service.request.text.harmony import harmony_grammar
from deltafront.service.request.text.pieces import TextTooLong, TokenLimit
from deltafront.service.request.text.text_budget import HeldText
from deltafront.service.request.text.thoughts import with_thoughts
from deltafront.service.request.text.tokenizer import TemplateError, TextTokenizer
from deltafront.service.request.text.tool_calls import tools_grammar
from deltafront.workers.messages.requests import ID_BYTES, recompute_pages
from deltafront.workers.model.grammars import GrammarError, grammar_of


async def tokenize(
    resources: Resources, text: HeldText, prompt: Prompt, *, appended: bool, answer: bool
) -> bytes:
    """Tokenise a prompt as little-endian uint32.

    Args:
        appended: True if it follows a session, so that no BOS is added.
        answer: Apply the chat template with add_generation_prompt.

    Raises:
        InvalidArgument, TooLong: The prompt is invalid or too long; the error names the field.
    """
    if prompt.token_ids is not None:
        return prompt.token_ids
    name = "append" if appended else "prompt"
    messages, wanted = prompt.messages or (), prompt.add_special_tokens
    add_bos = not appended and (prompt.text is not None if wanted is None else wanted)

    def encode(stopped: Callable[[], bool]) -> bytes:
        try:
            tokenizer = resources.tokenizer.with_variables(prompt.chat_template_kwargs)
        except TemplateError as error:
            raise InvalidArgument(f"{name}.messages.chat_template_kwargs", str(error)) from None
        try:
            tokenizer = tokenizer.with_tools(prompt.tools).with_ending(
                prompt.ending if answer else Ending.CLOSED
            )
        except TemplateError as error:
            raise InvalidArgument(f"{name}.messages.tools", str(error)) from None
        limited = tokenizer.with_limit(TokenLimit(resources.positions, stopped))
        if prompt.text is not None:
            rule = prompt.special_tokens
            return limited.encode(prompt.text, add_bos=add_bos, special_tokens=rule)
        if appended:
            return limited.encode_chat_append(messages)
        return limited.encode_chat(messages, add_generation_prompt=answer, add_bos=add_bos)

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


async def constrained(resources: Resources, call: Call) -> Call:
    """Put the grammar of a call's constraint into its options. Compile it here, too, so that a wrong
    constraint is refused before prefill. Raises InvalidArgument."""
    if call.options.constraint:
        return call
    if call.constraint is None and tools_of(call.prompt, call.append) is None:
        return call
    grammar = await asyncio.to_thread(_grammar, resources, call)
    return replace(call, constraint=None, options=replace(call.options, constraint=grammar))


def _grammar(resources: Resources, call: Call) -> str:
    tools, form = tools_of(call.prompt, call.append), resources.tokenizer.tool_format
    name, last = f"{'append' if call.append else 'prompt'}.messages.tools", call.append or call.prompt
    reasons = last is not None and last.reasons
    harmony = resources.tokenizer.is_harmony and (reasons or tools is not None)
    try:
        if tools is not None and harmony:
            schema = _schema_beside_tools(resources, call)
            grammar = _in_channels(resources, call, schema and grammar_of("json_schema", schema))
        elif tools is not None and form is not None:
            schema = _schema_beside_tools(resources, call)
            grammar = tools_grammar(form, tools, resources.tokenizer.tool_tokens, schema)
        elif call.constraint is None:
            return ""  # tokenising refuses the tools
        else:
            ((kind, rule),) = [given for given in vars(call.constraint).items() if given[1] is not None]
            name = f"constraint.{kind}"
            grammar = _choice(rule) if kind == "choice" else grammar_of(kind, rule)
            grammar = _in_channels(resources, call, grammar) if harmony else grammar
        if reasons and not harmony:
            grammar = with_thoughts(grammar, generation_prompt(resources.tokenizer, last))
        if grammar:
            resources.grammars.begin(grammar, call.answered)
    except GrammarError as error:
        raise InvalidArgument(name, str(error)) from None
    return grammar


def _in_channels(resources: Resources, call: Call, answer: str | None) -> str:
    """Return the grammar of an answer in harmony's channels, unless it continues a message."""
    tools, last = tools_of(call.prompt, call.append), call.append or call.prompt
    if last is None or last.ending is not Ending.ANSWER:
        return answer or ""
    return harmony_grammar(tools, answer, resources.tokenizer.tool_tokens)


def _choice(texts: Sequence[str]) -> str:
    choices = (json.dumps(text, ensure_ascii=False) for text in texts)
    return grammar_of("grammar", f"start: {' | '.join(choices)}")


def _schema_beside_tools(resources: Resources, call: Call) -> str | None:
    """Return the schema of an answer that calls no tool. Raises InvalidArgument."""
    schema = None if call.constraint is None else call.constraint.json_schema
    if call.constraint is not None and schema is None:
        raise InvalidArgument("constraint", "must be a JSON schema, or none, where there are tools")
    if schema is not None:
        try:
            resources.grammars.begin(grammar_of("json_schema", schema))
        except GrammarError as error:
            raise InvalidArgument("constraint.json_schema", str(error)) from None
    return schema


def generation_prompt(tokenizer: TextTokenizer, prompt: Prompt | None) -> str:
    """Return the text that the chat template writes before the answer; empty unless the prompt is
    messages."""
    if prompt is None or prompt.messages is None or prompt.ending is not Ending.ANSWER:
        return ""
    with contextlib.suppress(TemplateError):  # tokenising refuses it
        return tokenizer.with_variables(prompt.chat_template_kwargs).generation_prompt()
    return ""


@dataclass(frozen=True)
class Plan:
    """The plan of one attempt. Token ids are little-endian uint32.

    Args:
        prefill_ids: The prompt; for a session, the appended text and streamed answer tokens.
        max_tokens: Tokens that may still be generated.
        keep_tokens: Number of first tokens that become a session.
        answered_ids: Answer tokens that were already streamed, if there is no session.
        session_id: The session that the attempt continues.
        prefix_tokens: Tokens of the prefix hit that the attempt continues from.
        worker_prefills: True if a decode worker prefills `prefill_ids` after the session or prefix. Otherwise
            a group prefills them from `prefix_tokens` on.
    """

    prefill_ids: bytes
    max_tokens: int
    keep_tokens: int = 0
    answered_ids: bytes = b""
    recompute_blocks: int = 0
    session_id: str | None = None
    prefix_tokens: int = 0
    worker_prefills: bool = False

    @property
    def prefill_tokens(self) -> int:
        return len(self.prefill_ids) // ID_BYTES

    @property
    def new_tokens(self) -> int:
        return self.prefill_tokens - (0 if self.worker_prefills else self.prefix_tokens)

    @property
    def answered_tokens(self) -> int:
        return len(self.answered_ids) // ID_BYTES

    @property
    def answer_tokens(self) -> int:
        """Length of the longest possible answer."""
        return self.answered_tokens + self.max_tokens

    @property
    def recompute_tokens(self) -> int:
        """Tokens of the additional pages for recomputed blocks."""
        return PAGE_TOKENS * recompute_pages(self.recompute_blocks, self.prefill_tokens, appended=False)

    def on_worker(self, held: int = 0, **changes: Any) -> "Plan":
        """Let a decode worker prefill everything after the tokens that it holds."""
        ids = (self.prefill_ids + self.answered_ids)[held * ID_BYTES :]
        return replace(self, prefill_ids=ids, answered_ids=b"", worker_prefills=True, **changes)

    def inexact_ids(self, method: MethodSpec) -> bytes:
        """Return the tokens whose KV may differ from dense attention's: `prefill_ids` or none."""
        return b"" if is_exact(method, self.prefill_tokens) else self.prefill_ids


def plan_answer(
    prompt: bytes,
    append: bytes,
    *,
    max_tokens: int,
    positions: int,
    answered: Sequence[int] = (),
    keep: bool = False,
    fit_max_tokens: bool = False,
) -> Plan:
    """Plan an attempt.

    Args:
        prompt: Empty for a session, whose length its worker checks.
        max_tokens: Maximum tokens of the whole answer; 0 for a Prefill.
        answered: Answer tokens that the client already has.

    Raises:
        TooLong: Prompt and answer do not fit the context; with `fit_max_tokens`, not even one answer token
            fits.
    """
    read = prompt + append
    tokens = len(read) // ID_BYTES
    if tokens + (1 if fit_max_tokens else max_tokens) > positions:
        answer = "an answer" if fit_max_tokens else f"max_tokens of {max_tokens}"
        both = f"{tokens} tokens and {answer} do not fit"
        excess = both if fit_max_tokens or max_tokens else f"{tokens} tokens exceed"
        advice = "" if fit_max_tokens or tokens >= positions else ", or ask for less"
        raise TooLong(
            "prompt" if prompt else "append",
            f"{excess} the model's {positions} positions: shorten it{advice}",
        )
    left = min(max_tokens, positions - tokens) - len(answered)
    if not prompt:
        return Plan(read + pack_ids(answered), left)
    return Plan(read, left, len(prompt) // ID_BYTES if keep else 0, pack_ids(answered))
