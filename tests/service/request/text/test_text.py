"""Tokenizer, incremental detokeniser and stop strings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from deltafront.service.request.text.detokenize import AnswerText, Detokenizer, StopMatcher
from deltafront.service.request.text.tokenizer import TemplateError, TextTokenizer

from ...inprocess import TEMPLATE

END, UNKNOWN = "</s>", "\N{REPLACEMENT CHARACTER}"
SENTENCEPIECE = [*(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581w", "w", "é", END]


def bytewise() -> Tokenizer:
    """Make a byte-level tokenizer with a token for each byte: id 0 for byte 0 and so on."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    tokenizer = Tokenizer(models.BPE({letters[byte]: byte for byte in range(256)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Make a tokenizer like Llama 2's: it drops the first space, and encodes unknown text as bytes."""
    vocabulary = {piece: number for number, piece in enumerate(SENTENCEPIECE)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.add_special_tokens([END])
    parts = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


BYTES, PIECES = bytewise(), sentencepiece()


def streamed(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[list[str], str]:
    detokenizer = Detokenizer(tokenizer)
    return [detokenizer.push(token) for token in ids], detokenizer.flush()


@given(st.text(alphabet="aé€🙂 \n", max_size=30))
def test_streamed_pieces_are_whole_characters_of_the_text(text: str) -> None:
    pieces, rest = streamed(BYTES, list(text.encode()))
    assert "".join(pieces) == text and rest == ""
    assert [piece for piece in pieces if piece] == list(text)


@given(st.lists(st.integers(0, 255), max_size=60))
def test_streamed_text_of_any_bytes_equals_decoding_at_once(ids: list[int]) -> None:
    """Only the number of consecutive U+FFFD may differ where a long run is cut."""
    pieces, rest = streamed(BYTES, ids)
    whole, decoded = "".join(pieces) + rest, BYTES.decode(ids)
    if len(ids) <= 16:
        assert whole == decoded
    if all(len(run) < 12 for run in decoded.split("a")):
        assert whole.replace(UNKNOWN, "") == decoded.replace(UNKNOWN, "")
    assert not rest or rest.endswith("\N{REPLACEMENT CHARACTER}")


@given(st.lists(st.sampled_from([END, "\u2581", "\u2581w", "w", "é"]), max_size=60))
def test_streamed_words_keep_their_spaces(pieces: list[str]) -> None:
    ids = [SENTENCEPIECE.index(piece) for piece in pieces]
    shown, rest = streamed(PIECES, ids)
    assert "".join(shown) + rest == PIECES.decode(ids)


@given(st.text(alphabet="aé€🙂w", max_size=20))
def test_characters_made_of_byte_tokens_are_streamed_whole(text: str) -> None:
    """The tokenizer's ByteFallback makes these tokens."""
    word = SENTENCEPIECE.index("\u2581w")
    ids = [word, *text.encode(), word, *text.encode(), word]
    shown, rest = streamed(PIECES, ids)
    assert "".join(shown) + rest == PIECES.decode(ids) == f"w{text} w{text} w"


@given(st.lists(st.sampled_from([0x61, 0xF0, 0x9F, 0xC3, 0xA9, 0xFF, 0x20, *range(256, 261)]), max_size=60))
def test_invalid_utf_8_bytes_do_not_end_the_answer(ids: list[int]) -> None:
    """DecodeStream raises for some of them. Later words still have their spaces."""
    word = SENTENCEPIECE.index("\u2581w")
    shown, rest = streamed(PIECES, [word, *ids, *[0xFF] * 17, word, word])
    whole = "".join(shown) + rest
    assert whole.startswith("w") and whole.endswith(" w w")
    words = sum(token == word for token in ids)
    assert whole.count("w") == 3 + words + sum(SENTENCEPIECE[token] == "w" for token in ids)


@pytest.mark.parametrize("filler", [0xFF, SENTENCEPIECE.index(END)])
def test_streaming_tokens_without_text_holds_back_few_tokens(filler: int) -> None:
    """Otherwise the time of a garbage answer would grow with the square of its length."""
    held: list[int] = []
    detokenizer, word = Detokenizer(PIECES), SENTENCEPIECE.index("\u2581w")
    text = ""
    for token in (word, *[filler] * 500, word):
        text += detokenizer.push(token)
        held.append(len(detokenizer._held) + len(detokenizer._before))
    assert text.startswith("w") and text.endswith(" w")
    assert max(held) < 40


def test_answer_resumed_elsewhere_has_the_same_text() -> None:
    """The connection breaks in the middle of a character, and of a stop string."""
    ids = [*"aé🙂b".encode(), *b"STO", *b"x"]
    for cut in range(len(ids) + 1):
        first, again = (AnswerText(Detokenizer(BYTES), ["STOP"], answered=part) for part in ((), ids[:cut]))
        before = "".join(first.push(token).text for token in ids[:cut])
        after = "".join(again.push(token).text for token in ids[cut:]) + again.flush().text
        assert before + after == "aé🙂bSTOx"


def brute(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Find the end of an answer that arrives letter by letter: the stop string that is complete first."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


words = st.text(alphabet="ab", min_size=1, max_size=4)


@given(st.text(alphabet="abc", max_size=40), st.lists(words, max_size=4), st.data())
def test_stop_strings_are_never_shown(text: str, stops: list[str], data: st.DataObject) -> None:
    matcher, shown, stopped = StopMatcher(stops), "", False
    rest = text
    while rest and not stopped:
        size = data.draw(st.integers(1, 3))
        match = matcher.push(rest[:size])
        rest, shown, stopped = rest[size:], shown + match.text, bool(match.stop)
        expected, _ = brute(text, stops)
        assert expected.startswith(shown) or any(stop in text for stop in stops)
    if not stopped:
        shown += matcher.flush()
    assert stopped == any(stop in text for stop in stops)
    assert shown == text or stopped
    assert not any(stop in shown for stop in stops)
    assert text.startswith(shown)


@given(st.text(alphabet="abc", max_size=30), st.lists(words, min_size=1, max_size=3))
def test_stop_matching_letter_by_letter_equals_brute_force(text: str, stops: list[str]) -> None:
    matcher, shown = StopMatcher(stops), ""
    for letter in text:
        match = matcher.push(letter)
        shown += match.text
        if match.stop:
            break
    else:
        shown += matcher.flush()
    assert shown == brute(text, stops)[0]


@given(st.text(alphabet="abc", max_size=30), st.lists(words, min_size=1, max_size=3))
def test_holds_back_only_text_that_may_begin_a_stop_string(text: str, stops: list[str]) -> None:
    matcher, shown = StopMatcher(stops), ""
    for count, letter in enumerate(text, 1):
        match = matcher.push(letter)
        shown += match.text
        if match.stop:
            return
        held = text[len(shown) : count]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


def test_stop_string_may_complete_when_held_text_is_flushed() -> None:
    answer = AnswerText(Detokenizer(BYTES), ["\N{REPLACEMENT CHARACTER}"])
    assert answer.push(0xF0).text == ""
    assert answer.flush().stop


# --- tokenizer ---------------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer(model: Path) -> TextTokenizer:
    return TextTokenizer.load(model)


def letters(packed: bytes) -> str:
    ids = [int.from_bytes(packed[i : i + 4], "little") for i in range(0, len(packed), 4)]
    return "".join({256: "<bos>", 257: "<eos>"}.get(i) or chr(i) for i in ids)


def test_bos_is_added_only_on_request(tokenizer: TextTokenizer) -> None:
    assert letters(tokenizer.encode("hi", add_bos=True)) == "<bos>hi"
    assert letters(tokenizer.encode("hi", add_bos=False)) == "hi"
    assert tokenizer.decode([256, 104, 105, 257]) == "hi"


def test_renders_a_chat_and_its_continuation(tokenizer: TextTokenizer) -> None:
    user = [{"role": "user", "content": "hi"}]
    assert letters(tokenizer.encode_chat(user)) == "[s:be nice][u:hi][a:"
    assert letters(tokenizer.encode_chat(user, add_generation_prompt=False)) == "[s:be nice][u:hi]"
    assert letters(tokenizer.encode_chat_append(user)) == "[u:hi][a:"


def test_strict_template_accepts_an_appended_turn(tmp_path: Path, model: Path) -> None:
    """Some templates refuse two user messages in a row, or a system message."""
    strict = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.content }}>{% endfor %}"
    )
    found = directory(tmp_path, model, strict)
    assert letters(found.encode_chat_append([{"role": "assistant", "content": "yes"}])) == "<yes>"
    with pytest.raises(TemplateError, match="roles must alternate"):
        found.encode_chat_append([{"role": "user", "content": "q"}, {"role": "user", "content": "r"}])


ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "[{{ m.role[0] }}:{{ m.content | trim }}]{% endfor %}"
)
FOLDING = (
    "{% set system = messages[0].content if messages[0].role == 'system' %}"
    "{% set messages = messages[1:] if messages[0].role == 'system' else messages %}"
    + ALTERNATING.replace(
        "{{ m.content", "{{ system + '+' if system and loop.last and m.role == 'user' }}{{ m.content"
    )
)
"""A template like Mistral's: it puts the system message into the last message, if that is a user's."""


