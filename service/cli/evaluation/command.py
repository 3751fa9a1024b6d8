"""`deltafront evaluate`: measures which prefill settings keep a model's answers.

One process prefills and answers, with the layers and kernels of a service. torch is imported when the command
runs.
"""

from __future__ import annotations

import contextlib
import functools
import json as json_format
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Column, Table

from deltafront.kernels.methods import MethodError
from deltafront.service.cli.evaluation.plot import svg
from deltafront.service.cli.terminal import err, fail, read_options, read_text
from deltafront.service.wiring import shown_name
from deltafront.workers.evaluation.comparison import HEADER, ComparedRow, cells
from deltafront.workers.evaluation.evaluation import Evaluation
from deltafront.workers.evaluation.planner import (
    TASKS,
    Found,
    endless_prompts,
    found,
    nearest,
    trials,
)
from deltafront.workers.evaluation.prompts import PromptError, TaskPrompt, read_prompts
from deltafront.workers.evaluation.ruler import Haystack
from deltafront.workers.evaluation.setting import split_method
from deltafront.workers.model.calibrated.profile import (
    Measured,
    Profile,
    ProfiledModel,
    ProfiledText,
    among,
    load_profile,
)
from deltafront.workers.model.calibrated.runs import base_method, describe_runs
from deltafront.workers.model.directory.digest import model_digest
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.model.directory.store import model_directory
from deltafront.workers.model.directory.tokenizer_files import tokenizer_json
from deltafront.workers.settings import Dtype, ModelSpec, RopeScaling

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from deltafront.workers.evaluation.answering import OneModel

BUILT_IN = Path(__file__).resolve().parents[3] / "deploy" / "demo" / "moby-dick.txt"
QUICK_MINUTES, MINUTES = 2.0, 10.0
GPU_TOKENS, CPU_TOKENS = 31_000, 6_000
"""Lengths of prompts unless --length says otherwise. Sparse methods are dense up to 4,096 tokens."""
_WIDTH = 150
"""Columns of the table where there is no terminal."""
GPU_CHUNK, CPU_CHUNK = 16_384, 2_048

Texts = Annotated[
    list[str],
    typer.Option(help="Text to hide facts in and to continue; may be repeated. Default: the demo's."),
]
Questions = Annotated[
    Path | None,
    typer.Option(help="JSON lines with `prompt`, or `document` and `question`; `answers` if known."),
]
Asked = Annotated[
    Literal["prompt", "session", "both"],
    typer.Option(help="Whether questions end the prompt, or are asked in a session on the document."),
]
Settings = Annotated[
    list[str], typer.Option("--setting", help="METHOD:OPTION=NUMBER,…@BLOCKS to measure; may be repeated.")
]


