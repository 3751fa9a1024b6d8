"""Versions of `deltafront.v1` understand each other.

`contract.txt` has a line for each field, enum value and rpc of the last release. A later version adds lines.
It changes and removes none, so that each side ignores what it does not know of the other.
A release adds the lines of `contract(described())` that are new.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pb2

from deltafront.protos.v1 import deltafront_pb2 as pb

from ..inprocess import HANG_S, House

RELEASED = Path(__file__).with_name("contract.txt")
_Field = descriptor_pb2.FieldDescriptorProto
_UNKNOWN = b"\xfa\xff\x03\x03new"
"""A field that no version has: number 8191, a string."""


def described() -> descriptor_pb2.FileDescriptorProto:
    proto = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(proto)
    return proto


def contract(proto: descriptor_pb2.FileDescriptorProto) -> Iterator[str]:
    for message in proto.message_type:
        yield from fields(message, message.name)
    for enum in proto.enum_type:
        yield from values(enum, enum.name)
    for service in proto.service:
        for rpc in service.method:
            stream = "stream " * rpc.server_streaming
            yield f"rpc {service.name}.{rpc.name}({rpc.input_type}) returns ({stream}{rpc.output_type})"


def fields(message: descriptor_pb2.DescriptorProto, path: str) -> Iterator[str]:
    for field in message.field:
        kind = field.type_name or _Field.Type.Name(field.type).removeprefix("TYPE_").lower()
        form = "repeated " * (field.label == _Field.LABEL_REPEATED) + "optional " * field.proto3_optional
        choice = field.HasField("oneof_index") and not field.proto3_optional
        within = f" in {message.oneof_decl[field.oneof_index].name}" if choice else ""
        yield f"field {path}.{field.name} = {field.number}: {form}{kind}{within}"
    for nested in message.nested_type:
        yield from fields(nested, f"{path}.{nested.name}")
    for enum in message.enum_type:
        yield from values(enum, f"{path}.{enum.name}")


def values(enum: descriptor_pb2.EnumDescriptorProto, path: str) -> Iterator[str]:
    for value in enum.value:
        yield f"value {path}.{value.name} = {value.number}"


def broken(proto: descriptor_pb2.FileDescriptorProto) -> set[str]:
    """Return the lines of the last release that a version does not have."""
    return set(RELEASED.read_text().splitlines()) - set(contract(proto))


def test_released_protobuf_contract_has_no_line_changed_or_removed() -> None:
    assert not broken(described()), "give a new meaning a new number, and keep what clients have"


@pytest.mark.parametrize("change", ["name", "number", "type", "removed"])
def test_contract_check_finds_a_changed_or_removed_field(change: str) -> None:
    proto = described()
    message = next(one for one in proto.message_type if one.name == "SamplingOptions")
    field = message.field[0]
    line = next(line for line in contract(proto) if f"SamplingOptions.{field.name} " in line)
    if change == "removed":
        message.field.remove(field)
    else:
        setattr(field, change, {"name": "other", "number": 999, "type": _Field.TYPE_BYTES}[change])
    assert broken(proto) == {line}


def test_contract_check_permits_added_fields() -> None:
    proto = described()
    proto.message_type[0].field.add(name="other", number=999, type=_Field.TYPE_BYTES)
    assert not broken(proto)


def answered(address: str, request: bytes) -> list[int]:
    """Return the token ids of an answer to the bytes of a GenerateRequest."""
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_stream(
            "/deltafront.v1.DeltafrontService/Generate", None, pb.GenerateResponse.FromString
        )
        events = list(call(request, timeout=HANG_S))
    assert events[-1].WhichOneof("event") == "finish"
    return [event.token.token_id for event in events if event.HasField("token")]


def test_server_ignores_fields_of_a_newer_client(house: House) -> None:
    inner = pb.Prompt(text="a prompt")
    request = pb.GenerateRequest(prompt=inner, sampling=pb.SamplingOptions(max_tokens=5))
    known = request.SerializeToString()
    inner.MergeFromString(_UNKNOWN)
    newer = pb.GenerateRequest(prompt=inner, sampling=request.sampling).SerializeToString() + _UNKNOWN
    assert newer.count(_UNKNOWN) == 2
    tokens = answered(house.address, newer)
    assert len(tokens) == 5 and tokens == answered(house.address, known)
