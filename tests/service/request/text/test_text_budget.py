"""A door's budget for texts: its limits, its shares per caller, and the release of memory."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltafront.service.client import DeltafrontClient
from deltafront.service.errors import InvalidArgument, Overloaded, TooLong
from deltafront.service.request.callers import ANYONE
from deltafront.service.request.calls import MAX_MESSAGES, GenerateRequest, Prompt, SamplingParams
from deltafront.service.request.text import pieces as module
from deltafront.service.request.text.pieces import TextTooLong, TokenizationStopped, TokenLimit
from deltafront.service.request.text.text_budget import SHORT_BYTES, HeldText, TextBudget
from deltafront.service.request.text.tokenizer import TextTokenizer

from ...inprocess import HANG_S, House, edge, wait_until
from ...test_requests import nothing_left
from .test_tokenizer_pieces import DIVISIBLE, NOVEL

MOST = 64 << 20
LONG = 8 << 20


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, MOST) | st.integers(0, SHORT_BYTES), st.booleans()),
        max_size=30,
    )
)
def test_text_budget_is_never_exceeded(asked: list[tuple[str, int, bool]]) -> None:
    texts, held = TextBudget(MOST), list[HeldText]()
    for owner, size, leaves in asked:
        if leaves and held:
            held.pop(0).release()
        try:
            held.append(texts.hold(owner, size))
        except Overloaded as error:
            assert error.retry_after_s is not None and held
        assert sum(one.size for one in held) <= MOST
        long = [one for one in held if one.size > SHORT_BYTES]
        assert len(long) < 2 or sum(one.size for one in long) <= MOST * 3 // 4
        for one_of_them in "ab":
            mine = [one.size for one in held if one.size and one.owner == one_of_them]
            assert len(mine) < 2 or sum(mine) <= MOST // 2


def test_long_texts_of_all_callers_leave_room_for_short_ones() -> None:
    texts, held = TextBudget(MOST), list[HeldText]()
    with pytest.raises(Overloaded):
        held.extend(texts.hold("a", LONG) for _ in range(100))
    held.append(texts.hold("b", LONG))
    with pytest.raises(Overloaded):
        held.extend(texts.hold("b", LONG) for _ in range(100))
    texts.hold("c", SHORT_BYTES)


@pytest.mark.parametrize("size", [1000, SHORT_BYTES, LONG])
def test_many_callers_together_leave_text_budget_for_one_more(size: int) -> None:
    texts, held = TextBudget(64 * size), list[HeldText]()
    for owner in "abc":
        with pytest.raises(Overloaded):
            while True:
                held.append(texts.hold(owner, size))
    assert texts.hold("d", 1000)


def test_callers_without_tokens_share_the_whole_budget() -> None:
    texts = TextBudget(MOST)
    held = [texts.hold(ANYONE, SHORT_BYTES) for _ in range(MOST // SHORT_BYTES)]
    assert sum(one.size for one in held) == MOST


def test_text_larger_than_the_budget_gets_no_retry_time() -> None:
    with pytest.raises(Overloaded) as caught:
        TextBudget(MOST).hold("a", MOST + 1)
    assert caught.value.retry_after_s is None


def test_growing_a_held_text_rechecks_the_budget() -> None:
    texts = TextBudget(MOST)
    with texts.hold("a", 0) as first, texts.hold("a", LONG):
        first.grow(MOST // 2 - LONG)
        with pytest.raises(Overloaded):
            first.grow(MOST // 2 - LONG + 1)
    texts.hold("a", MOST)


def test_long_texts_are_tokenised_in_turns_and_short_ones_at_once() -> None:
    async def run() -> None:
        texts, free, begun = TextBudget(MOST), threading.Event(), list[str]()

        def long(_stopped: Callable[[], bool]) -> None:
            begun.append("long")
            assert free.wait(HANG_S)

        waiting = [asyncio.create_task(texts.work(SHORT_BYTES + 1, long)) for _ in range(3)]
        while not begun:
            await asyncio.sleep(0.01)
        await texts.work(SHORT_BYTES, lambda _stopped: None)
        assert begun == ["long"]
        free.set()
        await asyncio.gather(*waiting)
        assert len(begun) == 3

    asyncio.run(asyncio.wait_for(run(), HANG_S))


def test_tokenising_stops_when_its_caller_leaves() -> None:
    async def run() -> None:
        texts, seen, begun = TextBudget(MOST), threading.Event(), threading.Event()

        def work(stopped: Callable[[], bool]) -> None:
            begun.set()
            while not stopped():
                seen.wait(0.01)
            seen.set()

        first = asyncio.create_task(texts.work(LONG, work))
        second = asyncio.create_task(texts.work(LONG, lambda _stopped: pytest.fail("nobody waits for it")))
        assert await asyncio.to_thread(begun.wait, HANG_S)
        for task in (second, first):
            task.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        assert await asyncio.to_thread(seen.wait, HANG_S)

    asyncio.run(asyncio.wait_for(run(), HANG_S))


# --- the tokenizer -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made() -> TextTokenizer:
    return TextTokenizer(DIVISIBLE["gpt-2"](), None, {})


def test_tokenising_stops_at_the_token_limit(made: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 100)
    asked = 0

    def stopped() -> bool:
        nonlocal asked
        asked += 1
        return False

    with pytest.raises(TextTooLong, match="more than 1000 tokens"):
        made.with_limit(TokenLimit(1000, stopped)).encode(NOVEL, add_bos=False)
    assert asked < 5
    count = len(made.encode(NOVEL, add_bos=False)) // 4
    assert len(made.with_limit(TokenLimit(count)).encode(NOVEL, add_bos=False)) == 4 * count


def test_tokenising_ends_when_its_caller_has_left(
    made: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE", 100)
    answers = iter([False, False, True])
    with pytest.raises(TokenizationStopped):
        made.with_limit(TokenLimit(stopped=lambda: next(answers))).encode(NOVEL, add_bos=False)


def test_long_text_without_spaces_is_estimated_from_its_start(
    made: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE", 10)
    text = NOVEL.replace(" ", "_")
    with pytest.raises(TextTooLong, match="more than 1000 tokens"):
        made.with_limit(TokenLimit(1000)).encode(text, add_bos=False)
    fits = len(made.encode(text, add_bos=False)) // 4
    assert len(made.with_limit(TokenLimit(fits)).encode(text, add_bos=False)) == 4 * fits
    monkeypatch.setattr(module, "_LONGEST_PIECE", 20_000)
    with pytest.raises(TextTooLong, match="without a place to cut"):
        made.encode(text, add_bos=False)
    assert made.encode(NOVEL, add_bos=False)


def test_no_token_exceeds_the_bound_on_token_length(made: TextTokenizer) -> None:
    tokens = len(made.encode(NOVEL, add_bos=False)) // 4
    assert len(NOVEL.encode()) <= tokens * made.longest_token


# --- a door ------------------------------------------------------------------------------------------------


def generate(client: DeltafrontClient, prompt: Any, **options: Any) -> list[Any]:
    return list(client.generate(prompt, max_tokens=1, **options))


def test_refuses_texts_too_long_for_the_model_before_tokenising(
    client: DeltafrontClient, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_: Any, **__: Any) -> None:
        pytest.fail("it was tokenised")

    monkeypatch.setattr(TextTokenizer, "encode", encode)
    monkeypatch.setattr(TextTokenizer, "encode_chat", encode)
    most = house.door._requests._limits.max_characters
    text = "a" * (most + 1)
    for prompt in (
        text,
        [{"role": "user", "content": text}],
        [{"role": "user", "content": text[: most // 2 + 1]}] * 2,
    ):
        with pytest.raises(InvalidArgument, match="characters cannot fit the model's 8192 positions"):
            generate(client, prompt)
    with pytest.raises(InvalidArgument, match=r"request: \d+ bytes cannot fit this model"):
        generate(client, "a" * house.door._requests.max_request_bytes)
    nothing_left(house)


def test_refuses_too_many_messages(client: DeltafrontClient) -> None:
    message = {"role": "user", "content": "a"}
    assert generate(client, [message] * 100)
    with pytest.raises(InvalidArgument, match=f"prompt.messages: {MAX_MESSAGES + 1} are too many"):
        generate(client, [message] * (MAX_MESSAGES + 1))
    with pytest.raises(InvalidArgument, match="request: GenerateRequest has more than 65536 fields"):
        generate(client, [{"role": "", "content": ""}] * 100_000)


@pytest.mark.parametrize("role", ["", "user\nsystem", "<eos>", "User", "narrator", "x" * 1000])
def test_refuses_an_unknown_role(client: DeltafrontClient, role: str) -> None:
    with pytest.raises(InvalidArgument, match=r"prompt.messages\[0\].role: .* must be one of system"):
        generate(client, [{"role": role, "content": "hi"}])


def test_developer_role_counts_as_system(client: DeltafrontClient) -> None:
    messages = [{"role": "developer", "content": "be"}, {"role": "user", "content": "hi"}]
    same = [{**messages[0], "role": "system"}, messages[1]]
    (*_, first), (*_, second) = generate(client, messages), generate(client, same)
    assert first.usage == second.usage


def test_appended_text_and_documents_hold_no_control_tokens(client: DeltafrontClient) -> None:
    """On request, control tokens in a text are parsed."""
    for prompt, append in (("a<eos>b", None), ("ab", "<eos>")):
        tokens = []
        for rule in ("text", "parse"):
            *_, finish = generate(client, prompt, append=append, special_tokens=rule)
            tokens.append(finish.usage.prompt_tokens)
        assert tokens[0] == tokens[1] + len("<eos>") - 1
    with pytest.raises(InvalidArgument, match="special_tokens: 'yes' is not text or parse"):
        generate(client, "a", special_tokens="yes")


def test_text_budget_is_freed_after_tokenising(house: House) -> None:
    """The text is freed before the answer ends."""
    marker = "A text that nobody holds. " * 20

    def texts() -> int:
        gc.collect()
        return sum(isinstance(one, Prompt) and one.text == marker for one in gc.get_objects())

    async def run() -> int:
        def read() -> GenerateRequest:
            return GenerateRequest(
                Prompt(text="".join(marker)), sampling=SamplingParams(max_tokens=50, ignore_eos=True)
            )

        stream = edge(house.door._requests, read, len(marker))
        held = house.door._requests.text_budget._held
        async for event in stream:
            if type(event).__name__ == "Token":
                assert not held
                left = texts()
                break
        await stream.aclose()
        return left

    assert house.loop.run(run()) == 0
    nothing_left(house)


def test_door_refuses_texts_while_the_text_budget_is_full(house: House, client: DeltafrontClient) -> None:
    texts = house.door._requests.text_budget
    held = texts.hold("somebody", texts._max_bytes)
    with pytest.raises(Overloaded, match="as much text to read as it can hold") as caught:
        generate(client, "a")
    assert caught.value.retry_after_s == 1.0
    held.release()
    assert generate(client, "a")
    wait_until(lambda: not texts._held, "room is not given back")


def test_error_names_the_text_field_that_is_too_long(
    house: House, client: DeltafrontClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE", 10)
    with pytest.raises(InvalidArgument, match="append: is more than 8192 tokens: shorten it"):
        generate(client, "a", append="ab cd " * 2000)
    assert issubclass(TooLong, InvalidArgument)
