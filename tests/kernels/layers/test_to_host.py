"""Tests the kernel that writes sampled tokens to host memory."""

from __future__ import annotations

import pytest
import torch

from deltafront.kernels.interface import KernelInputError
from deltafront.kernels.layers.to_host import choices_to_host

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


@pytest.mark.parametrize("rows", [1, 2, 7, 128, 129])
def test_writes_ids_and_log_probabilities_to_the_host_exactly(rows: int) -> None:
    draws = torch.Generator().manual_seed(rows)
    ids_R = torch.randint(0, 1 << 40, (rows,), generator=draws)
    logprob_R = -torch.rand(rows, generator=draws) * 30
    logprob_R[0] = -torch.inf
    host_R2 = torch.full((rows + 1, 2), torch.nan, dtype=torch.float64, pin_memory=GPU)
    choices_to_host(ids_R.to(DEVICE), logprob_R.to(DEVICE), host_R2[:rows])
    if GPU:
        torch.cuda.synchronize()
    assert host_R2[:rows].tolist() == torch.stack((ids_R.double(), logprob_R.double()), dim=1).tolist()
    assert bool(host_R2[rows].isnan().all()), "nothing is written after the rows"


def test_refuses_ids_log_probabilities_and_buffers_that_do_not_match() -> None:
    ids_R, logprob_R = torch.zeros(2, dtype=torch.int64), torch.zeros(2)
    for bad in (torch.zeros(2, 2), torch.zeros(3, 2, dtype=torch.float64)):
        with pytest.raises(KernelInputError, match="are not ids, log-probabilities and room for both"):
            choices_to_host(ids_R, logprob_R, bad)
    with pytest.raises(KernelInputError, match="contiguous"):
        choices_to_host(ids_R, logprob_R, torch.zeros(2, 2, dtype=torch.float64).t())
