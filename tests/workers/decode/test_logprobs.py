"""Tests that a step's top log-probabilities are the model's own, for any sampling options."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from deltafront.workers.messages.requests import Sampling

SAMPLINGS = [
    Sampling(max_tokens=9, ignore_eos=True, top_logprobs=20),
    Sampling(max_tokens=14, ignore_eos=True),
    Sampling(max_tokens=12, ignore_eos=True, top_logprobs=3, temperature=1.5, top_k=5, seed=7),
    Sampling(max_tokens=10, ignore_eos=True, top_logprobs=1, presence_penalty=2.0),
]


@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "ahead"])
async def test_top_logprobs_ignore_sampling_options(bench: Any, ahead: bool) -> None:
    run, plain = await bench(looks_ahead=ahead), await bench()
    prompts = [[(3 * i + seed) % 190 for i in range(18 + seed)] for seed in range(4)]
    answers = await asyncio.gather(*(run.ask(f"r{n}", prompts[n], SAMPLINGS[n]) for n in range(4)))
    for ids, sampling, answer in zip(prompts, SAMPLINGS, answers, strict=True):
        for place, token in enumerate(answer.tokens):
            logits = torch.from_numpy(run.prefill([*ids, *answer.ids[:place]]).logits)
            wanted = logits.log_softmax(-1).topk(max(1, sampling.top_logprobs))
            assert len(token.top) == sampling.top_logprobs
            assert [one.token_id for one in token.top] == wanted.indices.tolist()[: sampling.top_logprobs]
            torch.testing.assert_close(
                torch.tensor([one.logprob for one in token.top]),
                wanted.values[: sampling.top_logprobs],
                atol=1e-4,
                rtol=1e-4,
            )
    assert answers[1].ids == (await plain.ask("b", prompts[1], SAMPLINGS[1])).ids
