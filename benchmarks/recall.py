"""How well each selector's score ranks tiles, on a real model's queries and keys over real text.

    python -m deltafront.benchmarks.recall --text FILE --tokens 32768 131072 --device cuda

For each query block the tiles are ranked: the diagonal and the sink (block 0) first, as every method keeps
them, the others by score. A row *needs* the shortest prefix of that order whose true attention mass (mean
over the block's query rows, so it sums to 1) reaches the coverage. The figure is the tiles needed by all
rows over all causal tiles, per head; then the mean over heads and layers. `oracle` ranks by the true mass
itself, forcing nothing. The scores come from the same kernels that are timed on a GPU, and from their
CPU forms on a CPU. A method that keeps whole lines or a window has no score and no row here.

Shape suffixes as in `kernels.interface`. The model is a directory, hub id or GGUF file, as for `serve`;
fewer tokens are a prefix of more, so one pass over the text serves all lengths. Prints a table; writes the
JSON named by --result.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from ..kernels.constants import BLOCK
from ..kernels.interface import AttentionInput, no_phase
from ..kernels.options import (
    AnchorsOptions,
    AntidiagonalOptions,
    BlockPoolOptions,
    NaiveOptions,
    ThesisAnchorsOptions,
)
from ..kernels.selectors.anchors.selector import AnchorsSelector, ThesisAnchorsSelector
from ..kernels.selectors.grouped.antidiagonal import AntidiagonalSelector
from ..kernels.selectors.grouped.selector import BlockPoolSelector, NaiveSelector
from ..kernels.selectors.scored import ScoredSelector
from ..tests.numerics import spec_of
from .harness import commit_of, write_json

COVERAGES = (0.75, 0.90, 0.95)
LAYERS = (3, 15, 24)
ROOT = Path(__file__).resolve().parent.parent
_OURS = AnchorsOptions(tau=0.9)

ESTIMATORS: dict[str, Callable[[], ScoredSelector]] = {
    "xattention_s8": lambda: AntidiagonalSelector(AntidiagonalOptions(tau=0.9, stride=8)),
    "xattention_s16": lambda: AntidiagonalSelector(AntidiagonalOptions(tau=0.9, stride=16)),
    "naive_s4": lambda: NaiveSelector(NaiveOptions(tau=0.9, stride=4)),
    "block_pool": lambda: BlockPoolSelector(BlockPoolOptions(tau=0.9)),
    "dpxa": lambda: AnchorsSelector(_OURS),
    "dpxa_4x32": lambda: AnchorsSelector(replace(_OURS, q_anchors=4)),
    "dpxa_means": lambda: AnchorsSelector(replace(_OURS, q_anchors=8), representative="mean"),
    "dpxa_not_relaxed": lambda: AnchorsSelector(_OURS, k_relax=None),
    "dpxa_cells": lambda: AnchorsSelector(_OURS, row_normalised=False),
    "dpxa_unweighted": lambda: AnchorsSelector(_OURS, weighted=False),
    "dpxa_thesis": lambda: ThesisAnchorsSelector(ThesisAnchorsOptions(tau=0.9)),
}
"""dpxa: as served. The others change one thing of it, dpxa_means two (what it was before); dpxa_thesis is
the thesis's form (`ThesisAnchorsSelector`)."""


@dataclass(frozen=True)
class Row:
    """The tiles needed for each coverage, as shares of all causal tiles."""

    estimator: str
    tokens: int
    coverage_75: float
    coverage_90: float
    coverage_95: float


def tiles_needed(
    score_BHNM: torch.Tensor, true_BHNM: torch.Tensor, first_block: int, *, forced: bool
) -> torch.Tensor:
    """float64 (coverages, batch x heads): tiles needed over causal tiles, as the module's text defines."""
    rows, columns = score_BHNM.shape[2:]
    device = score_BHNM.device
    diagonal_N1 = torch.arange(rows, device=device)[:, None] + first_block
    column_M = torch.arange(columns, device=device)
    rank_BHNM = score_BHNM.double().masked_fill(column_M > diagonal_N1, -1.0)
    if forced:
        rank_BHNM = rank_BHNM.masked_fill((column_M == diagonal_N1) | (column_M == 0), float("inf"))
    order_BHNM = rank_BHNM.argsort(dim=-1, descending=True, stable=True)
    reached_BHNM = true_BHNM.double().gather(-1, order_BHNM).cumsum(-1)
    whole_BHN1 = reached_BHNM[..., -1:]
    causal = float((diagonal_N1 + 1).sum())
    needed = [((reached_BHNM < share * whole_BHN1).sum(-1) + 1).sum(-1) / causal for share in COVERAGES]
    return torch.stack(needed).double().flatten(1)


def true_masses(x: AttentionInput) -> torch.Tensor:
    """float32 true_BHNM: the mean attention mass of each tile, exact, one query block at a time."""
    batch, heads = x.q_BHTD.shape[:2]
    groups, _, dim = x.k_BGSD.shape[1:]
    device = x.q_BHTD.device
    true_BHNM = torch.zeros((batch, heads, x.query_blocks, x.key_blocks), device=device)
    k_BGSD = x.k_BGSD.float()
    for block in range(x.query_blocks):
        q_BHRD = x.q_BHTD[:, :, block * BLOCK : (block + 1) * BLOCK].float()
        rows, start = q_BHRD.shape[2], x.q_start + block * BLOCK
        seen = start + rows
        stacked = q_BHRD.reshape(batch, groups, -1, dim)
        logit_BHRS = (stacked @ k_BGSD[:, :, :seen].transpose(2, 3)).view(batch, heads, rows, seen)
        future_RS = torch.arange(seen, device=device) > torch.arange(start, seen, device=device)[:, None]
        mass_BHRS = (logit_BHRS * x.scale).masked_fill_(future_RS, float("-inf")).softmax(-1)
        mass_BHS = functional.pad(mass_BHRS.mean(2), (0, -seen % BLOCK))
        tiles = mass_BHS.view(batch, heads, -1, BLOCK).sum(-1)
        true_BHNM[:, :, block, : tiles.shape[-1]] = tiles
    return true_BHNM


