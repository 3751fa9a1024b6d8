"""`deltafront calibrate`: chooses a model's Δ-layers and each head's thresholds.

torch is imported when the command runs.
"""

from __future__ import annotations

import json as json_format
import os
from collections.abc import Mapping
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from pydantic import TypeAdapter

from deltafront.kernels.methods import MethodError, method_spec
from deltafront.service.cli.terminal import err, fail, read_options, read_text
from deltafront.service.wiring import shown_name
from deltafront.workers.calibration.documents import Documents
from deltafront.workers.calibration.probes import ANSWER_WEIGHT, Document
from deltafront.workers.model.calibrated.profile import (
    DecodePages,
    MethodLevels,
    Profile,
    ProfiledModel,
    among,
    load_profile,
)
from deltafront.workers.model.calibrated.runs import describe_runs
from deltafront.workers.model.directory.digest import model_digest
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.model.directory.store import model_directory
from deltafront.workers.model.directory.tokenizer_files import tokenizer_json
from deltafront.workers.settings import DecodeConfig, Dtype, ModelSpec, RopeScaling

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from deltafront.workers.calibration.delta_layers import Calibration
    from deltafront.workers.model.decoder.stack import LayerStack

PAGE_OPTIONS = (
    "layers", "dense_layers", "budget", "serving_budget", "recency", "full_layer", "tokens", "json",
)  # fmt: skip

DenseLayers = Annotated[
    int | None,
    typer.Option(help="With --questions, instead of --layers: number of layers that attend to all pages."),
]
ServingBudget = Annotated[int | None, typer.Option(help="page_budget in the profile (default: --budget).")]
Tokens = Annotated[
    int | None,
    typer.Option(help="Tokens of a text for choosing Δ-layers (default: four --budget, and the questions)."),
]
Questions = Annotated[
    int, typer.Option(help="Number of facts to hide in each text and ask for; 0: only prose.")
]
AllocationName = Annotated[
    str, typer.Option(help="How tiles are allocated to heads: marginal, or threshold (XAttention's paper).")
]
AnswerWeight = Annotated[
    float, typer.Option(min=0, help="Weight of answers, relative to the text's tail, for levels.")
]
Add = Annotated[
    bool, typer.Option("--add", help="Add these levels to the file --profile; choose no Δ-layers.")
]


