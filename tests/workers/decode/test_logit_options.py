"""Compares bias, penalties, min_p and min_tokens with plain loops and transformers, in batches and in resumed
answers."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from deltafront.kernels.sampling.sample import sample
from deltafront.workers.decode.sampling.row_options import AnswerSoFar
from deltafront.workers.decode.step_rows import Row, sampling_rows
from deltafront.workers.messages.events import FinishReason
from deltafront.workers.messages.requests import GenerateJob, RequestOptions, Sampling
from deltafront.workers.model.grammars import Grammars, json_grammar

from .test_grammars import EOS, grammars, text_of  # noqa: F401
from .test_sampling import CPU, VOCAB, logits_of

PENALTIES = {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.3}


def packed(ids: Any) -> bytes:
    return np.asarray(ids, dtype="<u4").tobytes()


def row(sampling: Sampling, prompt: list[int], answer: list[int], start: int = 0, key: int = 0) -> Row:
    so_far = AnswerSoFar(
        packed(sorted(set(prompt))), array("I", answer), start, (EOS, *sampling.stop_token_ids)
    )
    return Row(key, (), 0, 0, sampling, False, so_far if sampling.changes_logits else None)


def changed(logits_V: torch.Tensor, sampling: Sampling, prompt: list[int], answer: list[int]) -> list[float]:
    """Return the changed logits by vLLM's definitions, token by token."""
    counts, found = Counter(answer), []
    for token, given in enumerate(logits_V.double().tolist()):
        logit = given + sampling.logit_bias.get(token, 0.0)
        if token in counts or token in prompt:
            penalty = sampling.repetition_penalty
            logit = logit / penalty if logit > 0 else logit * penalty
        logit -= sampling.frequency_penalty * counts[token] + sampling.presence_penalty * (token in counts)
        if len(answer) < sampling.min_tokens and token in (EOS, *sampling.stop_token_ids):
            logit = -np.inf
        found.append(logit)
    return found


def test_logit_options_match_plain_loops_in_a_mixed_batch() -> None:
    logits = logits_of(5, seed=3)
    samplings = [
        Sampling(),
        Sampling(**PENALTIES, logit_bias={4: 8.0, 7: -100.0}),
        Sampling(temperature=1.0, seed=3),
        Sampling(repetition_penalty=0.5),
        Sampling(min_tokens=4, stop_token_ids=(int(logits[4].argmax()),)),
    ]
    answers = [[1, 2], [3, 3, 9, 200], [5], [8, 8], [1, 2, 3]]
    prompts = [[1], [9, 11, 12, 250], [2], [40, 41], [6]]
    rows = [row(*given) for given in zip(samplings, prompts, answers, strict=True)]
    options = sampling_rows(rows, VOCAB, CPU).options
    assert options is not None and options.rows_K.tolist() == [1, 3, 4]
    found = options.change(logits, torch.tensor([len(answer) for answer in answers]))
    for index, given in enumerate(zip(samplings, prompts, answers, strict=True)):
        wanted = torch.tensor(changed(logits[index], *given), dtype=torch.float64)
        finite = torch.isfinite(wanted)
        torch.testing.assert_close(found[index][finite].double(), wanted[finite], rtol=1e-5, atol=1e-5)
        assert bool((found[index][~finite] < -1e38).all())
    assert torch.equal(found[[0, 2]], logits[[0, 2]])


def test_repetition_penalty_and_min_p_match_transformers() -> None:
    logits, ids = logits_of(1, seed=5), [3, 50, 50, 299]
    made = sampling_rows([row(Sampling(repetition_penalty=1.7), ids[:2], ids[2:])], VOCAB, CPU).options
    assert made is not None
    wanted = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([ids]), logits.clone())
    torch.testing.assert_close(made.change(logits, torch.tensor([9])), wanted)
    made = sampling_rows([row(Sampling(temperature=1.0, min_p=0.2), [], [])], VOCAB, CPU).options
    assert made is not None
    kept = made.drop_unlikely(logits - logits.amax()) > -torch.inf
    assert torch.equal(kept, MinPLogitsWarper(0.2)(None, logits.clone()) > -torch.inf)


def test_sampled_tokens_count_for_later_penalties() -> None:
    logits = logits_of(1, seed=1)
    order = logits[0].argsort(descending=True).tolist()
    given = sampling_rows([row(Sampling(presence_penalty=2.0, frequency_penalty=2.0), [], [])], VOCAB, CPU)
    logits = torch.full_like(logits, -9.0)
    logits[0, order[:3]] = torch.tensor([3.0, 2.0, 1.0])
    chosen = [int(sample(logits, given, torch.tensor([at]))[0]) for at in range(4)]
    assert chosen == [order[0], order[1], order[2], order[0]]


