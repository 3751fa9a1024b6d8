"""Defines the benchmarks' embedded model, loads tokenizers and texts, and compiles kernels in advance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from deltafront.kernels.methods import reads_whole_prompts
from deltafront.workers.calibration.probes import EncodeAll, Text
from deltafront.workers.evaluation.setting import parse_method
from deltafront.workers.model.calibrated.profile import Profile
from deltafront.workers.model.decoder.stack import LayerStack
from deltafront.workers.model.directory import store as model_store
from deltafront.workers.prefill.stage import warm_up as prefill_warm_up
from deltafront.workers.settings import ModelSpec

ROOT = Path(__file__).resolve().parent.parent
MODEL = ModelSpec(
    path="smollm2-135m-instruct",
    adapter=str(ROOT / "deploy" / "models" / "smollm2-135m-128k"),
    rope_theta=8e6,
    max_position_embeddings=131_072,
)
"""The embedded model with its adapter for 128K tokens and the settings that the adapter needs."""


def load_tokenizer(model: str) -> Tokenizer:
    return Tokenizer.from_file(str(model_store.model_directory(model) / "tokenizer.json"))


class SpelledText(Text):
    """A tokenised text. spell: Returns the characters of each token."""

    def __init__(
        self,
        text: str,
        encode_all: EncodeAll,
        spell: Callable[[Sequence[int]], list[str]],
    ) -> None:
        super().__init__(text, encode_all)
        self.spell = spell


def load_text(path: Path, tokenizer: Tokenizer) -> SpelledText:
    """Load a text file, from which documents are cut."""

    def encode_all(texts: Sequence[str]) -> list[list[int]]:
        return [found.ids for found in tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def spell(ids: Sequence[int]) -> list[str]:
        return tokenizer.decode_batch([[token] for token in ids], skip_special_tokens=False)

    return SpelledText(path.read_text(encoding="utf-8"), encode_all, spell)


def warm_up(stack: LayerStack, methods: Sequence[str], chunk: int, profile: Profile | None = None) -> None:
    """Compile the kernels of these methods, if the stack is on a GPU. Methods that cannot prefill in chunks
    are left out: their kernels compile with the first document."""
    if stack.device.type == "cuda":
        chunked = [spec for spec in map(parse_method, methods) if not reads_whole_prompts(spec.name)]
        prefill_warm_up.warm_up(stack, chunked, chunk, profile)
