"""A repeated prompt hits the prefix cache, over gRPC and OpenAI's API."""

from __future__ import annotations

import openai

from deltafront.protos.v1 import deltafront_pb2 as pb

from .conftest import Sizes, Table
from .wire import Wire, method, text

SALT = "test_prefix"
"""A cache salt, because other tests send the same text."""


def test_repeated_prompt_reuses_the_prefix_cache(
    wire: Wire, beginning: str, sizes: Sizes, table: Table
) -> None:
    """A third request skips the cache. All three answers are the same."""
    asked = pb.GenerateRequest(
        prompt=text(beginning + "\nWhat is the code? The code is"),
        attention=method("dense"),
        sampling=pb.SamplingOptions(max_tokens=16, ignore_eos=True),
        page_selection=pb.PAGE_SELECTION_FULL,
        cache_salt=SALT,
    )
    before, again = wire.generate(asked), wire.generate(asked)
    prompt, page = before.finish.usage.prompt_tokens, wire.info().page_tokens
    assert (before.finish.usage.cached_tokens, again.finish.usage.prompt_tokens) == (0, prompt)
    assert again.token_ids == before.token_ids
    assert again.finish.usage.cached_tokens == (prompt - 1) // page * page
    assert not again.progress
    share = again.finish.timings.ttft_seconds / before.finish.timings.ttft_seconds
    table.add("TTFT of a prompt that was read before, of the first's", round(share, 4))
    assert share <= 0.05 or not sizes.timed
    asked.skip_cache = True
    anew = wire.generate(asked)
    assert (anew.finish.usage.cached_tokens, anew.token_ids) == (0, before.token_ids)
    wire.seconds_to_no_page()


def test_openai_usage_counts_cached_tokens(wire: Wire, http: str, beginning: str) -> None:
    client = openai.OpenAI(base_url=f"{http}/v1", api_key="none")
    (model,) = client.models.list().data
    ask = {
        "model": model.id,
        "max_tokens": 8,
        "temperature": 0,
        "extra_body": {"cache_salt": f"{SALT} openai"},
    }
    done = [client.completions.create(prompt=beginning + "\nThe code is", **ask) for _ in range(2)]
    assert done[0].choices[0].text == done[1].choices[0].text
    cached = [one.usage.prompt_tokens_details.cached_tokens for one in done]
    assert cached[0] == 0 and done[1].usage.prompt_tokens - cached[1] <= wire.info().page_tokens
    other = client.completions.create(prompt=beginning + "\nThe author of this is", **ask)
    assert other.usage.prompt_tokens - other.usage.prompt_tokens_details.cached_tokens < 64
    wire.seconds_to_no_page()
