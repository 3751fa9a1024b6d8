"""`deltafront size`: the GPUs and memory that a model needs, or a configuration for given GPUs."""

import json as json_format
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
import yaml
from rich.console import Console
from rich.table import Table

from deltafront.kernels.constants import DECODE_HEAD_DIMS
from deltafront.service.cli.planner import (
    MOST_GPUS,
    Demand,
    best,
    beyond_training,
    configuration,
    explained,
    gpus_needed,
    kept_gib,
    longest,
    missing_bytes,
    rolling,
    uses,
)
from deltafront.service.cli.size import (
    DTYPE_BYTES,
    GIB,
    RESERVE_GIB,
    SHAPES,
    Sizing,
    check,
    host_gib,
    host_reason,
    row,
    sizing,
)
from deltafront.service.cli.terminal import err, fail
from deltafront.service.config import ConfigError, parse
from deltafront.workers.model.directory.config_file import read_config
from deltafront.workers.model.directory.model_config import ModelConfig
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.model.directory.rope_config import refuse_unscaled
from deltafront.workers.model.directory.store import config_directory
from deltafront.workers.settings import Dtype, KVDtype, Quantisation

TOKENS = (131_072, 524_288)
HUB: Mapping[str, str] = {
    "8b": "meta-llama/Llama-3.1-8B-Instruct",
    "70b": "meta-llama/Llama-3.1-70B-Instruct",
}
"""Hub ids of the models of SHAPES."""


def size_command(
    *,
    models: Annotated[
        list[str] | None, typer.Argument(help="Models: 8b, 70b, directories, .gguf files or hub ids.")
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(help="Tokens of a context: prompt and answer (default: 131072 and 524288)."),
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Number of contexts in decode at the same time.")] = 1,
    gpu_gib: Annotated[float, typer.Option(help="Memory of one GPU in GiB.")] = 80.0,
    stages: Annotated[
        int | None, typer.Option(help="Number of prefill stages (default: the fewest that fit).")
    ] = None,
    tensor_parallel: Annotated[
        int | None,
        typer.Option(help="Ranks of a decode worker (default: the number that needs the fewest GPUs)."),
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"model.dtype: {', '.join(get_args(Dtype))}.")] = "bfloat16",
    quantisation: Annotated[
        str | None, typer.Option(help=f"model.quantisation: {', '.join(get_args(Quantisation))}.")
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help=f"decode.kv_dtype: {', '.join(get_args(KVDtype))}.")
    ] = None,
    host_cache_gib: Annotated[
        float, typer.Option(help="decode.host_cache_gib: prints how many tokens this memory holds.")
    ] = 0.0,
    host_memory: Annotated[
        float | None,
        typer.Option(
            "--host-gib",
            help="With --gpus: the host's free memory in GiB, from which decode.host_cache_gib is chosen.",
        ),
    ] = None,
    reserve_gib: Annotated[float, typer.Option(help="Memory kept free on each GPU in GiB.")] = RESERVE_GIB,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON per result.")] = False,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="COUNTxGB",
            help="Choose a configuration for one host's GPUs, such as 8x80. GB are thousands of MiB, as in "
            "nvidia-smi. Without --tokens, plan for the model's longest context.",
        ),
    ] = None,
    write: Annotated[
        Path | None, typer.Option(help="With --gpus: write the configuration to this file.")
    ] = None,
) -> None:
    """Print the number of GPUs and their memory for a model at given context lengths.

    With --gpus: print a configuration for the GPUs of one host.
    """
    if dtype not in DTYPE_BYTES:
        fail(f"--dtype {dtype}: must be one of {', '.join(DTYPE_BYTES)}")
    if quantisation is not None and quantisation not in get_args(Quantisation):
        fail(f"--quantisation {quantisation}: must be one of {', '.join(get_args(Quantisation))}")
    if kv_dtype is not None and kv_dtype not in get_args(KVDtype):
        fail(f"--kv-dtype {kv_dtype}: must be one of {', '.join(get_args(KVDtype))}")
    how: dict[str, Any] = {"dtype": dtype, "quantisation": quantisation, "stages": stages}
    how |= {"kv_dtype": kv_dtype, "host_cache_gib": host_cache_gib}
    how |= {"ranks": tensor_parallel, "reserve_gib": reserve_gib}
    if gpus is not None:
        _plan(models or [], tokens or [], gpus, how | {"concurrency": concurrency}, host_memory, json, write)
        return
    if write is not None or host_memory is not None:
        fail("--write: goes with --gpus, and so does --host-gib")
    try:
        shapes = {name: _shape(name) for name in models or SHAPES}
        sizings = [
            sizing(name, shape, length, concurrency, gpu_gib, **how)
            for name, shape in shapes.items()
            for length in tokens or TOKENS
        ]
    except (ModelError, ValueError) as error:
        fail(str(error))
    for line in [note for one in sizings for note in _notes(one, shapes[one.model])]:
        err.print(line, soft_wrap=True, markup=False, highlight=False)
    if json:
        for sized in sizings:
            derived = {"decode_workers": sized.decode_workers, "gpus": sized.gpus}
            print(json_format.dumps(asdict(sized) | derived))
    else:
        rows, table = [row(sized) for sized in sizings], Table(show_header=False)
        for name in rows[0]:  # one column per result, because rows would be too wide
            table.add_row(name, *(values[name] for values in rows))
        Console().print(table)


