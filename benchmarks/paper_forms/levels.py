"""Shared parts of the scripts that calibrate thresholds: arguments, and writing thresholds to a profile for
`benchmarks.accuracy --profile` and the service."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from deltafront.benchmarks import DEMO_TEXT
from deltafront.benchmarks.arguments import parser_of
from deltafront.benchmarks.reader import MODEL, load_text, load_tokenizer
from deltafront.kernels.methods import MethodSpec, load, method_spec
from deltafront.workers.calibration.method_levels import realised
from deltafront.workers.calibration.probes import Document, needles
from deltafront.workers.evaluation.setting import parse_method
from deltafront.workers.model.calibrated.profile import (
    Level,
    MethodLevels,
    Profile,
    ProfiledModel,
    ProfiledText,
    load_profile,
    shaping_options,
)
from deltafront.workers.model.decoder.stack import LayerStack
from deltafront.workers.model.directory.digest import model_digest
from deltafront.workers.settings import ModelSpec

METHODS = "deltafront.benchmarks.paper_forms.methods"


def model_parser_of(description: str, questions: int = 16) -> argparse.ArgumentParser:
    """Make a parser with the arguments of `model_of` and `documents_of`."""
    parser = parser_of(description)
    cuda = torch.cuda.is_available()
    parser.add_argument("--model", default=MODEL.path)
    parser.add_argument("--no-adapter", action="store_true", help="the model without the 128K adapter")
    parser.add_argument("--text", type=Path, nargs="+", default=[DEMO_TEXT], help="a document of each")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--questions", type=int, default=questions, help="facts hidden in each document")
    parser.add_argument("--dtype", default="float16" if cuda else "float32")
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    return parser


def levels_parser_of(description: str, method: str) -> argparse.ArgumentParser:
    """Make the parser of `model_parser_of`, and add arguments for the method and the profile to write."""
    parser = model_parser_of(description)
    parser.add_argument("--method", default=method, help="with options, such as xattention_paper:stride=16")
    parser.add_argument("--profile", type=Path, required=True, help="levels are added, or it is written")
    return parser


def model_of(arguments: argparse.Namespace) -> ModelSpec:
    given = {"path": arguments.model, "dtype": arguments.dtype}
    return ModelSpec(**given) if arguments.no_adapter else replace(MODEL, **given)


def method_of(arguments: argparse.Namespace) -> MethodSpec:
    """Return the method of the arguments, with min_tokens 0, so that no document is short enough for dense
    attention."""
    load(METHODS)
    given = parse_method(arguments.method)
    return method_spec(given.name, {**given.values, "min_tokens": 0})


def documents_of(arguments: argparse.Namespace) -> list[Document]:
    tokenizer = load_tokenizer(arguments.model)
    texts = [load_text(path, tokenizer) for path in arguments.text]
    how = arguments.tokens, arguments.questions
    return [needles(random.Random(number), *how, text) for number, text in enumerate(texts)]


def level_of(
    stack: LayerStack,
    documents: Sequence[Document],
    method: MethodSpec,
    thresholds: Sequence[Sequence[float]],
) -> Level:
    """Make a profile level from thresholds. Its density is measured on the documents."""
    density = round(realised(stack, documents, method, thresholds), 4)
    amounts = tuple(tuple(row) for row in thresholds)
    tokens = max(len(document.ids) for document in documents)
    return Level(density=density, tokens=tokens, share=density, amounts=amounts)


def write_profile(arguments: argparse.Namespace, method: MethodSpec, levels: Sequence[Level]) -> None:
    """Add levels to the profile or create it. Raises ProfileError if it is another model's."""
    model, texts = model_of(arguments), [path.read_text(encoding="utf-8") for path in arguments.text]
    made = MethodLevels(method=method.name, options=shaping_options(method), levels=tuple(levels))
    described = ProfiledModel(name=arguments.model, digest=model_digest(model))
    profile = Profile(format=1, model=described, texts=(), prefill=())
    if arguments.profile.exists():
        profile = load_profile(replace(model, profile=str(arguments.profile))) or profile
    read = [ProfiledText.of(text, arguments.tokens) for text in texts]
    profile.plus(made, read).write(arguments.profile)
