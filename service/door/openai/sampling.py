"""A request's sampling options, with OpenAI's and vLLM's names."""

import secrets
from typing import Annotated

from pydantic import BaseModel, Field

from deltafront.service.door.json_body import STRICT, Whole
from deltafront.service.errors import InvalidArgument, shown
from deltafront.service.request.calls import SamplingParams

_SEED_BITS = 64
_LONGEST_ID = 10


class Strict(BaseModel):
    model_config = STRICT


class SamplingFields(Strict):
    temperature: float | None = None
    top_p: float | None = None
    seed: Annotated[Whole, Field(ge=-1, lt=1 << _SEED_BITS)] | None = None
    stop: str | list[str] = []
    top_k: Whole | None = None
    ignore_eos: bool = False
    min_p: float | None = None
    min_tokens: Whole | None = None
    stop_token_ids: list[Whole] = []
    logit_bias: dict[str, float] = {}
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None

    def params(self, max_tokens: int | None) -> SamplingParams:
        """Return the sampling parameters. Raises InvalidArgument for a `logit_bias` key that is not a
        number."""
        seed = new_seed() if self.seed is None or self.seed < 0 else self.seed
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=0 if self.top_k == -1 else self.top_k,
            seed=seed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            max_tokens=max_tokens,
            ignore_eos=self.ignore_eos,
            min_p=self.min_p,
            min_tokens=self.min_tokens,
            stop_token_ids=tuple(self.stop_token_ids),
            logit_bias={_token_id(token): bias for token, bias in self.logit_bias.items()},
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
        )


def new_seed() -> int:
    """Draw a seed. Like OpenAI, use a new one for each sampled answer."""
    return secrets.randbits(_SEED_BITS)


def _token_id(text: str) -> int:
    if not text.isdecimal() or len(text) > _LONGEST_ID:
        raise InvalidArgument("logit_bias", f"{shown(text)} is no token id")
    return int(text)
