"""vLLM's endpoints `/tokenize` and `/detokenize`."""

from typing import Any

import numpy as np
from pydantic import BaseModel, Field

from deltafront.service.door.edges.edge import Json
from deltafront.service.door.json_body import STRICT, BodyRules, Long
from deltafront.service.door.openai.requests import read_messages
from deltafront.service.door.openai.tools import read_tools
from deltafront.service.errors import InvalidArgument
from deltafront.service.request.calls import GenerateRequest, Prompt, SamplingParams, SpecialTokens
from deltafront.service.request.context import Accepted
from deltafront.service.request.handler import RequestHandler

_RULES = BodyRules(
    labels=("user",),
    no_op_values={
        "continue_final_message": (False,),
        "mm_processor_kwargs": ({},),
        "media_io_kwargs": ({},),
        "chat_template": (),
    },
    long_fields=("messages", "tokens", "tools", "chat_template_kwargs"),
)
_MAX_VALUES = 1 << 21


class _TokenizeFields(BaseModel):
    model_config = STRICT

    model: str = ""
    prompt: str | None = None
    messages: Long[dict[str, Any]] = Field(default_factory=list)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    tools: list[Any] = Field(default_factory=list)


class _DetokenizeFields(BaseModel):
    model_config = STRICT

    model: str = ""
    tokens: Long[int]


async def tokenize(requests: RequestHandler, accepted: Accepted, body: bytes) -> Json:
    """Answer `/tokenize`. Raises DeltafrontError."""
    work, model = requests.text_budget.work, requests.model
    fields = await work(len(body), lambda _: _RULES.read(_TokenizeFields, body, model))
    request = GenerateRequest(prompt=_prompt(fields), sampling=SamplingParams(max_tokens=1))
    packed = await requests.token_ids(accepted, request, fields.add_generation_prompt)

    def said(_stopped: object) -> Json:
        ids = np.frombuffer(packed, dtype="<u4").tolist()
        spelled = requests.tokenizer.token_strings(ids) if fields.return_token_strs else None
        return {"count": len(ids), "max_model_len": requests.positions, "tokens": ids, "token_strs": spelled}

    return await work(len(packed), said)


async def detokenize(requests: RequestHandler, _accepted: Accepted, body: bytes) -> Json:
    """Answer `/detokenize`. Raises DeltafrontError."""
    work, model, tokenizer = requests.text_budget.work, requests.model, requests.tokenizer

    def text(_stopped: object) -> str:
        ids = _RULES.read(_DetokenizeFields, body, model, _MAX_VALUES).tokens
        if len(ids) > requests.positions:
            raise InvalidArgument("tokens", f"has {len(ids)} tokens: at most {requests.positions}")
        for number in ids:
            if not 0 <= number < 1 << 32:
                raise InvalidArgument("tokens", f"{number} is no token id")
        return tokenizer.decode(ids, skip_special_tokens=False)

    return {"prompt": await work(len(body), text)}


def _prompt(fields: _TokenizeFields) -> Prompt:
    if (fields.prompt is None) == (not fields.messages):
        raise InvalidArgument("prompt", "give a prompt, or messages")
    if fields.prompt is not None:
        special = fields.add_special_tokens is not False
        parse = SpecialTokens.PARSE
        return Prompt(text=fields.prompt, special_tokens=parse, add_special_tokens=special)
    return Prompt(
        messages=read_messages(fields.messages),
        chat_template_kwargs=fields.chat_template_kwargs,
        add_special_tokens=fields.add_special_tokens is True,
        tools=read_tools(fields.tools, "auto", True),
    )