def evaluate_command(
    *,
    model: Annotated[str, typer.Argument(help="A directory, .gguf file, hub id or embedded model's name.")],
    text: Texts = [],  # noqa: B006
    questions: Questions = None,
    ask: Asked = "prompt",
    setting: Settings = [],  # noqa: B006
    length: Annotated[
        int | None, typer.Option(min=64, help="Tokens of a RULER prompt (31000 on a GPU, 6000 on CPUs).")
    ] = None,
    minutes: Annotated[float | None, typer.Option(min=0, help="Stop after this many minutes (10).")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Stop after two minutes.")] = False,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of facts and their places.")] = 0,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Calibrate levels of dpxa on halves of two texts at most, and try these.",
        ),
    ] = False,
    adapter: Annotated[str | None, typer.Option(help="A PEFT LoRA directory.")] = None,
    rope_theta: Annotated[float | None, typer.Option(help="As in the configuration file.")] = None,
    rope_scaling: Annotated[list[str], typer.Option(help="NAME=NUMBER of model.rope_scaling.")] = [],  # noqa: B006
    positions: Annotated[int | None, typer.Option(help="max_position_embeddings, likewise.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="bfloat16 on a GPU, float32 on CPUs.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda (cuda where there is a GPU).")] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="File for `serve --profile`, to write the verdict to. Its levels stay."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="SVG file for a plot of density and score.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print all rows as one line of JSON.")] = False,
) -> None:
    """Measure which prefill settings keep the answers of dense attention on a model."""
    until = time.monotonic() + 60 * (minutes or (QUICK_MINUTES if quick else MINUTES))
    for file in filter(None, (profile, plot)):
        if not file.parent.is_dir():
            fail(f"{file}: there is no directory {file.parent}")
    if calibrate and profile is None:
        fail("--calibrate needs --profile: levels are kept in a profile")
    from deltafront.workers.evaluation.answering import default_device

    device = device or default_device()
    spec_of: dict[str, Any] = {"rope_theta": rope_theta, "max_position_embeddings": positions}
    try:
        if rope_scaling:
            scaling = TypeAdapter(RopeScaling).validate_python(read_options(rope_scaling))
            spec_of["rope_scaling"] = scaling
        spec = ModelSpec(
            path=str(model_directory(model)),
            adapter=adapter,
            dtype=dtype or ("bfloat16" if device.startswith("cuda") else "float32"),
            profile=str(profile) if profile is not None and profile.exists() else None,
            **spec_of,
        )
        name = shown_name(ModelSpec(path=model, adapter=adapter))
        old, source = load_profile(spec), _Source.of(text, questions, halved=calibrate)
        source.check(ask, old)
        base = old or _empty(name, spec)
        run = _Run(spec, device, base, length, answer_tokens, source, seed)
        if calibrate and profile is not None:
            run.profile.write(profile)  # so that an interrupted evaluation leaves the levels
        tried = trials(setting, ask, run.profile, max(run.tokens), run.recomputes, levels_alone=calibrate)
        evaluation = Evaluation(run.model, tried)
        with contextlib.suppress(KeyboardInterrupt):  # what was measured until then is shown
            evaluation.run(run.prompts(), until, _tell)
    except (ModelError, MethodError, PromptError, ValueError) as error:
        fail(str(error))
    if not evaluation.rows():
        fail("interrupted before a setting had answered a prompt")
    rows = evaluation.rows()
    best, near = found(rows), nearest(rows)
    shown = [evaluation.dense(), *rows.values()]
    if profile is not None:
        measured = _measured(best, evaluation.dense(), run.tokens, source)
        runs = {**run.profile.runs, **_runs(shown)}
        Profile(**{**dict(run.profile), "measured": measured, "runs": runs}).write(profile)
    if plot is not None:
        plot.write_text(svg(shown, f"{shown_name(ModelSpec(path=model))}: {len(evaluation.prompts)} prompts"))
    if json:
        print(json_format.dumps({"verdict": best.words, "rows": [asdict(row) for row in shown]}))
    else:
        _show(shown, best, near)


@dataclass(frozen=True)
class _Source:
    """The texts that facts are hidden in, and the user's questions.

    Attributes:
        calibrating: Texts on whose first halves levels are calibrated first. `texts` has their second halves.
    """

    texts: dict[str, str]
    questions: tuple[TaskPrompt, ...]
    own: bool
    calibrating: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, text: Sequence[str], questions: Path | None, *, halved: bool) -> _Source:
        """Read all. halved: Calibrate on first halves of the first texts."""
        asked = () if questions is None else tuple(read_prompts(questions))
        texts = {Path(file).stem: read_text(file) for file in text or [str(BUILT_IN)]}
        calibrating: dict[str, str] = {}
        if halved:
            from deltafront.workers.evaluation.calibration import MOST_TEXTS, halves

            calibrating = dict(islice(texts.items(), MOST_TEXTS))
            texts |= halves(calibrating)[1]
        return cls(texts if text or not asked else {}, asked, bool(text), calibrating)

    def check(self, ask: str, profile: Profile | None) -> None:
        """Raise ValueError for texts that calibrated the profile, and, unless `ask` is `prompt`, for
        questions without a document to keep as a session."""
        if names := among(() if profile is None else profile.texts, self.texts):
            raise ValueError(f"--text {names[0]}: it calibrated the profile: evaluate on another text")
        if ask != "prompt" and any(not one.document for one in self.questions):
            raise ValueError(f"--ask {ask}: needs `document` and `question` on every line, not `prompt`")

    def profiled(self, tokens: int) -> tuple[ProfiledText, ...]:
        return tuple(ProfiledText.of(content, tokens) for content in self.texts.values())


