"""Compares tiny models whose layers have states, linear attention or rolling buffers, with transformers,
served by a prefill group and a decode worker: in stages and batches, and with every way to continue from a
state: sessions, parts of them, conversations, shared documents and another attempt."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from deltafront.kernels.methods import MethodSpec, method_spec
from deltafront.tests.workers.conftest import Answer, Bench
from deltafront.tests.workers.in_process import InProcessReader, local_controller
from deltafront.tests.workers.in_ranks import followers, link
from deltafront.tests.workers.keys import DENSE, key_of
from deltafront.tests.workers.prompts import packed
from deltafront.tests.workers.tiny_hybrid import LAYERS, LINEAR_LAYERS, make_tiny_hybrid
from deltafront.tests.workers.tiny_model import VOCAB, greedy
from deltafront.tests.workers.tiny_windows import make_tiny_windows
from deltafront.workers.decode.engine import DecodeEngine
from deltafront.workers.messages.events import FinishReason, PrefillDone, PrefillReport, Prefix, SessionKept
from deltafront.workers.messages.prompts import boundary_before, state_places
from deltafront.workers.messages.requests import (
    DecodeFailed,
    GenerateJob,
    KeepSession,
    PrefillJob,
    RefusalReason,
    Refused,
    RequestOptions,
    Reservation,
    Reserved,
    Sampling,
)
from deltafront.workers.messages.stages import HandedState, HostKV, KVRange
from deltafront.workers.model.decoder.collectives import GroupCollectives
from deltafront.workers.model.decoder.load import load_model
from deltafront.workers.model.decoder.stack import LayerStack
from deltafront.workers.settings import DecodeConfig, ModelSpec, PrefillConfig

from .decode.test_shadow import read, reservation

NEW, CHUNK, SPACING = 20, 128, 64
GREEDY = Sampling(max_tokens=NEW, ignore_eos=True)
SIZES: dict[str, Any] = {"chunk_tokens": CHUNK, "cache_tokens": 4096, "stream_lease_s": 600.0}
"""No test ends because a busy machine renews late."""
Expected = Callable[[Sequence[int]], list[int]]


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(1000 * seed + length).choices(range(VOCAB - 1), k=length)


@pytest.fixture(scope="module", params=["linear", "rolling"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    make = make_tiny_hybrid if request.param == "linear" else make_tiny_windows
    directory = make(tmp_path_factory.mktemp(request.param))
    return ModelSpec(path=str(directory), dtype="float32", rolling_buffer=request.param == "rolling")


@pytest.fixture(scope="module")
def expected(model: ModelSpec) -> Expected:
    return greedy(Path(model.path), NEW)


class ToEngine:
    """Gives an engine the messages of stages, from their threads."""

    def __init__(self, engine: DecodeEngine, loop: asyncio.AbstractEventLoop) -> None:
        self.states: list[HandedState] = []
        self._loop, self._engine = loop, engine
        self.announce = partial(self._call, engine.announce)
        self.first_logits = partial(self._call, engine.first_logits)

    def state(self, message: HandedState) -> None:
        self.states.append(message)
        self._call(self._engine.state, message)

    def _call(self, method: Callable[[Any], Any], message: Any) -> None:
        asyncio.run_coroutine_threadsafe(method(message), self._loop).result()


class FromEngine:
    """Fetches KV and states from an engine, for a stage that begins within a prompt (`KVSource`)."""

    def __init__(self, engine: DecodeEngine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine, self._loop = engine, loop
        self.states: list[int] = []

    def fetch(self, _worker: str, wanted: Iterable[KVRange]) -> Iterator[tuple[KVRange, HostKV]]:
        for piece in wanted:
            yield piece, asyncio.run_coroutine_threadsafe(self._engine.kv(piece), self._loop).result()

    def state(self, _worker: str, request_id: str) -> HandedState:
        held = asyncio.run_coroutine_threadsafe(self._engine.held_state(request_id), self._loop).result()
        self.states.append(held.tokens)
        return held


class StateBench(Bench):
    """An engine, and a prefill group that prefills its prompts."""

    def __init__(self, engine: DecodeEngine, model: ModelSpec, stages: int) -> None:
        super().__init__(engine, engine._stack)
        self.ranks = 1 + len(engine._ranks)
        self.receiver = ToEngine(engine, asyncio.get_running_loop())
        self.source = FromEngine(engine, asyncio.get_running_loop())
        config = PrefillConfig(stages=stages, **SIZES)
        self.group = local_controller(model, config, self.receiver, self.source)
        self.kept: dict[str, int] = {}

    @property
    def free_slots(self) -> int:
        return self.engine._manager.states.free

    async def reserve(self, request_id: str, prompt: int, new: int, **more: Any) -> Any:
        self.kept[request_id] = more.get("keep_tokens", 0)
        return await super().reserve(request_id, prompt, new, **more)

    async def deliver(
        self,
        request_id: str,
        ids: list[int],
        chunk: int = 0,
        attempt: int = 0,
        method: MethodSpec = DENSE,
        start: int = 0,
    ) -> PrefillReport:
        job = PrefillJob(
            request_id=request_id,
            token_ids=packed(ids),
            method=method,
            decode_worker="decode:test",
            attempt=attempt,
            start=start,
            state_places=state_places(len(ids), self.kept[request_id], SPACING),
        )
        done = [event async for event in self.group.prefill(job)][-1]
        assert isinstance(done, PrefillDone)
        return done.report

    async def read(self, name: str, ids: Sequence[int], **more: Any) -> Answer:
        """Answer a prompt that the group prefills, with its prefix-cache key."""
        return await self.ask(name, list(ids), GREEDY, key=key_of(ids), **more)

    async def found(self, ids: Sequence[int]) -> int:
        prefix = await self.engine.find_prefix(key_of(ids))
        assert prefix is None or prefix.has_state
        return prefix.tokens if prefix else 0

    async def go_on(self, name: str, ids: Sequence[int], held: int, **more: Any) -> Answer:
        """Answer a prompt whose first tokens are cached."""
        given = {"key": key_of(ids), "prefix_tokens": held, "reads_rest": True, **more}
        await self.reserve(name, len(ids) - held, NEW, **given)
        extend, keep = packed(list(ids[held:])), more.get("keep_tokens", 0)
        return await self.collect(
            GenerateJob(request_id=name, sampling=GREEDY, extend_ids=extend, keep_tokens=keep)
        )

    async def group_goes_on(self, name: str, ids: Sequence[int], held: int, **more: Any) -> Answer:
        """Answer a prompt whose first tokens are cached, and whose rest the group prefills."""
        await self.reserve(name, len(ids) - held, NEW, key=key_of(ids), prefix_tokens=held, **more)
        await self.deliver(name, list(ids), start=held)
        return await self.collect(GenerateJob(request_id=name, sampling=GREEDY))

    async def talk(self, name: str, ids: Sequence[int], by_group: bool = False, **more: Any) -> Answer:
        """Answer a prompt from its cached prefix, or by the group if there is none."""
        prefix = await self.engine.find_prefix(key_of(ids))
        if prefix is None:
            return await self.read(name, ids, **more)
        if by_group and prefix.group_tokens:
            return await self.group_goes_on(name, ids, prefix.group_tokens, **more)
        return await self.go_on(name, ids, prefix.tokens, **more)


def stacks_of(model: ModelSpec, ranks: int) -> list[LayerStack]:
    """Load the ranks' parts of a model, linked."""
    if ranks == 1:
        return [load_model(model, "cpu")]
    stacks = [load_model(model, "cpu", collectives=GroupCollectives(rank, ranks)) for rank in range(ranks)]
    link(stacks)
    return stacks


