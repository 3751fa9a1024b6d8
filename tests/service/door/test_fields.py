"""Counting a message's encoded fields agrees with protobuf's decoder."""

from __future__ import annotations

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from deltafront.protos.v1 import deltafront_pb2 as pb
from deltafront.service.door.fields import has_more_fields, text_of
from deltafront.service.door.wire import generate_request
from deltafront.service.errors import InvalidArgument
from deltafront.service.request.calls import GenerateRequest

from .test_wire import requests


def fields(message: Message) -> int:
    """Count the fields of a decoded message. A map's entry is a message of two fields."""
    count = 0
    for field, value in message.ListFields():
        entries = field.message_type is not None and field.message_type.GetOptions().map_entry
        if entries:
            held = [one for one in dict(value).values() if isinstance(one, Message)]
            count += 3 * len(value) + sum(map(fields, held))
            continue
        values = value if field.is_repeated else [value]
        count += len(values) + sum(fields(one) for one in values if isinstance(one, Message))
    return count


@given(requests)
def test_counts_the_fields_of_any_valid_request(request: GenerateRequest) -> None:
    try:
        message = generate_request(request)
    except InvalidArgument:
        return
    data, count = message.SerializeToString(), fields(message)
    assert not has_more_fields(data, message.DESCRIPTOR, count)
    if count:
        assert has_more_fields(data, message.DESCRIPTOR, count - 1)


@given(st.binary(max_size=60))
def test_field_count_accepts_all_bytes_that_protobuf_parses(data: bytes) -> None:
    kind = pb.GenerateRequest
    try:
        kind.FromString(data)
    except Exception:
        return
    has_more_fields(data, kind.DESCRIPTOR, 1000)


def test_field_count_stops_at_its_limit() -> None:
    one = pb.Prompt(messages=pb.ChatMessages(messages=[pb.ChatMessage()])).SerializeToString()
    data = pb.GenerateRequest(prompt=pb.Prompt.FromString(one * 1_000_000)).SerializeToString()
    assert has_more_fields(data, pb.GenerateRequest.DESCRIPTOR, 1000)


@pytest.mark.parametrize("data", [b"\x0a\x05a", b"\x80", b"\x0f", b"\xff" * 11])
def test_field_count_refuses_bytes_that_are_not_a_message(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"longer|end|wire type"):
        has_more_fields(data, pb.GenerateRequest.DESCRIPTOR, 1000)


@given(requests)
def test_finds_the_request_id_before_parsing_the_request(request: GenerateRequest) -> None:
    try:
        message = generate_request(request)
    except InvalidArgument:
        return
    number = message.DESCRIPTOR.fields_by_name["request_id"].number
    assert text_of(message.SerializeToString(), number) == message.request_id


@given(st.binary(max_size=60))
def test_finds_no_request_id_in_bytes_that_are_not_a_message(data: bytes) -> None:
    assert isinstance(text_of(data, 9), str)
    assert text_of(b"\x4a\x01\xff", 9) == text_of(b"", 9) == ""
