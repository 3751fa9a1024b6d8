"""Tests each block's largest share of attention: the CPU version and the kernel against the oracle. On a GPU
the same tests run the compiled kernel, and a long prompt's."""

from __future__ import annotations

import pytest
import torch

from deltafront.kernels import block_mass
from deltafront.kernels.constants import BLOCK
from deltafront.tests.numerics import poisoned_empty, synchronising_raises
from deltafront.tests.reference.selection import block_log_sums, largest_shares

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = (torch.float32, torch.float16, torch.bfloat16) if GPU else (torch.float32, torch.float16)
"""Triton's interpreter multiplies no bfloat16."""
CLOSE = {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 1e-3}
"""The largest error of a logarithm. Tensor cores align the products of a sum to the largest one, and drop
lower bits. A key too many or too few in a block changes its logarithm by about 1 / 128."""
SHAPES = {
    # tokens, KV heads, query heads of each, D, keys
    "one row": (1, 1, 1, 64, 2 * BLOCK),
    "a key in the last block": (5, 2, 4, 128, 2 * BLOCK + 1),
    "fewer keys than a block": (3, 8, 1, 64, 100),
    "two row tiles": (37, 1, 4, 128, BLOCK + 77),
    "seven heads": (19, 2, 7, 64, 3 * BLOCK),
    "256 channels": (3, 1, 4, 256, 2 * BLOCK + 70),
    "16 channels": (5, 2, 2, 16, 4 * BLOCK + 17),
}


def drawn(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: str = DEVICE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw q_THD and k_GSD as a decode worker has them: q is a question's last rows, k a part of a view of
    token-major rows."""
    tokens, groups, per_group, dim, keys = shape
    generator = torch.Generator().manual_seed(sum(shape))
    q = 2 * torch.randn(tokens + 3, groups * per_group, dim, generator=generator)
    k_SGD = torch.randn(keys + 9, groups, dim, generator=generator)
    q_THD, k_GSD = q.to(device, dtype)[-tokens:], k_SGD.to(device, dtype).transpose(0, 1)
    return q_THD, k_GSD[:, :keys]


def by_token(lse_GXM: torch.Tensor, tokens: int) -> torch.Tensor:
    groups, _, blocks = lse_GXM.shape
    return lse_GXM.reshape(groups, tokens, -1, blocks).transpose(0, 1).flatten(1, 2).cpu()


@pytest.mark.parametrize("programs", [1, block_mass._PROGRAMS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_block_mass_kernel_equals_the_oracle_in_every_row(
    name: str, dtype: torch.dtype, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_mass, "_PROGRAMS", programs)
    q_THD, k_GSD = drawn(SHAPES[name], dtype)
    with poisoned_empty():
        lse_GXM = block_mass.kernel_log_sums(q_THD, k_GSD)
    assert lse_GXM.dtype == torch.float32
    want_THM = block_log_sums(q_THD, k_GSD)
    found_THM = by_token(lse_GXM, len(q_THD))
    torch.testing.assert_close(found_THM, want_THM.float(), atol=CLOSE[dtype], rtol=0)


@pytest.mark.parametrize("at_once", [block_mass.KEYS_AT_ONCE, BLOCK])
@pytest.mark.parametrize("name", SHAPES)
def test_block_mass_is_the_largest_share_of_any_row_and_head(
    name: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_mass, "KEYS_AT_ONCE", at_once)
    q_THD, k_GSD = drawn(SHAPES[name], torch.float32, "cpu")
    want_M = largest_shares(block_log_sums(q_THD, k_GSD))
    torch.testing.assert_close(block_mass.attention_by_block(q_THD, k_GSD), want_M.float())


def test_block_mass_takes_queries_of_another_dtype_than_keys() -> None:
    q_THD, k_GSD = drawn(SHAPES["two row tiles"], torch.float16)
    with poisoned_empty():
        found, want = (block_mass.kernel_log_sums(q, k_GSD) for q in (q_THD.float(), q_THD))
    assert torch.equal(found, want)


@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("groups", "per_group", "dim"), [(8, 4, 128), (2, 7, 64), (1, 4, 256)])
def test_block_mass_of_a_long_prompt_equals_the_cpu_version(
    groups: int, per_group: int, dim: int, dtype: torch.dtype
) -> None:
    q_THD, k_GSD = drawn((64, groups, per_group, dim, 20_011), dtype)
    block_mass.attention_by_block(q_THD, k_GSD)  # compiles
    with poisoned_empty(), synchronising_raises():
        mass_M = block_mass.attention_by_block(q_THD, k_GSD)
    want_M = block_mass.attention_by_block(q_THD.cpu().float(), k_GSD.cpu().float())
    torch.testing.assert_close(mass_M.cpu(), want_M, rtol=CLOSE[dtype], atol=1e-7)