@pytest.fixture
async def served(request: pytest.FixtureRequest, model: ModelSpec) -> AsyncIterator[Callable[..., Any]]:
    """`await served(stages=…, looks_ahead=…, key=value…)` starts both with this DecodeConfig. At the end
    every page and every slot must be free. With `pytest --ranks N` the engine has N ranks."""
    made: list[StateBench] = []
    of_run, closing = request.config.getoption("--ranks"), ExitStack()

    async def start(
        stages: int = 1, looks_ahead: bool = False, ranks: int = of_run, **config: Any
    ) -> StateBench:
        defaults = {"cache_tokens": 8192, "page_selection": "full", "append_chunk_tokens": 48}
        chosen = DecodeConfig(**(defaults | {"stream_lease_s": 600.0, "state_slots": 40} | config))
        lead, *others = stacks_of(model, ranks)
        their = closing.enter_context(followers([lead, *others], chosen, InProcessReader))
        engine = DecodeEngine("decode:test", lead, chosen, reader=InProcessReader, ranks=their)
        engine._runner.asynchronous = looks_ahead
        await engine.start()
        made.append(StateBench(engine, model, stages))
        return made[-1]

    yield start
    for one in made:
        assert not one.engine.fault
        await one.group.stop()
        await one.engine.close()
        assert (one.used, one.free_slots) == (0, one.engine._config.state_slots)
    closing.close()


