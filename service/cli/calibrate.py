"""`deltafront calibrate`: which layers of a model should be Δ-layers, and how much each head should read, as
a line for the configuration file or as a profile.

Runs here, without a server; torch is imported when the command runs.
"""

from __future__ import annotations

import json as json_format
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ...kernels.methods import MethodError, MethodSpec, method_spec
from ...workers.calibration.probes import (
    ANSWER_WEIGHT,
    VALUES,
    Document,
    Text,
    chains,
    haystack,
    needles,
    values,
)
from ...workers.model.calibrated.profile import (
    DecodePages,
    Profile,
    ProfiledModel,
    ProfiledText,
    load_profile,
)
from ...workers.model.directory.digest import model_digest
from ...workers.model.directory.json_files import ModelError
from ...workers.model.directory.model_config import ModelConfig
from ...workers.model.directory.store import model_directory
from ...workers.settings import DecodeConfig, Dtype, ModelSpec
from ..wiring import shown_name
from .terminal import err, fail, read_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from ...workers.calibration.delta_layers import Calibration
    from ...workers.calibration.method_levels import Allocation
    from ...workers.model.decoder.stack import LayerStack

ANSWER_ROOM = 128
"""Tokens kept free for each question with its answer, so that the whole has the length asked for."""
OF_PAGES = "layers", "dense_layers", "budget", "serving_budget", "recency", "full_layer", "tokens", "json"
"""Options of Δ-layers, which --add does not choose."""


