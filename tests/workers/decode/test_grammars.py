"""Tests answers that must match a grammar."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from deltafront.tests.schemas import SCHEMAS
from deltafront.workers.messages.events import FinishReason
from deltafront.workers.messages.requests import GenerateJob, RequestOptions, Sampling
from deltafront.workers.model.grammars import GrammarError, Grammars, GrammarState, Mask, json_grammar

EOS, VOCAB = 198, 199
TOKENS = [chr(code) for code in range(32, 127)] + ['{"', '"}', '":', 'Ġ"', "true", "false", "null", '","']
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    """Make grammars with a tokenizer for the tiny Llama: printable ASCII and some longer tokens."""
    directory = tmp_path_factory.mktemp("tokenizer")
    names = [*("Ġ" if token == " " else token for token in TOKENS)]
    names += [f"<{number}>" for number in range(len(names), EOS)] + ["</s>"]
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    return Grammars(directory, VOCAB, (EOS,))


def text_of(ids: list[int]) -> str:
    return "".join((*TOKENS, *[f"<{number}>" for number in range(len(TOKENS), EOS)])[i] for i in ids).replace(
        "Ġ", " "
    )


def options(grammar: str) -> dict[str, Any]:
    return {"options": RequestOptions(constraint=grammar)}


def prompt(seed: int) -> list[int]:
    return [(7 * i + seed) % EOS for i in range(20 + seed)]


def sampled(seed: int, tokens: int = 400) -> Sampling:
    return Sampling(max_tokens=tokens, temperature=1.0, seed=seed)


async def ask(run: Any, name: str, seed: int, schema: Any, tokens: int = 400) -> Any:
    grammar = {} if schema is None else options(json_grammar(json.dumps(schema)))
    return await run.ask(name, prompt(seed), sampled(seed, tokens), **grammar)


def check(answer: Any, schema: Any) -> None:
    assert answer.finish.reason is FinishReason.STOP, answer.finish
    jsonschema.validate(json.loads(text_of([token for token in answer.ids if token != EOS])), schema)


@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "ahead"])
async def test_requests_of_a_batch_match_their_own_grammars(
    bench: Any, grammars: Grammars, ahead: bool
) -> None:
    """Each row samples the same tokens as alone, with or without a grammar."""
    run, alone = await bench(grammars=grammars, looks_ahead=ahead), await bench(grammars=grammars)
    asked = [(1, PERSON), (2, None), (3, {"enum": ["yes", "no"]}), (4, None), (5, PERSON)]
    together = await asyncio.gather(*(ask(run, f"r{n}", n, schema, 120) for n, schema in asked))
    for answer, (n, schema) in zip(together, asked, strict=True):
        assert answer.ids == (await ask(alone, f"r{n}", n, schema, 120)).ids
        assert all(np.isfinite(token.logprob) for token in answer.tokens)
        if schema is not None:
            check(answer, schema)


async def test_next_request_in_a_batch_row_gets_no_old_grammar_mask(bench: Any, grammars: Grammars) -> None:
    run, plain = await bench(grammars=grammars), await bench()
    check(await ask(run, "a", 1, PERSON), PERSON)
    found = await asyncio.gather(ask(run, "b", 2, None, 60), ask(run, "c", 3, PERSON, 60))
    assert found[0].ids == (await ask(plain, "b", 2, None, 60)).ids


@pytest.mark.parametrize("cut", [1, 5, 17])
async def test_resumed_answer_continues_its_grammar(bench: Any, grammars: Grammars, cut: int) -> None:
    run = await bench(grammars=grammars)
    schema = {"type": "array", "items": PERSON, "minItems": 2, "maxItems": 2}
    whole, ids = await ask(run, "a", 3, schema), prompt(3)
    check(whole, schema)
    grammar = options(json_grammar(json.dumps(schema)))
    await run.reserve("b", len(ids), 400 - cut, resume_tokens=cut, **grammar)
    await run.deliver("b", ids)
    answered = np.asarray(whole.ids[:cut], dtype="<u4").tobytes()
    job = GenerateJob(
        request_id="b", sampling=sampled(3, 400 - cut), extend_ids=answered, answered_tokens=cut
    )
    assert whole.ids[:cut] + (await run.collect(job)).ids == whole.ids


async def test_answer_ends_when_its_grammar_is_complete(bench: Any, grammars: Grammars) -> None:
    """The answer ends there even if the request ignores end-of-sequence tokens."""
    run = await bench(grammars=grammars)
    ignoring = Sampling(max_tokens=50, ignore_eos=True)
    answer = await run.ask("a", prompt(1), ignoring, **options('start: "ab"'))
    assert (text_of(answer.ids), answer.finish.reason) == ("ab", FinishReason.STOP)


async def test_wrong_grammar_fails_only_its_request(bench: Any, grammars: Grammars) -> None:
    run = await bench(grammars=grammars)
    bad, good = await asyncio.gather(
        run.ask("a", prompt(1), sampled(1), **options("start: nothing")), ask(run, "b", 2, PERSON)
    )
    assert bad.finish.reason is FinishReason.FAILED and "nothing" in bad.finish.message
    check(good, PERSON)


@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "ahead"])
async def test_answer_fails_if_its_grammar_mask_cannot_be_computed(
    bench: Any, grammars: Grammars, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    run, masks, mask = await bench(grammars=grammars, looks_ahead=ahead), [], GrammarState.mask

    def three(state: GrammarState) -> Mask | None:
        masks.append(state)
        if len(masks) > 3:
            state.trouble = "too much work"
        return mask(state)

    monkeypatch.setattr(GrammarState, "mask", three)
    answer = await ask(run, "a", 1, PERSON)
    assert (answer.finish.reason, answer.finish.message) == (FinishReason.GRAMMAR, "too much work")
    assert 0 < len(answer.ids) <= 3
    grammars.begin(json_grammar(json.dumps(PERSON)), answer.ids)  # raises if the answer does not match


def test_any_end_token_may_end_an_answer(grammars: Grammars) -> None:
    """End tokens without a logit are ignored."""
    several = Grammars(grammars._directory, VOCAB, (9999, EOS, 150, 7, 10_000))
    state = several.begin('start: "a"*')
    mask = state.mask()
    assert mask is not None
    allowed = {token for token in range(VOCAB) if mask[token // 32] >> token % 32 & 1}
    assert allowed == {EOS, 150, 7, TOKENS.index("a")}
    state.take(150)
    assert state.ended and not state.trouble


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "objekt"}, "Invalid type: objekt"),
        ({"type": "string", "pattern": "^(a"}, "unclosed group"),
        ({"not": {"type": "string"}}, 'Unimplemented keys: ["not"]'),
        ({"enum": ["x" * 300_000]}, "characters: at most 262144"),
        (
            {
                "properties": {
                    f"p{n}": {"type": "string", "pattern": f"^(a|b){{0,{n}}}$"} for n in range(9999)
                }
            },
            "characters: at most",
        ),
    ],
)
def test_refuses_an_unusable_schema_in_one_line(grammars: Grammars, schema: Any, said: str) -> None:
    with pytest.raises(GrammarError) as refused:
        grammars.begin(json_grammar(json.dumps(schema)))
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_answer_that_violates_its_grammar_is_not_resumed(grammars: Grammars) -> None:
    with pytest.raises(GrammarError, match="do not follow"):
        grammars.begin('start: "ab"', [TOKENS.index("b")])


@pytest.mark.parametrize("count", [30, pytest.param(250, marks=pytest.mark.long)])
async def test_sampled_answers_of_random_schemas_validate(bench: Any, grammars: Grammars, count: int) -> None:
    """Each batch has several schemas and an answer without one. Steps are launched ahead."""
    run, plain = await bench(grammars=grammars, looks_ahead=True), await bench()
    batches: list[list[Any]] = []

    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(SCHEMAS, min_size=2, max_size=4))
    def collect(schemas: list[Any]) -> None:
        batches.append(schemas)

    collect()
    free = (await ask(plain, "free", 9, None, 30)).ids
    ended = 0
    for number, schemas in enumerate(batches):
        asked = [ask(run, f"{number}.{n}", n, schema, 300) for n, schema in enumerate(schemas)]
        *answers, unbound = await asyncio.gather(*asked, ask(run, f"{number}.free", 9, None, 30))
        assert unbound.ids == free
        for answer, schema in zip(answers, schemas, strict=True):
            if answer.finish.reason is FinishReason.LENGTH:
                continue  # a random model may generate digits for long
            check(answer, schema)
            ended += 1
    assert ended > 0.8 * sum(map(len, batches))