@pytest.mark.parametrize(
    ("stages", "looks_ahead", "ranks"), [(1, True, 1), (2, False, 1), (3, True, 1), (2, True, 2)]
)
async def test_greedy_tokens_equal_transformers(
    served: Any, expected: Expected, stages: int, looks_ahead: bool, ranks: int
) -> None:
    run = await served(stages, looks_ahead, ranks)
    prompts = [prompt(length) for length in (1, 3, 16, 33, 127, 128, 129, 300)]
    wanted = [expected(ids) for ids in prompts]
    assert len({tuple(ids) for ids in wanted}) == len(wanted), "the model should answer prompts differently"
    alone = [await run.ask(f"alone-{i}", ids, GREEDY) for i, ids in enumerate(prompts)]
    together = await asyncio.gather(*(run.ask(f"together-{i}", ids, GREEDY) for i, ids in enumerate(prompts)))
    assert [answer.ids for answer in alone] == wanted
    assert [answer.ids for answer in together] == wanted
    assert {n for message in run.receiver.states for n in message.layers} == set(LINEAR_LAYERS)


@pytest.mark.parametrize("length", [47, 48, 150])
async def test_questions_fork_a_session_and_leave_it(served: Any, expected: Expected, length: int) -> None:
    run, document = await served(2), prompt(length)
    first = await run.ask("first", document, GREEDY, keep_tokens=length)
    assert first.ids == expected(document)
    session = first.first.session.session_id
    questions = [prompt(size, seed=1) for size in (1, 3, 20, 130)]
    answers = await asyncio.gather(
        *(run.ask_session(f"q{i}", session, question, GREEDY) for i, question in enumerate(questions))
    )
    assert [answer.ids for answer in answers] == [expected(document + question) for question in questions]
    again = await run.ask_session("again", session, questions[2], GREEDY)
    assert again.ids == expected(document + questions[2])
    assert await run.engine.release_session(session, "me")


async def test_sessions_end_within_prompts_and_follow_sessions(served: Any, expected: Expected) -> None:
    run, document = await served(), prompt(200)
    part = (await run.ask("part", document, GREEDY, keep_tokens=70)).first.session.session_id
    more, question = prompt(25, seed=2), prompt(9, seed=3)
    await run.reserve("longer", len(more), NEW, session_id=part, keep_tokens=95)
    job = GenerateJob(request_id="longer", sampling=GREEDY, extend_ids=packed(more), keep_tokens=95)
    longer = await run.collect(job)
    assert longer.ids == expected(document[:70] + more)
    await run.engine.release_session(part, "me")
    answer = await run.ask_session("question", longer.first.session.session_id, question, GREEDY)
    assert answer.ids == expected(document[:70] + more + question)