@pytest.mark.parametrize("template", [ALTERNATING, FOLDING])
def test_appended_messages_get_no_default_system_message(tmp_path: Path, model: Path, template: str) -> None:
    found = directory(tmp_path, model, template)
    question, answer = {"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}
    assert letters(found.encode_chat_append([question])) == "[u:why?]"
    assert letters(found.encode_chat_append([answer, question])) == "[a:so][u:why?]"


def test_a_message_that_a_template_leaves_out_is_refused(tmp_path: Path, model: Path) -> None:
    found = directory(tmp_path, model, FOLDING)
    system, user = {"role": "system", "content": " be brief\n"}, {"role": "user", "content": " hi\n"}
    answer = {"role": "assistant", "content": " be brief\n"}
    assert letters(found.encode_chat([system, user])) == "[u: be brief\n+hi]"
    for left_out in ([system], [system, user, answer]):
        with pytest.raises(TemplateError, match="leaves out a message of the role 'system'"):
            found.encode_chat(left_out, add_generation_prompt=False)
    empty = {"role": "system", "content": " \n"}
    assert (
        letters(found.encode_chat([empty, user, answer], add_generation_prompt=False)) == "[u:hi][a:be brief]"
    )


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ messages.__class__.__mro__ }}", "refuses"),
        ("{{ raise_exception('no system here') }}", "no system here"),
        ("{{ messages.append(1) }}", "refuses"),
    ],
)
def test_templates_run_in_a_sandbox(tmp_path: Path, model: Path, template: str, says: str) -> None:
    with pytest.raises(TemplateError, match=says):
        directory(tmp_path, model, template).encode_chat(
            [{"role": "user", "content": "x"}], add_generation_prompt=True
        )