def calibrate_command(
    context: typer.Context,
    *,
    model: Annotated[str, typer.Argument(help="A directory, .gguf file, hub id or embedded model's name.")],
    text: Annotated[list[str], typer.Option(help="A file of real prose; repeat the option for more.")],
    adapter: Annotated[str | None, typer.Option(help="A PEFT LoRA directory.")] = None,
    layers: Annotated[int, typer.Option(help="Number of Δ-layers.")] = 5,
    dense_layers: DenseLayers = None,
    budget: Annotated[int, typer.Option(help="K: number of pages that a sparse layer attends to.")] = 64,
    serving_budget: ServingBudget = None,
    recency: Annotated[int, typer.Option(help="L: number of last pages among them.")] = 8,
    full_layer: Annotated[list[int], typer.Option(help="Dense layers that score no pages.")] = [0, 1],  # noqa: B006
    tokens: Tokens = None,
    questions: Questions = 0,
    density: Annotated[list[float], typer.Option(help="A density level for prefill; repeat for more.")] = [],  # noqa: B006
    length: Annotated[list[int], typer.Option(help="A prompt length for the levels; repeat for more.")] = [],  # noqa: B006
    method: Annotated[str, typer.Option(help="Method of the levels, which ranks tiles by a score.")] = "dpxa",
    option: Annotated[list[str], typer.Option(help="NAME=NUMBER, an option of the method.")] = [],  # noqa: B006
    allocation: AllocationName = "marginal",
    answers: AnswerWeight = ANSWER_WEIGHT,
    add: Add = False,
    rope_theta: Annotated[float | None, typer.Option(help="model.rope_theta.")] = None,
    rope_scaling: Annotated[list[str], typer.Option(help="NAME=NUMBER of model.rope_scaling.")] = [],  # noqa: B006
    positions: Annotated[int | None, typer.Option(help="model.max_position_embeddings.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16 (default: bfloat16, on a CPU float32).")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    profile: Annotated[
        Path | None, typer.Option(help="Write a profile to this file (model.profile).")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print all results as one line of JSON.")] = False,
) -> None:
    """Choose Δ-layers for sparse decoding, and with --density each head's thresholds of sparse prefill."""
    _check_options(context, profile)
    pages: dict[str, Any] = {"budget": budget, "recency": recency, "full_layers": full_layer}
    served = {"page_budget": budget, "recency": recency, "full_layers": full_layer}
    calibration: Calibration | None = None
    missing = ""
    try:
        path, old = str(model_directory(model)), str(profile) if add else None
        rope: dict[str, Any] = {"rope_theta": rope_theta, "max_position_embeddings": positions}
        if rope_scaling:
            rope["rope_scaling"] = TypeAdapter(RopeScaling).validate_python(read_options(rope_scaling))
        kind = cast(Dtype, dtype or ("float32" if device == "cpu" else "bfloat16"))
        spec = ModelSpec(path=path, adapter=adapter, dtype=kind, profile=old, **rope)
        new = load_profile(spec)
        attention = method_spec(method, read_options(option))
        contents = {file: read_text(file) for file in text}
        _refuse_evaluated(new, contents)
        documents = Documents(_tokenizer(Path(path)), contents, questions)
        texts = [] if add else documents.for_pages(budget, tokens)
        by_length = {tokens: documents.of_length(tokens) for tokens in sorted(set(length))}
        if density:
            from deltafront.workers.calibration import method_levels as levels

            levels.require_thresholds(attention)
        stack = _load(spec, device, length, [] if add else full_layer)
        if not add:
            calibration = _choose_delta_layers(stack, texts, pages, layers, dense_layers)
        profiled = documents.profiled(max([*length, 0 if calibration is None else calibration.tokens[0]]))
        if calibration is not None:
            name = shown_name(ModelSpec(path=model, adapter=adapter))
            described = ProfiledModel(name=name, digest=model_digest(spec))
            chosen = {"delta_layers": calibration.delta_layers, "page_budget": serving_budget or budget}
            decode = DecodePages.model_validate({**served, **chosen})
            figures = {"allocation": allocation} if density else {}
            new = Profile(
                format=1, model=described, texts=profiled, prefill=(), decode=decode, figures=figures
            )
        if density and new is not None:
            how: dict[str, Any] = {"allocation": allocation, "answer_weight": answers, "profile": new}
            made = levels.method_levels(stack, by_length, attention, density, tell=_tell, **how)
            runs = levels.runs_by_layer(stack, by_length[length[0]][0], attention)
            new = _with_runs(new.plus(made, profiled), attention.name, runs)
            missing = _missing(made, density, length)
        if profile is not None and new is not None:
            new.write(profile)
    except (ModelError, MethodError, ValueError) as error:
        fail(str(error))
    if calibration is not None and json:
        print(json_format.dumps({**asdict(calibration), **served}))
    elif calibration is not None:
        print(f"delta_layers: {list(calibration.delta_layers)}")
    if missing:
        fail(f"{missing}; {profile} has the other levels")


def _missing(made: MethodLevels, densities: list[float], lengths: list[int]) -> str:
    """Return which density the texts did not reach; empty: all levels were made."""
    had = {(level.density, level.tokens) for level in made.levels}
    for density, tokens in product(densities, lengths):
        if (density, tokens) not in had:
            return f"--density {density:g}: no thresholds are that sparse at {tokens} tokens"
    return ""


def _with_runs(profile: Profile, method: str, runs: tuple[float | None, ...]) -> Profile:
    if told := describe_runs(method, runs):
        err.print(told, highlight=False, soft_wrap=True)
        return profile.model_copy(update={"runs": {**profile.runs, method: runs}})
    return profile


def _load(spec: ModelSpec, device: str, lengths: list[int], full_layers: list[int]) -> LayerStack:
    from deltafront.workers.model.decoder.load import load_model

    stack = load_model(spec, device)
    if lengths and max(lengths) > stack.config.positions:
        raise ValueError(f"--length {max(lengths)}: the model has {stack.config.positions} positions")
    for problem in DecodeConfig(full_layers=tuple(full_layers)).layer_problems(stack.config.layers):
        raise ValueError(problem)
    return stack


def _check_options(context: typer.Context, profile: Path | None) -> None:
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
    for each in density:
        if not 0 < each <= 1:
            fail(f"--density {each:g}: must be above 0 and at most 1")
    if length and min(length) < 1:
        fail(f"--length {min(length)}: must be at least 1")
    if (served := given["serving_budget"]) is not None and served < given["recency"]:
        fail(f"--serving-budget {served}: must be at least --recency, {given['recency']}")
    if (allocation := given["allocation"]) not in ("marginal", "threshold"):
        fail(f"--allocation {allocation}: must be marginal or threshold")
    if given["add"]:
        _check_add(context)


def _check_add(context: typer.Context) -> None:
    if not context.params["density"]:
        fail("--add needs --density: it adds levels to what --profile has")
    for name in (*PAGE_OPTIONS, "allocation"):  # the old profile's figures have its allocation
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            fail(f"--add makes levels and nothing else: leave out --{name.replace('_', '-')}")


def _choose_delta_layers(
    stack: LayerStack, texts: list[Document], pages: dict[str, Any], layers: int, dense_layers: int | None
) -> Calibration:
    from deltafront.workers.calibration.delta_layer_search import refine
    from deltafront.workers.calibration.delta_layers import calibrate

    _tell(f"Reading {len(texts)} texts of up to {max(len(text.ids) for text in texts)} tokens")
    if dense_layers is None:
        return calibrate(stack, texts, layers, **pages)
    first = calibrate(stack, texts, 1, **pages)  # the search chooses their number
    return refine(stack, texts, first, dense_layers, **pages, tell=err.print)


def _refuse_evaluated(profile: Profile | None, contents: Mapping[str, str]) -> None:
    used = () if profile is None or profile.measured is None else profile.measured.texts
    if names := among(used, contents):
        raise ValueError(f"--text {names[0]}: it evaluated the profile: calibrate on another text")


def _tell(progress: str) -> None:
    err.print(f"{progress} …")


def _tokenizer(directory: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(tokenizer_json(directory))
    except ModelError:
        raise
    except Exception as error:  # the library raises plain Exceptions
        raise ModelError(f"{directory} cannot be used as a tokenizer: {error}") from None