async def test_prefill_alone_becomes_a_session(served: Any, expected: Expected) -> None:
    run, document, question = await served(3), prompt(130), prompt(10, seed=4)
    await run.reserve("read", 130, 0, keep_ttl_s=30.0)
    await run.deliver("read", document)
    kept = await run.engine.keep(KeepSession(request_id="read"))
    assert isinstance(kept, SessionKept) and kept.session.tokens == 130
    answer = await run.ask_session("question", kept.session.session_id, question, GREEDY)
    assert answer.ids == expected(document + question)


@pytest.mark.parametrize("looks_ahead", [False, True])
async def test_conversation_continues_from_its_last_state(
    served: Any, expected: Expected, looks_ahead: bool
) -> None:
    run, ids = await served(looks_ahead=looks_ahead), prompt(150)
    answer = await run.read("turn 0", ids)
    for turn in range(1, 6):
        before = len(ids)
        ids = [*ids, *answer.ids, *prompt(7 + turn, seed=turn)]
        held = await run.found(ids)
        assert held == (before + NEW - 1) // 16 * 16, "all but the last token, whose state nobody made"
        answer = await run.go_on(f"turn {turn}", ids, held)
        assert answer.ids == expected(ids)


@pytest.mark.parametrize("length", [143, 144, 145])
async def test_same_prompt_again_continues_before_its_last_token(
    served: Any, expected: Expected, length: int
) -> None:
    run, ids = await served(), prompt(length)
    assert (await run.read("first", ids)).ids == expected(ids)
    assert await run.found(ids) == boundary_before(length)
    assert (await run.go_on("again", ids, boundary_before(length))).ids == expected(ids)


async def test_questions_about_one_document_share_its_states(served: Any, expected: Expected) -> None:
    run, document = await served(2), prompt(200)
    await run.read("first", document + prompt(30, seed=1))
    other = document + prompt(40, seed=2)
    assert await run.found(other) == 3 * SPACING
    assert (await run.go_on("other", other, 3 * SPACING)).ids == expected(other)
    refused = await run.engine.reserve(
        Reservation(
            request_id="elsewhere", owner="me", new_tokens=72, max_tokens=1, prefix_tokens=176,
            reads_rest=True, key=key_of(other),
        )
    )  # fmt: skip
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.NO_PREFIX
    assert "the state after 176 tokens of the prompt is no longer cached" in refused.message


async def test_session_cannot_end_within_a_cached_prefix(served: Any) -> None:
    run, ids = await served(), prompt(150)
    await run.read("first", ids)
    refused = await run.engine.reserve(
        Reservation(
            request_id="part", owner="me", new_tokens=6, max_tokens=1, prefix_tokens=144,
            reads_rest=True, key=key_of(ids), keep_tokens=100,
        )
    )  # fmt: skip
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.NO_PREFIX


@pytest.mark.parametrize("share", [1.0, 0.3])
async def test_sparse_methods_apply_to_the_layers_with_pages(
    model: ModelSpec, served: Any, expected: Expected, share: float
) -> None:
    run, ids = await served(2), prompt(700)
    await run.reserve("a", len(ids), NEW)
    method = method_spec("dpxa", {"share": share, "min_tokens": 0, "window": 1, "sink": 1})
    report = await run.deliver("a", ids, method=method)
    densities = {density.layer: density.computed / density.causal for density in report.density}
    full = {*range(LAYERS)} - {*LINEAR_LAYERS}
    assert {*densities} == ({*range(LAYERS)} if model.rolling_buffer else full)
    answer = await run.collect(GenerateJob(request_id="a", sampling=GREEDY))
    exact = all(densities[layer] == 1.0 for layer in full)
    assert exact == (answer.ids == expected(ids)) == (share == 1.0)


