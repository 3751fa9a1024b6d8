"""A prompt that begins with what a session holds continues from it, without being told."""

from __future__ import annotations

from deltafront.protos.v1 import deltafront_pb2 as pb

from .conftest import Sizes, Table
from .wire import Wire, method, text


def test_the_same_prompt_again_is_hardly_read(wire: Wire, beginning: str, sizes: Sizes, table: Table) -> None:
    """Before there is a session, with one, and when it is gone: the same answer."""
    asked = pb.GenerateRequest(
        prompt=text(beginning + "\nWhat is the code? The code is"),
        attention=method("dense"),
        sampling=pb.SamplingOptions(max_tokens=16, ignore_eos=True),
    )
    before = wire.generate(asked)
    assert before.finish.usage.cached_tokens == 0
    read = pb.PrefillRequest(prompt=text(beginning), attention=method("dense"))
    read.session_ttl.FromSeconds(600)
    session = wire.prefill(read).session
    again = wire.generate(asked)
    page = wire.info().page_tokens
    assert again.token_ids == before.token_ids
    assert session.tokens - again.finish.usage.cached_tokens < 2 * page
    assert again.finish.usage.prompt_tokens == before.finish.usage.prompt_tokens
    assert not again.progress
    share = again.finish.timings.ttft_seconds / before.finish.timings.ttft_seconds
    table.add("TTFT of a prompt whose beginning a session holds, of the first's", round(share, 4))
    assert share <= 0.05 or not sizes.timed
    wire.stub.ReleaseSession(pb.ReleaseSessionRequest(session_id=session.session_id))
    assert wire.generate(asked).finish.usage.cached_tokens == 0
    wire.seconds_to_no_page()
