"""Cases that time selectors alone, from q and k to a TileMask, for a whole prompt in one call; and the choice
of blocks that a question attends to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from deltafront.benchmarks.harness import BenchConfig, Case, Timed
from deltafront.benchmarks.whole_prompt.flex import FlexSelector
from deltafront.benchmarks.whole_prompt.line_selector import LineSelector
from deltafront.benchmarks.whole_prompt.lines import cpu_line_masses
from deltafront.benchmarks.whole_prompt.lines_kernel import kernel_line_masses
from deltafront.benchmarks.whole_prompt.methods import FlexOptions, VerticalSlashOptions
from deltafront.benchmarks.whole_prompt.vertical_slash import VerticalSlashSelector
from deltafront.kernels.block_mass import attention_by_block, cpu_log_sums, kernel_log_sums
from deltafront.kernels.interface import AttentionInput, TileMask, no_phase
from deltafront.kernels.options import AnchorsOptions, AntidiagonalOptions
from deltafront.kernels.selectors.anchors.selector import AnchorsSelector
from deltafront.kernels.selectors.grouped.antidiagonal import AntidiagonalSelector
from deltafront.kernels.selectors.scored import ScoredSelector
from deltafront.tests.numerics import assert_rows_close, chunk_of, spec_of
from deltafront.tests.reference.structured import statistics
from deltafront.workers.model.decoder.recompute import QUESTION_ROWS

CHECKED_TOKENS = 4000
CHUNK_TOKENS = 1280


def cases(config: BenchConfig) -> list[Case]:
    """List the cases: each selector at `config.tokens` and at four times as many tokens. Selectors are
    checked first, with two head dimensions and in chunks."""
    check = partial(_check, config)
    check_lines = partial(_check_lines, config)
    ours = (("dpxa_selection", _dpxa), ("xattention_s8_selection", _xattention))
    baselines = (("vertical_slash_selection", _vertical_slash), ("flex_selection", _flex))
    return [
        *(
            Case(name, tokens, partial(_prepare, config, make, tokens), check)
            for tokens in (config.tokens, 4 * config.tokens)
            for name, make in ours
        ),
        *(
            Case(name, config.tokens, partial(_prepare, config, make, config.tokens), check_lines)
            for name, make in baselines
        ),
        *_question_cases(config),
    ]


def _question_cases(config: BenchConfig) -> list[Case]:
    """List the cases of a question's attention to blocks: in torch, whose function takes any device, and with
    our kernel."""
    prepare, check = partial(_prepare_question, config), partial(_check_question, config)
    torch_name = "question_blocks_torch"
    return [
        Case(torch_name, config.tokens, partial(prepare, cpu_log_sums), check),
        Case("question_blocks", config.tokens, partial(prepare, attention_by_block), check, over=torch_name),
    ]


def _prepare_question(
    config: BenchConfig, run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> Timed:
    x = config.structured(config.tokens, config.q_heads, config.kv_heads, config.head_dim)
    q_THD, k_GSD = x.q_BHTD[0, :, -QUESTION_ROWS:].transpose(0, 1).contiguous(), x.k_BGSD[0]
    note = f"{QUESTION_ROWS} tokens, one layer"
    return Timed(partial(run, q_THD, k_GSD), flops=2 * q_THD.numel() * config.tokens, note=note)


def _check_question(config: BenchConfig) -> None:
    for heads, groups, dim in ((8, 2, 128), (9, 3, 64), (4, 1, 256)):
        x = config.structured(CHECKED_TOKENS, heads, groups, dim)
        q_THD, k_GSD = x.q_BHTD[0, :, -QUESTION_ROWS:].transpose(0, 1), x.k_BGSD[0]
        expected_GXM = cpu_log_sums(q_THD.float(), k_GSD.float())
        assert_rows_close(kernel_log_sums(q_THD, k_GSD), expected_GXM)


def _dpxa() -> ScoredSelector:
    return AnchorsSelector(AnchorsOptions(tau=0.9, outside=False, window=1))


def _xattention() -> ScoredSelector:
    return AntidiagonalSelector(AntidiagonalOptions(tau=0.9, stride=8))


def _vertical_slash() -> LineSelector:
    return VerticalSlashSelector(VerticalSlashOptions())


def _flex() -> LineSelector:
    return FlexSelector(FlexOptions())


def _prepare(config: BenchConfig, make: Callable[[], ScoredSelector | LineSelector], tokens: int) -> Timed:
    x = config.structured(tokens, config.q_heads, config.kv_heads, config.head_dim)
    selector = make()
    torch.cuda.reset_peak_memory_stats(config.device)
    before = torch.cuda.memory_allocated(config.device)
    state: Any = selector.new_state(spec_of(x))
    mask = selector.select(x, state, no_phase)
    peak = (torch.cuda.max_memory_allocated(config.device) - before) / 2**30
    batch, heads = x.q_BHTD.shape[:2]
    causal = batch * heads * x.key_blocks * (x.key_blocks + 1) / 2
    density = float(mask.count_BHN.double().sum()) / causal
    what = ", ".join(f"{name} {value:.3f}" for name, value in statistics(x).items())
    note = f"peak {peak:.2f} GiB with state and mask; {what}"

    def run() -> TileMask:
        if selector.name == "anchors":
            state.done = 0  # so that every run computes the anchors of the keys
        return selector.select(x, state, no_phase)

    return Timed(run, density=density, note=note)


def _check(config: BenchConfig) -> None:
    """Compare the kernels' scores in `config.dtype` with the CPU versions in fp32, row by row. Chunks must
    select the same tiles as the whole prompt. Queries and keys are FP8 numbers, since XAttention's kernel
    multiplies in FP8."""
    for heads, groups, dim in ((8, 2, 128), (9, 3, 64)):
        x = config.structured(CHECKED_TOKENS, heads, groups, dim)
        eight_bits = torch.float8_e4m3fn
        x = replace(
            x,
            q_BHTD=x.q_BHTD.to(eight_bits).to(config.dtype),
            k_BGSD=x.k_BGSD.to(eight_bits).to(config.dtype),
        )
        exact = replace(x, q_BHTD=x.q_BHTD.float(), k_BGSD=x.k_BGSD.float(), v_BGSD=x.v_BGSD.float())
        for selector in (_dpxa(), _xattention()):
            score_BHNM = selector.scores(x, selector.new_state(spec_of(x)), no_phase)
            expected_BHNM = selector.cpu_scores(exact, selector.new_state(spec_of(exact)), no_phase)
            assert_rows_close(score_BHNM, expected_BHNM, dtype=config.dtype, factor=2.0)
            _check_chunks(selector, x)


def _check_lines(config: BenchConfig) -> None:
    """Compare the masses of vertical and slash lines (MInference, FlexPrefill) in `config.dtype` with the CPU
    version in fp32, head by head."""
    for heads, groups, dim in ((8, 2, 128), (9, 3, 64)):
        x = config.structured(CHECKED_TOKENS, heads, groups, dim)
        for queries in (64, 128):
            expected = cpu_line_masses(x, queries)
            for found_BHM, wanted_BHM in zip(kernel_line_masses(x, queries), expected, strict=True):
                assert_rows_close(found_BHM, wanted_BHM, dtype=config.dtype)


def _check_chunks(selector: ScoredSelector, x: AttentionInput) -> None:
    whole = selector.select(x, selector.new_state(spec_of(x)), no_phase)
    state = selector.new_state(spec_of(x))
    tokens = x.q_BHTD.shape[2]
    for start in range(0, tokens, CHUNK_TOKENS):
        part = selector.select(chunk_of(x, start, min(start + CHUNK_TOKENS, tokens)), state, no_phase)
        first, blocks, columns = start // 128, *part.index_BHNM.shape[2:]
        count_BHN = whole.count_BHN[:, :, first : first + blocks]
        index_BHNM = whole.index_BHNM[:, :, first : first + blocks, :columns]
        listed = torch.arange(columns, device=count_BHN.device) < count_BHN[..., None]
        same = torch.equal(part.count_BHN, count_BHN) and not bool(
            ((part.index_BHNM != index_BHNM) & listed).any()
        )
        if not same:
            raise AssertionError(f"{selector.name}: the chunk at {start} selects other tiles than the whole")