@pytest.mark.parametrize("stages", [1, 3])
async def test_group_continues_a_cached_prefix_from_its_state(
    served: Any, expected: Expected, stages: int
) -> None:
    run, document = await served(stages), prompt(300)
    await run.read("first", document + prompt(30, seed=1))
    other = document + prompt(60, seed=2)
    prefix = await run.engine.find_prefix(key_of(other))
    assert prefix == Prefix(tokens=256, has_state=True, group_tokens=256)
    assert (await run.group_goes_on("other", other, 256)).ids == expected(other)
    assert set(run.source.states) == {256}
    short = document[:200] + prompt(300, seed=3)
    prefix = await run.engine.find_prefix(key_of(short))
    assert prefix == Prefix(tokens=192, has_state=True, group_tokens=128), "a group begins at a block"
    assert (await run.group_goes_on("short", short, 128)).ids == expected(short)


@pytest.mark.parametrize(("points", "start"), [([128, 256], 256), ([128, 300], 128), ([288], 0)])
async def test_another_attempt_begins_where_a_state_has_arrived(
    served: Any, expected: Expected, points: list[int], start: int
) -> None:
    run, ids = await served(2), prompt(300)
    await run.reserve("a", len(ids), NEW, keep_tokens=100, key=key_of(ids))
    await run.deliver("a", ids)
    assert await run.engine.resume("a", points, 1) == start
    before = list(run.receiver.states)
    await run.deliver("a", ids, attempt=1, start=start)
    for message in before:
        await run.engine.state(message)  # of the first attempt
    answer = await run.collect(GenerateJob(request_id="a", sampling=GREEDY, keep_tokens=100))
    assert answer.ids == expected(ids)
    session, question = answer.first.session.session_id, prompt(12, seed=8)
    assert (await run.ask_session("q", session, question, GREEDY)).ids == expected(ids[:100] + question)


async def test_a_request_without_a_state_gives_none(served: Any) -> None:
    run = await served()
    await run.reserve("a", 40, NEW)
    for name in ("a", "unknown"):
        with pytest.raises(DecodeFailed, match=f"request {name} has no state here"):
            await run.engine.held_state(name)
    await run.engine.cancel("a")


async def test_state_that_does_not_fit_fails_its_request(served: Any) -> None:
    run, ids = await served(), prompt(40)
    await run.ask("good", ids, GREEDY)
    message = run.receiver.states[-1]
    for change, words in (
        ({"layers": (0, 1, 2, 3, 4, 5)}, "layers .3., which have none"),
        ({"arrays": (message.arrays[0][:, :1], message.arrays[1])}, "not"),
        ({"arrays": (message.arrays[0], message.arrays[1].astype("float64"))}, "float64"),
        ({"arrays": message.arrays[:1]}, "2 arrays, and 1 came"),
    ):
        await run.reserve("bad", len(ids), NEW)
        wrong = HandedState(**{**vars(message), "request_id": "bad", **change})
        with pytest.raises(Exception, match=words):
            await run.engine.state(wrong)
        await run.engine.cancel("bad")
    assert run.free_slots == 40


def branch(draw: random.Random, said: Sequence[list[int]], seed: int) -> list[int]:
    """Return a prompt that begins like one of `said`, up to any token."""
    before = draw.choice(said)
    return [*before[: draw.randrange(20, len(before) + 1)], *prompt(draw.randrange(1, 30), seed)]


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_is_cached_answers_equal_those_read_anew(
    served: Any, expected: Expected, seed: int
) -> None:
    """Few slots, so that states are evicted; prompts that branch at any token, several at once."""
    draw = random.Random(seed)
    run = await served(1 + seed % 3, looks_ahead=bool(seed % 2), state_slots=9, cache_tokens=4096)
    said = [prompt(draw.randrange(100, 260), seed=seed)]
    for turn in range(6):
        asked = [branch(draw, said, turn) for _ in range(2)]
        answers = await asyncio.gather(
            *(run.talk(f"{turn}-{n}", ids, draw.random() < 0.5, wait=True) for n, ids in enumerate(asked)),
            return_exceptions=False,
        )
        for ids, answer in zip(asked, answers, strict=True):
            assert answer.ids == expected(ids)
            said.append([*ids, *answer.ids])


