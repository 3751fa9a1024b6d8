"""Random requests: every field of every message with ordinary and extreme values, and invalid bytes.

The given random generator determines all requests.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from deltafront.protos.v1 import deltafront_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["DeltafrontService"]
_CALL_S = 60.0
_LONGEST_ANSWER = 24
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 1e300, float("nan"), float("inf"), float("-inf"))
_TEXTS = (
    "",
    "a",
    "Call me Ishmael.",
    "\0",
    "\U0010ffff" * 3,
    "é€🙂",
    "x" * 3000,
    "../../etc/passwd",
    "%s%n",
    "\n\r",
)
_NAMES = (
    "dense",
    "dpxa",
    "streaming",
    "xattention+delta",
    "flex",
    "user",
    "assistant",
    "system",
    "tau",
    "window",
)
_BYTES = (b"", b"abc", b"\xff" * 4, b"\0" * 4, b"a\0\0\0b\0\0\0", b"\xff" * 400, b"\x01\0\0\0" * 500)
_KINDS = {
    FieldDescriptor.CPPTYPE_INT32: 32,
    FieldDescriptor.CPPTYPE_INT64: 64,
    FieldDescriptor.CPPTYPE_UINT32: 33,
    FieldDescriptor.CPPTYPE_UINT64: 65,
}


def message(draw: random.Random, kind: type[Message]) -> Message:
    """Make a random message of a type."""
    made = kind()
    for one in made.DESCRIPTOR.fields:
        if draw.random() < 0.5:
            _fill(draw, made, one)
    return made


def _fill(draw: random.Random, made: Message, one: FieldDescriptor) -> None:
    if one.message_type is not None and one.message_type.GetOptions().map_entry:
        keys, content = (one.message_type.fields_by_name[name] for name in ("key", "value"))
        for _ in range(draw.randint(0, 3)):
            values, key = getattr(made, one.name), _scalar(draw, keys)
            if content.message_type is not None:  # JSON values, which may be nested without end
                values[key].string_value = draw.choice(_TEXTS)
            else:
                values[key] = _scalar(draw, content)
    elif one.message_type is not None:
        target = getattr(made, one.name)
        for _ in range(draw.randint(0, 3) if one.is_repeated else 1):
            inner = target.add() if one.is_repeated else target
            inner.CopyFrom(message(draw, type(inner)))
    elif one.is_repeated:
        getattr(made, one.name).extend(_scalar(draw, one) for _ in range(draw.choice((0, 1, 2, 40))))
    else:
        setattr(made, one.name, _scalar(draw, one))


def _scalar(draw: random.Random, one: FieldDescriptor) -> Any:
    if one.enum_type is not None:
        return draw.choice((0, 1, 2, 3, 77, -1))
    match one.cpp_type:
        case FieldDescriptor.CPPTYPE_BOOL:
            return draw.random() < 0.5
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return draw.choice((*_FLOATS, draw.uniform(0, 2)))
        case FieldDescriptor.CPPTYPE_STRING:
            return _bytes(draw) if one.type == FieldDescriptor.TYPE_BYTES else draw.choice(_TEXTS + _NAMES)
    return _whole(draw, _KINDS[one.cpp_type])


def _bytes(draw: random.Random) -> bytes:
    return draw.choice((*_BYTES, draw.randbytes(draw.randint(0, 64))))


def _whole(draw: random.Random, bits: int) -> int:
    """Make a random integer of a type with `bits` bits. An odd number means an unsigned type with one bit
    less."""
    unsigned = bits % 2 == 1
    low, high = (0, 2 ** (bits - 1) - 1) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return draw.choice((0, 1, 2, 3, 7, low, high, draw.randint(low, high), draw.randint(0, 100)))


def garbage(draw: random.Random, wire: bytes) -> bytes:
    """Change a message's bytes: cut, alter, double or replace them."""
    data = bytearray(wire)
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(data) + 1)
        match draw.randrange(5):
            case 0:
                del data[place:]
            case 1 if place < len(data):
                data[place] ^= 1 << draw.randrange(8)
            case 2:
                data[place:place] = draw.randbytes(draw.randint(1, 9))
            case 3:
                data += data[:place]
            case 4:
                data = bytearray(draw.randbytes(draw.randint(0, 200)))
    return bytes(data)


@dataclass(frozen=True)
class Call:
    """A method of the service, and the bytes to send."""

    method: str
    wire: bytes


def call(draw: random.Random) -> Call:
    """Make a random call. Every fourth one is garbage. Requests that may succeed ask for only a few
    tokens."""
    method = draw.choice(SERVICE.methods)
    made = message(draw, getattr(pb, method.input_type.name))
    if isinstance(made, pb.GenerateRequest) and (draw.random() < 0.9 or made.HasField("prompt")):
        made.sampling.max_tokens = min(made.sampling.max_tokens, _LONGEST_ANSWER) or _LONGEST_ANSWER
    wire = made.SerializeToString()
    return Call(method.name, garbage(draw, wire) if draw.random() < 0.25 else wire)


@dataclass
class Findings:
    """The codes of the answers, and the forbidden results."""

    codes: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)


FORBIDDEN = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE)


def fuzz(
    addresses: Sequence[str], calls: int, seed: int, threads: int = 8, until: float = math.inf
) -> Findings:
    """Send this number of calls, or as many as time permits, and release their sessions. addresses: used by
    the threads in turn. until: by the monotonic clock."""
    findings, lock = Findings(), threading.Lock()

    def send(first: int) -> None:
        with grpc.insecure_channel(addresses[first % len(addresses)]) as channel:
            for number in range(first, calls, threads):
                if time.monotonic() > until:
                    return
                said = _send(channel, call(random.Random(f"{seed}.{number}")))
                with lock:
                    findings.codes[said[0].name] += 1
                    findings.bad += [f"call {number} of seed {seed}: {said[1]}"] if said[1] else []

    workers = [threading.Thread(target=send, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return findings


def _send(channel: grpc.Channel, one: Call) -> tuple[grpc.StatusCode, str]:
    """Send a call. Return its code, and what is wrong with the result, if anything."""
    code, details, sessions = _ask(channel, one)
    for session in sessions:
        _ask(
            channel,
            Call("ReleaseSession", pb.ReleaseSessionRequest(session_id=session).SerializeToString()),
        )
    bad = code in FORBIDDEN or "Traceback" in details
    return code, f"{one.method} {one.wire[:200]!r}: {code.name} {details}" if bad else ""


def _ask(channel: grpc.Channel, one: Call) -> tuple[grpc.StatusCode, str, list[str]]:
    """Make a call. Return how it ended, and the sessions that it made."""
    method = SERVICE.methods_by_name[one.method]
    answer: type[Message] = getattr(pb, method.output_type.name)
    path = f"/{SERVICE.full_name}/{one.method}"
    opened: Callable[..., Any] = channel.unary_stream if method.server_streaming else channel.unary_unary
    asked = opened(path, request_serializer=None, response_deserializer=answer.FromString)
    sessions = []
    try:
        given = asked(one.wire, timeout=_CALL_S)
        for response in given if method.server_streaming else ():
            event = getattr(response, response.WhichOneof("event") or "progress")
            if "session" in event.DESCRIPTOR.fields_by_name and event.HasField("session"):
                sessions.append(event.session.session_id)
    except grpc.RpcError as error:
        return error.code(), error.details() or "", sessions
    return grpc.StatusCode.OK, "", sessions
