"""Cases of a mixture-of-experts MLP in Qwen3-30B-A3B's widths: routing, both grouped GEMMs and the sum."""

from __future__ import annotations

from functools import partial

import torch

from deltafront.benchmarks.engine.model import SHAPES
from deltafront.benchmarks.harness import BenchConfig, Case, Timed
from deltafront.kernels.experts.mixture import cpu_mixture, kernel_mixture
from deltafront.kernels.experts.routing import Router
from deltafront.kernels.layers.fp8 import quantise_rows
from deltafront.kernels.layers.norm import LinearInput

SHAPE = SHAPES["30b-a3b"]
TOKENS = (1, 4, 16, 256, 2048, 16_384)
"""Tokens of decode steps, of extended prompts, and of prefill chunks."""
EXPERTS, CHOSEN = 128, 8
ROUTER = Router(per_token=CHOSEN, normed=True)
LARGEST_ERROR = {False: 0.01, True: 0.08}
"""Maximum relative error of a row in the 2-norm, by `fp8`."""


def cases(config: BenchConfig) -> list[Case]:
    """List the cases: each number of tokens with 16-bit and with FP8 experts."""
    names = {"experts": False, "experts_fp8": True}
    checks = {fp8: partial(_check, config, fp8) for fp8 in names.values()}
    return [
        Case(name, tokens, partial(_prepare, config, fp8, tokens), checks[fp8])
        for name, fp8 in names.items()
        for tokens in TOKENS
    ]


def _draw(
    config: BenchConfig, fp8: bool, tokens: int
) -> tuple[torch.Tensor, torch.Tensor, LinearInput, LinearInput]:
    generator = torch.Generator(config.device).manual_seed(config.seed)

    def draw(rows: int, width: int, size: float = 1.0) -> torch.Tensor:
        x = torch.empty((rows, width), dtype=config.dtype, device=config.device)
        return x.normal_(0.0, size, generator=generator)

    hidden, inner = SHAPE.hidden, SHAPE.intermediate
    gate_up = draw(EXPERTS * 2 * inner, hidden, hidden**-0.5)
    down = draw(EXPERTS * hidden, inner, inner**-0.5)
    x_TC, logits_TE = draw(tokens, hidden), draw(tokens, EXPERTS).float()
    if fp8:
        return x_TC, logits_TE, quantise_rows(gate_up), quantise_rows(down)
    return x_TC, logits_TE, gate_up, down


def _prepare(config: BenchConfig, fp8: bool, tokens: int) -> Timed:
    given = _draw(config, fp8, tokens)
    flops = 2.0 * tokens * CHOSEN * 3 * SHAPE.hidden * SHAPE.intermediate
    return Timed(partial(kernel_mixture, *given, ROUTER), flops=flops)


def _check(config: BenchConfig, fp8: bool) -> None:
    """Compare the kernel, with every tile size, with torch's GEMMs for one expert after the other."""
    for tokens in TOKENS:
        given = _draw(config, fp8, tokens)
        found_TC = kernel_mixture(*given, ROUTER).float()
        wanted_TC = cpu_mixture(*given, ROUTER).float()
        error = float(((found_TC - wanted_TC).norm(dim=1) / wanted_TC.norm(dim=1)).max())
        if not error < LARGEST_ERROR[fp8]:
            raise AssertionError(f"a row of {tokens} is {error:.3f} from torch's")
