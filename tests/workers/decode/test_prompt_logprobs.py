"""The log-probabilities of a prompt's tokens, against transformers on the same weights."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from deltafront.workers.decode import runner
from deltafront.workers.messages.events import FinishReason, PromptLogprobs
from deltafront.workers.messages.requests import GenerateJob, RequestOptions, Reserved, Sampling

PROMPT = [(7 * i * i + 3) % 190 for i in range(131)]


async def measure(run: Any, name: str, ids: list[int], tokens: int, top: int = 0) -> tuple[list[Any], Any]:
    options = RequestOptions(prompt_logprobs=top)
    reserved = await run.reserve(name, len(ids), tokens, reads_rest=True, options=options)
    assert isinstance(reserved, Reserved)
    packed = np.asarray(ids, dtype="<u4").tobytes()
    sampling = Sampling(max_tokens=tokens, ignore_eos=True)
    events = [
        e
        async for e in run.engine.generate(GenerateJob(request_id=name, sampling=sampling, extend_ids=packed))
    ]
    scored = [token for event in events if isinstance(event, PromptLogprobs) for token in event.tokens]
    return scored, events


@pytest.mark.parametrize("rows", [5, 32])
async def test_prompt_logprobs_sum_to_those_of_transformers(
    bench: Any, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """In chunks of 48 tokens, whose logits are made a few rows at a time."""
    monkeypatch.setattr(runner, "_LOGIT_ROWS", rows)
    run = await bench()
    scored, events = await measure(run, "a", PROMPT, 0, top=2)
    model = LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    with torch.inference_mode():
        wanted_TV = model(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    wanted_T = wanted_TV.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    assert [token.index for token in scored] == list(range(1, len(PROMPT)))
    assert [token.token_id for token in scored] == PROMPT[1:]
    found_T = torch.tensor([token.logprob for token in scored])
    torch.testing.assert_close(found_T, wanted_T, atol=1e-3, rtol=1e-3)
    assert float(found_T.sum()) == pytest.approx(float(wanted_T.sum()), rel=1e-4)
    assert [[one.token_id for one in token.top] for token in scored] == wanted_TV.topk(2).indices.tolist()
    assert events[-1].reason is FinishReason.LENGTH and events[-1].completion_tokens == 0


async def test_prompt_logprobs_do_not_change_the_answer(bench: Any) -> None:
    run = await bench()
    free = await run.ask("a", PROMPT, Sampling(max_tokens=7, ignore_eos=True))
    (scored, events), other = await asyncio.gather(
        measure(run, "b", PROMPT, 7), run.ask("c", PROMPT[:60], Sampling(max_tokens=9, ignore_eos=True))
    )
    assert len(scored) == len(PROMPT) - 1 and not scored[0].top
    assert [event.token_id for event in events if hasattr(event, "token_id")] == free.ids
    assert other.ids == (await run.ask("d", PROMPT[:60], Sampling(max_tokens=9, ignore_eos=True))).ids


async def test_prompt_of_one_token_has_no_logprobs(bench: Any) -> None:
    scored, events = await measure(await bench(), "a", [5], 0)
    assert not scored and events[-1].reason is FinishReason.LENGTH