def measure(inputs: Sequence[AttentionInput], names: Sequence[str]) -> list[Row]:
    """One row an estimator, over the layers' inputs; the oracle first."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in ("oracle", *names)}
    for x in inputs:
        true_BHNM = true_masses(x)
        found["oracle"].append(tiles_needed(true_BHNM, true_BHNM, x.first_block, forced=False))
        for name in names:
            selector = ESTIMATORS[name]()
            score_BHNM = selector.scores(x, selector.new_state(spec_of(x)), no_phase)
            found[name].append(tiles_needed(score_BHNM, true_BHNM, x.first_block, forced=True))
    tokens = inputs[0].k_BGSD.shape[2]
    return [
        Row(name, tokens, *(float(v) for v in torch.stack(needed).mean(dim=(0, 2))))
        for name, needed in found.items()
    ]


@dataclass(frozen=True)
class ModelChoice:
    """Which model, and where it runs."""

    model: str
    adapter: str | None
    overrides: dict[str, Any]
    device: torch.device
    dtype: torch.dtype


def capture(
    choice: ModelChoice, text: str, tokens: int, layers: Sequence[int]
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """(q_BHTD, k_BGSD) of the layers asked for, after RoPE, from one dense pass over the text."""
    from tokenizers import Tokenizer

    from ..workers.model.decoder.load import load_stack
    from ..workers.model.directory.model_config import read_config
    from ..workers.model.directory.store import adapter_directory, model_directory
    from ..workers.model.weights.stack_weights import StackSpec

    directory = model_directory(choice.model)
    config = read_config(directory, choice.overrides)
    ids = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text).ids[:tokens]
    if len(ids) < tokens:
        raise SystemExit(f"the text has {len(ids)} tokens, {tokens} are needed: give a longer one")
    stack = load_stack(
        directory,
        StackSpec(
            config=config,
            layers=range(max(layers) + 1),
            embedding=True,
            head=False,
            dtype=choice.dtype,
            device=choice.device,
            adapter=None if choice.adapter is None else adapter_directory(choice.adapter),
        ),
    )
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q_BHTD, k_BGSD, v_BGSD = (t.transpose(0, 1).contiguous()[None] for t in (q, k, v))
        if layer in layers:
            kept[layer] = (q_BHTD, k_BGSD)
        if layer == max(layers):
            return torch.zeros_like(q)  # nothing after it is measured
        out = functional.scaled_dot_product_attention(q_BHTD, k_BGSD, v_BGSD, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    with torch.inference_mode():
        ids_T = torch.tensor(ids, device=choice.device)
        stack.forward(stack.embed(ids_T), torch.arange(tokens, device=choice.device), attend)
    return kept


def inputs_of(kept: dict[int, tuple[torch.Tensor, torch.Tensor]], tokens: int) -> list[AttentionInput]:
    """The first `tokens` positions of every captured layer; values are not needed."""
    return [
        AttentionInput.of(q[:, :, :tokens], k[:, :, :tokens], k[:, :, :tokens]) for _, (q, k) in kept.items()
    ]


def table(rows: Sequence[Row]) -> str:
    head = f"{'estimator':20s} {'tokens':>8s}   75%     90%     95%"
    lines = [
        f"{row.estimator:20s} {row.tokens:>8d} {row.coverage_75:7.4f} {row.coverage_90:7.4f} "
        f"{row.coverage_95:7.4f}"
        for row in rows
    ]
    return "\n".join([head, *lines])


def write(path: Path, rows: Sequence[Row], device: torch.device, text: str) -> None:
    import triton

    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    record = {
        "gpu": gpu,
        "commit": commit_of(ROOT),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "rows": [vars(row) for row in rows],
        "text": text,
    }
    write_json(path, record)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32_768, 131_072])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--adapter", default="deploy/models/smollm2-135m-128k")
    parser.add_argument("--no-adapter", action="store_true")
    parser.add_argument("--rope-theta", type=float, default=8e6)
    parser.add_argument("--layers", type=int, nargs="+", default=list(LAYERS))
    parser.add_argument("--estimators", nargs="+", default=list(ESTIMATORS), choices=list(ESTIMATORS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--result", type=Path, default=None)
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    overrides = {"rope_theta": chosen.rope_theta, "max_position_embeddings": max(chosen.tokens)}
    adapter = None if chosen.no_adapter else chosen.adapter
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    choice = ModelChoice(chosen.model, adapter, {} if chosen.no_adapter else overrides, device, dtype)
    text = chosen.text.read_text(encoding="utf-8", errors="replace")
    kept = capture(choice, text, max(chosen.tokens), chosen.layers)
    rows: list[Row] = []
    for tokens in sorted(chosen.tokens):
        rows += measure(inputs_of(kept, tokens), chosen.estimators)
        print(table(rows[-1 - len(chosen.estimators) :]), flush=True)
    if chosen.result is not None:
        write(chosen.result, rows, device, chosen.text.stem)


if __name__ == "__main__":
    main()