def test_templates_support_the_usual_jinja_extensions(tmp_path: Path, model: Path) -> None:
    template = (
        "{{ bos_token }}{%- for m in messages -%}\n"
        "  {% generation %}{{ m.content | tojson }}{% endgeneration %}"
        "{% break %}\n{%- endfor %}{{ strftime_now('%Y') | length }}"
    )
    found = directory(tmp_path, model, template)
    assert letters(found.encode_chat([{"role": "user", "content": "é"}])).startswith("<bos>")


def test_without_a_chat_template_messages_are_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(TemplateError, match="send text instead"):
        directory(tmp_path, model, None).encode_chat(
            [{"role": "user", "content": "x"}], add_generation_prompt=True
        )


def test_chat_template_file_overrides_the_tokenizers_template(tmp_path: Path, model: Path) -> None:
    named = [{"name": "tool", "template": "no"}, {"name": "default", "template": "yes"}]
    assert letters(directory(tmp_path, model, named).encode_chat([])) == "yes"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert letters(TextTokenizer.load(tmp_path).encode_chat([])) == "file"


def directory(path: Path, model: Path, template: object) -> TextTokenizer:
    (path / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    special = {"bos_token": {"content": "<bos>"}, "eos_token": "<eos>", "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(special))
    assert template != TEMPLATE
    return TextTokenizer.load(path)


THINKING = (
    "{% for m in messages %}<{{ m.role[0] }}:{{ m.content }}>{% endfor %}{% if add_generation_prompt %}<a:"
    "{% if enable_thinking is defined and enable_thinking is false %}no thoughts;{% endif %}"
    "{{ budget }}{% for d in documents or [] %}{{ d.text }}{% endfor %}{% endif %}"
)


def test_request_may_set_template_variables(tmp_path: Path, model: Path) -> None:
    plain, user = directory(tmp_path, model, THINKING), [{"role": "user", "content": "hi"}]
    quick = plain.with_variables({"enable_thinking": False, "budget": 3, "documents": [{"text": "d"}]})
    assert letters(quick.encode_chat(user)) == "<u:hi><a:no thoughts;3d"
    assert letters(quick.encode_chat_append(user)) == "<u:hi><a:no thoughts;3d"
    assert letters(quick.encode_chat(user, add_generation_prompt=False)) == "<u:hi>"
    assert letters(plain.encode_chat(user)) == "<u:hi><a:", "others do not have them"


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"messages": []}, "messages is not for a request to set"),
        ({"add_generation_prompt": False}, "add_generation_prompt is not for a request to set"),
        ({"bos_token": "x"}, "bos_token is not for a request to set"),
        ({"documents": [{"text": "end<eos>"}]}, "the control token '<eos>' may not stand in it"),
        ({"documents": [{"<bos>": 1}]}, "the control token '<bos>' may not stand in it"),
    ],
)
def test_refuses_template_variables_with_control_tokens(
    tmp_path: Path, model: Path, variables: dict[str, object], says: str
) -> None:
    with pytest.raises(TemplateError, match=says):
        directory(tmp_path, model, THINKING).with_variables(variables)


@pytest.mark.parametrize(
    "template", ["{{ 1 + messages }}", "{{ messages[0].content[9] + 1 }}", "{{ 1 / 0 }}"]
)
def test_any_error_of_a_template_is_an_invalid_argument(tmp_path: Path, model: Path, template: str) -> None:
    with pytest.raises(TemplateError, match="refuses these messages"):
        directory(tmp_path, model, template).encode_chat(
            [{"role": "user", "content": "x"}], add_generation_prompt=True
        )
