"""Protobuf at the edge of the server: registering the service, and events to messages.

Serve's gRPC server decodes requests before any of our code runs, and answers INTERNAL to what it cannot
decode. So the service is registered with decoders that hand on an `Unreadable` instead, which the door
answers with INVALID_ARGUMENT.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.timestamp_pb2 import Timestamp

from ...protos.v1 import deltafront_pb2 as pb
from ...workers.messages import FinishReason, PrefillReport, Progress, Session, Token, Usage
from ..metrics import density, scoring_overhead
from ..request.calls import Event, Finished, Measured, SessionMade

SERVICE = pb.DESCRIPTOR.services_by_name["DeltafrontService"]
_M = TypeVar("_M", bound=Message)
_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.STOP_STRING: pb.FINISH_REASON_STOP_STRING,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}


@dataclass(frozen=True)
class Unreadable:
    """A message that is not valid protobuf, or holds text that is not UTF-8."""

    reason: str


def add_deltafront_to_server(servicer: Any, server: Any) -> None:
    """The generated `add_DeltafrontServiceServicer_to_server`, with decoders that never raise.

    Named in Serve's `grpc_servicer_functions`.
    """
    kinds: Mapping[bool, Callable[..., grpc.RpcMethodHandler[Any, Any]]] = {
        True: grpc.unary_stream_rpc_method_handler,
        False: grpc.unary_unary_rpc_method_handler,
    }
    handlers = {
        method.name: kinds[method.server_streaming](
            getattr(servicer, method.name),
            request_deserializer=tolerant(getattr(pb, method.input_type.name)),
            response_serializer=getattr(pb, method.output_type.name).SerializeToString,
        )
        for method in SERVICE.methods
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE.full_name, handlers),))
    server.add_registered_method_handlers(SERVICE.full_name, handlers)


def tolerant(kind: type[_M]) -> Callable[[bytes], _M | Unreadable]:
    def decode(data: bytes) -> _M | Unreadable:
        try:
            return kind.FromString(data)
        except DecodeError:
            return Unreadable(
                f"{kind.DESCRIPTOR.name} cannot be decoded: invalid protobuf, or text that is not UTF-8"
            )

    return decode


def prefill_response(event: Event) -> pb.PrefillResponse:
    if isinstance(event, Progress):
        return pb.PrefillResponse(progress=_progress(event))
    if isinstance(event, SessionMade):
        result = pb.PrefillResult(
            session=_session(event.session),
            usage=_usage(event.usage),
            timings=_timings(event.measured),
            density=_density(event.measured.prefill),
            request_id=event.request_id,
        )
        return pb.PrefillResponse(result=result)
    raise TypeError(f"{type(event).__name__} does not answer a Prefill")


def generate_response(event: Event) -> pb.GenerateResponse:
    if isinstance(event, Token):
        token = pb.Token(index=event.index, text=event.text, token_id=event.token_id, logprob=event.logprob)
        return pb.GenerateResponse(token=token)
    if isinstance(event, Progress):
        return pb.GenerateResponse(progress=_progress(event))
    if isinstance(event, Finished):
        finish = pb.Finish(
            reason=_REASONS[event.reason],
            text=event.text,
            usage=_usage(event.usage),
            timings=_timings(event.measured),
            density=_density(event.measured.prefill),
            session=None if event.session is None else _session(event.session),
            page_share=event.page_share,
            request_id=event.request_id,
        )
        return pb.GenerateResponse(finish=finish)
    raise TypeError(f"{type(event).__name__} does not answer a Generate")


def _progress(event: Progress) -> pb.Progress:
    return pb.Progress(tokens_done=event.tokens_done, tokens_total=event.tokens_total)


def _session(session: Session) -> pb.Session:
    expires = Timestamp()
    expires.FromMicroseconds(int(session.expires * 1e6))
    return pb.Session(session_id=session.session_id, expires=expires, tokens=session.tokens)


def _usage(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def _timings(measured: Measured) -> pb.Timings:
    stages = measured.prefill.stages if measured.prefill is not None else ()
    return pb.Timings(
        ttft_seconds=measured.ttft.seconds,
        parts=[pb.TimingPart(name=name, seconds=seconds) for name, seconds in measured.ttft.parts],
        stages=[
            pb.StageTimings(
                stage=stage,
                phases=[pb.TimingPart(name=name, seconds=seconds) for name, seconds in phases.items()],
            )
            for stage, phases in enumerate(stages)
        ],
        total_seconds=measured.total_seconds,
    )


def _density(report: PrefillReport | None) -> pb.DensityReport | None:
    if report is None:
        return None
    return pb.DensityReport(
        method=report.method,
        mean=density(report.density),
        layers=[pb.LayerDensity(layer=layer.layer, density=density((layer,))) for layer in report.density],
        scoring_overhead=scoring_overhead(report),
        sampled_share=report.sampled_share,
    )