def test_logprob_ignores_the_logit_bias() -> None:
    logits = logits_of(1)
    ids, logprobs = sample(
        logits, sampling_rows([row(Sampling(logit_bias={5: 100.0}), [], [])], VOCAB, CPU), torch.tensor([0])
    )
    assert ids.tolist() == [5]
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[:, 5])


def test_requests_without_logit_options_allocate_nothing() -> None:
    plain = [row(Sampling(stop_token_ids=(3,)), [], []), row(Sampling(temperature=1.0), [], [])]
    assert sampling_rows(plain, VOCAB, CPU).options is None


def rolled(run: Any, ids: list[int], sampling: Sampling) -> list[int]:
    """Return the greedy answer, from one forward pass over all tokens for each token."""
    answer: list[int] = []
    while len(answer) < sampling.max_tokens:
        logits = torch.from_numpy(run.prefill([*ids, *answer]).logits)
        answer.append(int(np.argmax(changed(logits, sampling, ids, answer))))
    return answer


def job(name: str, ids: list[int], sampling: Sampling, **more: Any) -> GenerateJob:
    return GenerateJob(request_id=name, sampling=sampling, distinct_ids=packed(sorted(set(ids))), **more)


async def ask(run: Any, name: str, ids: list[int], sampling: Sampling, **more: Any) -> Any:
    await run.reserve(name, len(ids), sampling.max_tokens, **more)
    await run.deliver(name, ids)
    return await run.collect(job(name, ids, sampling))


OPTIONS = [
    Sampling(max_tokens=24, ignore_eos=True, **PENALTIES),
    Sampling(max_tokens=30, ignore_eos=True),
    Sampling(max_tokens=17, ignore_eos=True, frequency_penalty=-0.5, logit_bias={7: 3.0}),
    Sampling(max_tokens=21, ignore_eos=True, repetition_penalty=1.5),
]


@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "ahead"])
async def test_penalised_requests_of_a_batch_answer_as_alone(bench: Any, ahead: bool) -> None:
    """Requests join and leave, so that counts are restored from the answers."""
    run = await bench(looks_ahead=ahead)
    prompts = [[(5 * i + seed) % 190 for i in range(20 + seed)] for seed in range(4)]
    asked = (ask(run, f"r{n}", prompts[n], OPTIONS[n]) for n in range(4))
    for n, answer in enumerate(await asyncio.gather(*asked)):
        assert answer.ids == rolled(run, prompts[n], OPTIONS[n]), n


@pytest.mark.parametrize("cut", [1, 7])
async def test_resumed_answer_restores_its_penalty_counts(bench: Any, cut: int) -> None:
    run, ids = await bench(), list(range(40, 70))
    whole = (await ask(run, "a", ids, OPTIONS[0])).ids
    left = replace(OPTIONS[0], max_tokens=24 - cut)
    await run.reserve("b", len(ids), left.max_tokens, resume_tokens=cut)
    await run.deliver("b", ids)
    extend = packed(whole[:cut])
    assert (
        whole[:cut] + (await run.collect(job("b", ids, left, extend_ids=extend, answered_tokens=cut))).ids
        == whole
    )


async def test_min_tokens_suppresses_every_end_token(bench: Any) -> None:
    run, ids = await bench(), list(range(30))
    free = (await ask(run, "a", ids, Sampling(max_tokens=12, ignore_eos=True))).ids
    stop = (free[2],)
    first = free.index(free[2])
    ended = await ask(run, "b", ids, Sampling(max_tokens=12, stop_token_ids=stop, ignore_eos=True))
    assert (ended.ids, ended.finish.reason) == (free[: first + 1], FinishReason.STOP)
    held = await ask(run, "c", ids, Sampling(max_tokens=12, stop_token_ids=stop, min_tokens=9))
    assert len(held.ids) >= 9 and free[2] not in held.ids[:9]


async def test_penalised_answer_matches_its_grammar(bench: Any, grammars: Grammars) -> None:  # noqa: F811
    run = await bench(grammars=grammars)
    schema = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 3, "maxItems": 3}
    sampling = Sampling(max_tokens=99, min_tokens=60, temperature=1.0, seed=5, **PENALTIES)
    options = RequestOptions(constraint=json_grammar(json.dumps(schema)))
    answer = await ask(run, "a", list(range(25)), sampling, options=options)
    assert answer.finish.reason is FinishReason.STOP
    assert len(json.loads(text_of([token for token in answer.ids if token != EOS]))) == 3