class _Run:
    """The loaded model and its prompts. `profile`: With the levels that were calibrated, if any were."""

    def __init__(
        self,
        spec: ModelSpec,
        device: str,
        profile: Profile,
        length: int | None,
        answer: int,
        source: _Source,
        seed: int,
    ) -> None:
        from deltafront.workers.evaluation.answering import OneModel
        from deltafront.workers.model.decoder.load import load_model

        cuda = device.startswith("cuda")
        self._tokenizer, self._source, self._seed = _tokenizer(Path(spec.path)), source, seed
        _say(f"Loading {spec.path}")
        stack = load_model(spec, device)
        most = stack.config.positions - answer
        longest = min(length or (GPU_TOKENS if cuda else CPU_TOKENS), most)
        if length is not None and longest < length:
            raise ValueError(f"--length {length}: the model's positions leave {most} for a prompt")
        counts = [self._count(one.text) for one in source.questions]
        if counts and max(counts) > most:
            raise ValueError(f"--questions: a prompt of {max(counts)} tokens; the model takes {most}")
        self._longest = longest
        lengths = [*([longest] if source.texts else []), *counts]
        self.tokens = tuple(sorted({min(lengths), max(lengths)}))
        chunk = GPU_CHUNK if cuda else CPU_CHUNK
        room = max(self.tokens) + 8  # question and document are tokenised apart
        self.recomputes = not stack.config.linear_layers
        if source.calibrating:
            from deltafront.workers.evaluation.calibration import with_levels

            given = source.calibrating, max(self.tokens)
            profile = with_levels(profile, stack, self._tokenizer, *given, _say)
        self.profile = profile
        self.model: OneModel = OneModel(stack, self._tokenizer, room, chunk, answer, profile)

    def prompts(self) -> Iterator[TaskPrompt]:
        """Yield the user's questions, then RULER's tasks."""
        yield from self._source.questions
        if self._source.texts:
            hay = [Haystack(name, content) for name, content in self._source.texts.items()]
            tasks = (*TASKS, "continuation") if self._source.own else TASKS
            yield from endless_prompts(hay, tasks, self._longest, self._count, self._seed)

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text).ids)


def _tokenizer(directory: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(tokenizer_json(directory))


def _say(progress: str) -> None:
    err.print(f"{progress} …", highlight=False, soft_wrap=True)


def _tell(evaluation: Evaluation) -> None:
    rows = list(evaluation.rows().values())[:3]
    kept = ", ".join(f"{row.setting} {row.kept:.2f}" for row in rows)
    counts = f"{len(evaluation.prompts)} prompts, {len(evaluation.running)} settings running"
    err.print(f"{counts}: {kept}", highlight=False, soft_wrap=True)


def _empty(name: str, spec: ModelSpec) -> Profile:
    described = ProfiledModel(name=name, digest=model_digest(spec))
    return Profile(format=1, model=described, texts=(), prefill=())


def _measured(best: Found, dense: ComparedRow, tokens: Sequence[int], source: _Source) -> Measured:
    row = dense if best.row is None else best.row
    method, options = ("dense", {}) if best.setting is None else split_method(best.setting.method)
    low, high = (1.0, 1.0) if best.row is None else row.kept_95 or (0.0, 0.0)
    return Measured(
        method=method,
        options=options,
        recompute_blocks=0 if best.setting is None else best.setting.blocks,
        tokens=tuple(tokens),
        samples=row.samples,
        density=row.density,
        dense=row.dense,
        score=row.score,
        kept=1.0 if best.row is None else row.kept,
        low=low,
        high=high,
        lost=row.lost,
        won=row.won,
        verdict=best.words,
        texts=source.profiled(max(tokens)),
    )


def _runs(rows: Sequence[ComparedRow]) -> dict[str, tuple[float | None, ...]]:
    """Return the runs of similar keys by layer, for each method that looks for some."""
    return {base_method(row.setting): tuple(row.runs) for row in rows if any(row.runs)}


def _show(rows: Sequence[ComparedRow], best: Found, near: ComparedRow | None) -> None:
    console = Console()
    console = console if console.is_terminal else Console(width=_WIDTH)
    table = Table(*(Column(name, overflow="fold") for name in HEADER))
    for row in rows:
        table.add_row(*cells(row))
    console.print(table, highlight=False)
    say = functools.partial(console.print, highlight=False, soft_wrap=True, markup=False)
    for method, runs in _runs(rows).items():
        say(describe_runs(method, runs))
    say(f"Verdict: {best.words}")
    if best.setting is None and near is not None:
        density, kept = cells(near)[1], cells(near)[5]
        say(f"Nearest: {near.setting} at density {density} keeps {kept}; {near.samples} prompts")