def calibrate_command(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Directory, .gguf file, hub id or embedded name.")],
    text: Annotated[list[str], typer.Option(help="A text of real prose; give it once for each.")],
    adapter: Annotated[str | None, typer.Option(help="PEFT LoRA directory.")] = None,
    layers: Annotated[int, typer.Option(help="How many Δ-layers.")] = 5,
    dense_layers: Annotated[
        int | None,
        typer.Option(help="Search with --questions: layers that read all pages, instead of --layers."),
    ] = None,
    budget: Annotated[int, typer.Option(help="K: pages that a sparse layer attends to.")] = 64,
    serving_budget: Annotated[
        int | None, typer.Option(help="page_budget in the profile (the budget).")
    ] = None,
    recency: Annotated[int, typer.Option(help="L: last pages that are always among them.")] = 8,
    full_layer: Annotated[list[int], typer.Option(help="Dense, unscored layers.")] = [0, 1],  # noqa: B006
    tokens: Annotated[
        int | None, typer.Option(help="Of each text, for Δ-layers (four times the budget).")
    ] = None,
    questions: Annotated[
        int, typer.Option(help="Facts hidden in each text and asked for; 0: prose alone.")
    ] = 0,
    density: Annotated[list[float], typer.Option(help="A level for prefill; give it once for each.")] = [],  # noqa: B006
    length: Annotated[list[int], typer.Option(help="Tokens of prompts that levels are for.")] = [],  # noqa: B006
    method: Annotated[str, typer.Option(help="Whose levels: a method that ranks tiles by a score.")] = "dpxa",
    option: Annotated[list[str], typer.Option(help="NAME=NUMBER of the method.")] = [],  # noqa: B006
    allocation: Annotated[
        str, typer.Option(help="Of levels' tiles to heads: marginal, or threshold as in XAttention's paper.")
    ] = "marginal",
    answers: Annotated[
        float, typer.Option(min=0, help="What answers count beside the text's tail, for levels.")
    ] = ANSWER_WEIGHT,
    add: Annotated[
        bool, typer.Option("--add", help="Keep what --profile has; only make these levels, no Δ-layers.")
    ] = False,
    rope_theta: Annotated[float | None, typer.Option(help="As in the configuration file.")] = None,
    positions: Annotated[int | None, typer.Option(help="max_position_embeddings, likewise.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    profile: Annotated[Path | None, typer.Option(help="Write a profile here (model.profile).")] = None,
    json: Annotated[bool, typer.Option("--json", help="Everything, as one line of JSON.")] = False,
) -> None:
    """Choose Δ-layers for sparse decoding, and with --density what each head reads in sparse prefill."""
    from ...workers.calibration.delta_layers import shortest_text
    from ...workers.calibration.method_levels import method_levels, require_thresholds
    from ...workers.messages.methods import PAGE_TOKENS
    from ...workers.model.decoder.load import load_model

    _refuse(context, profile, allocation)
    try:
        directory = model_directory(model)
        kind = cast(Dtype, dtype)  # checked when it loads
        spec = ModelSpec(
            path=str(directory),
            adapter=adapter,
            dtype=kind,
            rope_theta=rope_theta,
            max_position_embeddings=positions,
            profile=str(profile) if add else None,
        )
        whole = load_profile(spec)
        asked = _method(method, option)
        made = _Documents(_tokenizer(directory), {file: read_text(file) for file in text}, questions)
        most, least = tokens or 4 * budget * PAGE_TOKENS, shortest_text(budget)
        read = [] if add else made.for_pages(most, least)
        probes = {one: made.of(one) for one in sorted(set(length))} if density else {}
        if density:
            require_thresholds(asked)
        stack = load_model(spec, device)
        for problem in _misfits(stack.config, length, [] if add else full_layer):
            raise ValueError(problem)
        pages: dict[str, Any] = {"page_budget": budget, "recency": recency, "full_layers": full_layer}
        found = None if add else _delta_layers(stack, read, pages, layers, dense_layers)
        texts = made.profiled(max([*length, 0 if found is None else found.tokens[0]]))
        if whole is None and found is not None:
            decode = pages | {"delta_layers": found.delta_layers, "page_budget": serving_budget or budget}
            whole = Profile(
                format=1,
                model=ProfiledModel(
                    name=shown_name(ModelSpec(path=model, adapter=adapter)), digest=model_digest(spec)
                ),
                texts=texts,
                prefill=(),
                decode=DecodePages.model_validate(decode),
                figures={"allocation": allocation} if density else {},
            )
        if density and whole is not None:
            how = cast("Allocation", allocation)  # checked above
            levels = method_levels(
                stack,
                probes,
                asked,
                density,
                tell=_tell,
                allocation=how,
                answer_weight=answers,
                profile=whole,
            )
            whole = whole.plus(levels, texts)
        if profile is not None and whole is not None:
            whole.write(profile)
    except (ModelError, MethodError, ValueError) as error:
        fail(str(error))
    if found is not None:
        _show(found, pages, json)


def _refuse(context: typer.Context, profile: Path | None, allocation: str) -> None:
    """Options out of bounds or that contradict each other, before the work and not after."""
    given = context.params
    density, length = given["density"], given["length"]
    if profile is not None and not profile.parent.is_dir():
        fail(f"--profile {profile}: there is no directory {profile.parent}")
    if profile is not None and (profile.is_dir() or not os.access(profile.parent, os.W_OK)):
        fail(f"--profile {profile}: no file can be written there")
    if density and (profile is None or not length):
        fail("--density needs --length and --profile: levels are kept in a profile")
    if length and not density:
        fail("--length needs --density: it is of the prompts that levels are for")
    for problem in _out_of_bounds(density, length, given["serving_budget"], given["recency"]):
        fail(problem)
    if allocation not in ("marginal", "threshold"):
        fail(f"--allocation {allocation}: must be marginal or threshold")
    if not given["add"]:
        return
    if not density:
        fail("--add needs --density: it adds levels to what --profile has")
    for name in (*OF_PAGES, "allocation"):  # which the profile's figures name
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            fail(f"--add makes levels and nothing else: leave out --{name.replace('_', '-')}")


def _out_of_bounds(
    density: list[float], length: list[int], serving_budget: int | None, recency: int
) -> Iterator[str]:
    """What a profile could not hold."""
    yield from (f"--density {one:g}: must be above 0 and at most 1" for one in density if not 0 < one <= 1)
    yield from (f"--length {one}: must be at least 1" for one in length if one < 1)
    if serving_budget is not None and serving_budget < recency:
        yield f"--serving-budget {serving_budget}: must be at least --recency, {recency}"


def _misfits(config: ModelConfig, length: list[int], full_layer: list[int]) -> Iterator[str]:
    """What the model does not have, before anything is read."""
    if length and max(length) > config.positions:
        yield f"--length {max(length)}: the model has {config.positions} positions"
    yield from DecodeConfig(full_layers=tuple(full_layer)).layer_problems(config.layers)


def _show(found: Calibration, pages: dict[str, Any], as_json: bool) -> None:
    if as_json:
        chosen = {"delta_layers": found.delta_layers, **pages}
        losses = {"tokens": found.tokens, "losses": found.losses, "divergence": found.divergence}
        print(json_format.dumps({**chosen, **losses}))
    else:
        print(f"delta_layers: {list(found.delta_layers)}")


def _delta_layers(
    stack: LayerStack, read: list[Document], pages: dict[str, Any], layers: int, dense_layers: int | None
) -> Calibration:
    """As the command's options say; pages: budget, recency and full layers, as a profile names them."""
    from ...workers.calibration.delta_layer_search import refine
    from ...workers.calibration.delta_layers import calibrate

    _tell(f"Reading {len(read)} texts of up to {max(len(one.ids) for one in read)} tokens")
    budget, recency, full_layers = pages["page_budget"], pages["recency"], pages["full_layers"]
    sizes = {"budget": budget, "recency": recency, "full_layers": full_layers}
    if dense_layers is None:
        return calibrate(stack, read, layers, **sizes)
    first = calibrate(stack, read, 1, **sizes)  # the search finds out how many
    return refine(stack, read, first, dense_layers, **sizes, tell=err.print)


def _tell(what: str) -> None:
    err.print(f"{what} …")


class _Documents:
    """What is read: pieces of the texts, with facts hidden in them if questions are asked."""

    def __init__(self, tokenizer: Tokenizer, contents: dict[str, str], questions: int) -> None:
        def encode_all(texts: Sequence[str]) -> list[list[int]]:
            return [found.ids for found in tokenizer.encode_batch(list(texts), add_special_tokens=False)]

        self._tokenizer = tokenizer
        self._contents = contents
        self._texts = {file: Text(content, encode_all) for file, content in contents.items()}
        self._questions = questions

    def for_pages(self, most: int, least: int) -> list[Document]:
        """Of each text, and with questions three more: of facts alone, where every page looks like every
        other; of several values for one key; and of chains of variables.

        Raises ValueError for texts of fewer than `least` tokens.
        """
        if not self._questions:
            return [Document(self._ids(file, most, least), []) for file in self._contents]
        first = next(iter(self._texts.values()))
        room = most - self._questions * ANSWER_ROOM
        few = -(-self._questions // VALUES)
        more = [(haystack, self._questions), (values, few), (chains, few)]
        return [*self.of(most), *(kind(random.Random(0), room, count, first) for kind, count in more)]

    def of(self, tokens: int) -> list[Document]:
        """Of each text, so that the document with its questions has about so many tokens."""
        room = tokens - self._questions * ANSWER_ROOM
        return [
            needles(random.Random(number), room, self._questions, text)
            for number, text in enumerate(self._texts.values())
        ]

    def profiled(self, tokens: int) -> tuple[ProfiledText, ...]:
        """As a profile names them. tokens: read of each, at most."""
        return tuple(ProfiledText.of(content, tokens) for content in self._contents.values())

    def _ids(self, file: str, most: int, least: int) -> list[int]:
        ids: list[int] = self._tokenizer.encode(self._contents[file]).ids[:most]
        if len(ids) < least:
            raise ValueError(f"{file}: {len(ids)} tokens are too few for this budget, which takes {least}")
        return ids


def _method(name: str, given: Sequence[str]) -> MethodSpec:
    """Raises MethodError, or ValueError for an option that is no NAME=NUMBER."""
    pairs = [one.partition("=") for one in given]
    try:
        return method_spec(name, {key: float(value) for key, _, value in pairs})
    except ValueError as error:
        if isinstance(error, MethodError):
            raise
        raise ValueError(f"--option {' '.join(given)}: give NAME=NUMBER") from None


def _tokenizer(directory: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exceptions
        raise ModelError(f"{path} cannot be used as a tokenizer: {error}") from None
