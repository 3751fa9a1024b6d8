"""`deltafront calibrate`: which layers of a model should be Δ-layers, as a line for the configuration file or
as a profile.

Runs here, without a server; torch is imported when the command runs.
"""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from ...workers.model.config import ModelError
from ...workers.model.digest import model_digest
from ...workers.model.profile import DecodePages, Profile, ProfiledModel, ProfiledText
from ...workers.model.store import model_directory
from ...workers.settings import Dtype, ModelSpec
from ..wiring import shown_name
from .terminal import err, fail, read_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def calibrate_command(
    model: Annotated[str, typer.Argument(help="Directory, .gguf file, hub id or embedded name.")],
    text: Annotated[list[str], typer.Option(help="A text of real prose; give it once for each.")],
    adapter: Annotated[str | None, typer.Option(help="PEFT LoRA directory.")] = None,
    layers: Annotated[int, typer.Option(help="How many Δ-layers.")] = 5,
    budget: Annotated[int, typer.Option(help="K: pages that a sparse layer attends to.")] = 64,
    recency: Annotated[int, typer.Option(help="L: last pages that are always among them.")] = 8,
    full_layer: Annotated[list[int], typer.Option(help="Dense, unscored layers.")] = [0, 1],  # noqa: B006
    tokens: Annotated[int | None, typer.Option(help="Of each text (four times the budget).")] = None,
    rope_theta: Annotated[float | None, typer.Option(help="As in the configuration file.")] = None,
    positions: Annotated[int | None, typer.Option(help="max_position_embeddings, likewise.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    profile: Annotated[Path | None, typer.Option(help="Write a profile here (model.profile).")] = None,
    json: Annotated[bool, typer.Option("--json", help="Everything, as one line of JSON.")] = False,
) -> None:
    """Choose Δ-layers for sparse decoding: those whose pages serve the layers after them best."""
    from ...workers.calibration.pages import calibrate, shortest_text
    from ...workers.messages import PAGE_TOKENS

    if profile is not None and not profile.parent.is_dir():
        fail(f"--profile {profile}: there is no directory {profile.parent}")  # before the work, not after
    try:
        directory = model_directory(model)
        kind = cast(Dtype, dtype)  # checked when it loads
        spec = ModelSpec(str(directory), adapter, kind, rope_theta, positions)
        most, least = tokens or 4 * budget * PAGE_TOKENS, shortest_text(budget)
        tokenizer, contents = _tokenizer(directory), [read_text(file) for file in text]
        texts = [_ids(tokenizer, *named, most, least) for named in zip(text, contents, strict=True)]
        err.print(f"Reading {len(texts)} texts of up to {max(map(len, texts))} tokens …")
        found = calibrate(
            spec, texts, layers, budget=budget, recency=recency, full_layers=full_layer, device=device
        )
        selection = {"page_budget": budget, "recency": recency, "full_layers": full_layer}
        chosen = {"delta_layers": found.delta_layers, **selection}
        if profile is not None:
            read = tuple(map(ProfiledText.of, contents, found.tokens))
            own = ProfiledModel(name=shown_name(ModelSpec(model, adapter)), digest=model_digest(spec))
            pages = DecodePages.model_validate(chosen)
            Profile(format=1, model=own, texts=read, prefill=(), decode=pages).write(profile)
    except (ModelError, ValueError) as error:
        fail(str(error))
    if json:
        print(json_format.dumps({**chosen, "tokens": found.tokens, "losses": found.losses}))
    else:
        print(f"delta_layers: {list(found.delta_layers)}")


def _tokenizer(directory: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exceptions
        raise ModelError(f"{path} cannot be used as a tokenizer: {error}") from None


def _ids(tokenizer: Tokenizer, file: str, content: str, most: int, least: int) -> list[int]:
    """The first `most` ids of a file's content. Raises ValueError if there are fewer than `least`."""
    ids: list[int] = tokenizer.encode(content).ids[:most]
    if len(ids) < least:
        raise ValueError(f"{file}: {len(ids)} tokens are too few for this budget, which takes {least}")
    return ids