async def test_an_answer_is_read_again_for_a_comparison(served: Any) -> None:
    """The log-probabilities of an answer are those of the same tokens as a prompt, and a request that comes
    meanwhile ends the comparison."""
    run, ids = await served(2), prompt(150)
    given = (await run.ask("given", ids, GREEDY)).tokens
    whole = [*ids, *(token.token_id for token in given)]
    options = RequestOptions(prompt_logprobs=1, logprobs_from=len(ids), shadow=True)
    assert isinstance(await run.engine.reserve(reservation("shadow", len(whole), options)), Reserved)
    found, _finish = await read(run, "shadow", whole)
    dense = [token for token in found if token.index >= len(ids)]
    assert [token.token_id for token in dense] == [token.token_id for token in given]
    assert [token.logprob for token in dense] == pytest.approx([token.logprob for token in given], abs=1e-4)
    assert isinstance(await run.engine.reserve(reservation("ended", len(whole), options)), Reserved)
    reading = asyncio.create_task(read(run, "ended", whole))
    await asyncio.sleep(0)
    await run.ask("another", ids, GREEDY)
    assert (await reading)[1].reason is FinishReason.CANCELLED


@pytest.mark.parametrize("looks_ahead", [False, True])
async def test_cancelled_requests_free_their_slots_and_spoil_no_state(
    served: Any, expected: Expected, looks_ahead: bool
) -> None:
    run, draw, document = await served(2, looks_ahead, state_slots=12), random.Random(5), prompt(180)
    kept = await run.ask("kept", document, GREEDY, keep_tokens=180)
    session = kept.first.session.session_id
    for number in range(12):
        name, ids = f"r{number}", document + prompt(30, seed=number)
        asked = [
            asyncio.create_task(run.talk(name, ids, wait=True)),
            asyncio.create_task(run.ask_session(f"{name}-s", session, prompt(60, number), GREEDY, wait=True)),
        ]
        await asyncio.sleep(draw.uniform(0.0, 0.15))
        for one in (name, f"{name}-s"):
            await run.engine.cancel(one)
        await asyncio.gather(*asked, return_exceptions=True)
        assert run.free_slots == 11, "the session has one"
    ids = document + prompt(30, seed=3)
    assert (await run.talk("last", ids)).ids == expected(ids)
    question = prompt(20, seed=9)
    assert (await run.ask_session("q", session, question, GREEDY)).ids == expected(document + question)


async def test_statistics_tell_slots_and_evicted_states(served: Any) -> None:
    run = await served(state_slots=12)
    await run.ask("kept", prompt(100), GREEDY, keep_tokens=100)
    stats = await run.engine.stats()
    assert (stats.state_slots, stats.state_slots_free, stats.states_evicted) == (12, 11, 0)
    for seed in range(4):
        await run.read(f"r{seed}", prompt(200, seed))
    stats = await run.engine.stats()
    assert stats.state_slots_free == 11, "cached states count as free"
    assert stats.states_evicted > 0


async def test_warm_up_leaves_answers_as_they_are(model: ModelSpec, served: Any, expected: Expected) -> None:
    run, ids = await served(warm_up=True), prompt(200)
    config = PrefillConfig(**SIZES, warm_up=("dense", "dpxa"))
    group = local_controller(model, config, run.receiver)
    await run.group.stop()
    run.group = group
    assert (await run.ask("first", ids, GREEDY)).ids == expected(ids)