def _plan(
    models: Sequence[str],
    tokens: Sequence[int],
    gpus: str,
    how: dict[str, Any],
    host_free_gib: float | None,
    json: bool,
    write: Path | None,
) -> None:
    if len(models) != 1 or len(tokens) > 1:
        fail("--gpus: takes one model and one number of --tokens")
    if host_free_gib is not None and how["host_cache_gib"]:
        fail("--host-gib: chooses what --host-cache-gib gives, so take one of them")
    if host_free_gib is not None and not 0 < host_free_gib < math.inf:
        fail(f"--host-gib {host_free_gib:g}: must be finite, and above 0")
    try:
        demand = rolling(_demand(models[0], tokens, gpus, how))
        found = best(demand)
        if found is None:
            fail("\n".join(_what_fits(demand)))
        reason = ""
        if host_free_gib is not None:
            kept = kept_gib(demand, found)
            reason = host_reason(host_free_gib, kept)
            demand = replace(demand, host_cache_gib=host_gib(host_free_gib, kept))
        content = configuration(demand, found, _path(models[0]))
        settings = parse(content, "size")
        settings.check_against(demand.model, None)
        if write is not None:
            refuse_unscaled(settings.model.overrides, demand.model.positions, demand.model.architecture)
    except (ConfigError, ModelError, ValueError) as error:
        fail(str(error))
    lines = explained(demand, found, reason)
    if json:
        print(json_format.dumps(asdict(found) | {"configuration": content}))
    else:
        print("\n".join(lines))
    if write is not None:
        comments = "".join(f"# {line}\n" for line in lines)
        write.write_text(comments + yaml.safe_dump(content, sort_keys=False), encoding="utf-8")


def _demand(name: str, tokens: Sequence[int], gpus: str, how: dict[str, Any]) -> Demand:
    count, _, gb = gpus.partition("x")
    if not count.isdecimal() or not gb.replace(".", "", 1).isdecimal() or int(count) < 1:
        raise ValueError(f"--gpus {gpus}: give a count and GB of memory, such as 8x80")
    model, given = _shape(name), how.pop("quantisation")
    any_kind = DTYPE_BYTES[how["dtype"]] == 2 and given is None
    if given is not None and DTYPE_BYTES[how["dtype"]] != 2:
        raise ValueError(f"quantisation {given} goes with a dtype of 16 bits, not {how['dtype']}")
    demand = Demand(
        model=model,
        gpus=int(count),
        gpu_gib=float(gb) * 1000 / 1024,
        tokens=tokens[0] if tokens else model.positions,
        quantisations=(None, *get_args(Quantisation)) if any_kind else (given,),
        **how,
    )
    check(demand.tokens, demand.concurrency, demand.gpu_gib, demand.reserve_gib, demand.host_cache_gib)
    if next(uses(demand), None) is None:
        raise ValueError(f"--gpus {gpus}: the GPUs cannot be used with such --stages and --tensor-parallel")
    return demand


def _what_fits(demand: Demand) -> Iterator[str]:
    missing, longer, more = missing_bytes(demand), longest(demand), gpus_needed(demand)
    yield f"{demand.tokens:,} tokens do not fit: the fullest GPU lacks {missing / GIB:.1f} GiB"
    if longer is not None:
        yield f"{longer.tokens:,} tokens fit: --tokens {longer.tokens}"
    narrow = replace(demand, kv_dtype="int8")
    if demand.kv_dtype is None and best(narrow) is not None:
        yield "an 8-bit KV cache makes them fit: --kv-dtype int8"
    yield f"{more} such GPUs are enough" if more else f"{MOST_GPUS} such GPUs are not enough either"


def _shape(name: str) -> ModelConfig:
    return SHAPES[name] if name in SHAPES else read_config(config_directory(name))


def _path(name: str) -> str:
    """Return the value of `model.path`: an absolute path, or a hub id."""
    path = Path(name).expanduser()
    return HUB.get(name) or (str(path.resolve()) if path.exists() else name)


def _notes(sized: Sizing, model: ModelConfig) -> Iterator[str]:
    """Yield a line for each reason why `serve` would refuse the model on GPUs."""
    for line in beyond_training(model, sized.tokens):
        yield f"{sized.model}: {line}"
    if model.head_dim not in DECODE_HEAD_DIMS:
        yield f"{sized.model}: its heads have {model.head_dim} channels, so it is served on CPUs alone"
