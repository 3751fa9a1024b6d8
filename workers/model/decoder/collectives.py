"""Collective operations over the tensor-parallel ranks of a decode worker.

All ranks make the same calls in the same order. NCCL only queues work on the device, so that CUDA graphs can
capture the calls.
"""

from typing import Any

import torch
import torch.distributed as dist

from deltafront.kernels.layers.norm import LinearInput, add_norm
from deltafront.kernels.layers.one_shot_reduce import OneShotAddNorm, OneShotReduce


class Collectives:
    """The collectives of a worker with a single rank: they return their inputs."""

    rank, ranks = 0, 1

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of `x` over ranks. `x` must be contiguous, and may be overwritten."""
        return x

    def max(self, x: torch.Tensor) -> torch.Tensor:
        """Return the elementwise maximum of `x` over ranks. `x` must be contiguous, and may be
        overwritten."""
        return x

    def add_norm(
        self,
        hidden_TC: torch.Tensor,
        update_TC: torch.Tensor | None,
        weight_C: torch.Tensor,
        eps: float,
        fp8: bool,
    ) -> tuple[torch.Tensor, LinearInput]:
        """Sum update_TC over ranks, then run `norm.add_norm`. update_TC must be contiguous."""
        return add_norm(hidden_TC, update_TC, weight_C, eps, fp8)

    def gather(self, x_TO: torch.Tensor) -> torch.Tensor:
        """Concatenate the columns of all ranks, in the order of ranks."""
        return x_TO


SINGLE_RANK = Collectives()


class GroupCollectives(Collectives):
    """Collectives over a process group (NCCL or gloo). Call `connect` first.

    `one_shots` reduce small tensors on GPUs.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self._connected: dist.ProcessGroup | None = None
        self._reduce: OneShotReduce | None = None
        self._add_norm: OneShotAddNorm | None = None

    def connect(
        self, group: dist.ProcessGroup, one_shots: tuple[OneShotReduce, OneShotAddNorm] | None = None
    ) -> None:
        self._connected = group
        self._reduce, self._add_norm = one_shots or (None, None)

    @property
    def _group(self) -> dist.ProcessGroup:
        if self._connected is None:
            raise RuntimeError(f"rank {self.rank} has not joined the {self.ranks} ranks of its worker")
        return self._connected

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return self._reduced(x, dist.ReduceOp.SUM)

    def max(self, x: torch.Tensor) -> torch.Tensor:
        return self._reduced(x, dist.ReduceOp.MAX)

    def add_norm(
        self,
        hidden_TC: torch.Tensor,
        update_TC: torch.Tensor | None,
        weight_C: torch.Tensor,
        eps: float,
        fp8: bool,
    ) -> tuple[torch.Tensor, LinearInput]:
        if update_TC is not None:
            if self._add_norm is not None and self._add_norm.takes(update_TC):
                return self._add_norm(hidden_TC.contiguous(), update_TC, weight_C, eps, fp8)
            update_TC = self.sum(update_TC)
        return add_norm(hidden_TC, update_TC, weight_C, eps, fp8)

    def gather(self, x_TO: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x_TO) for _ in range(self.ranks)]
        self._group.allgather([parts], [x_TO.contiguous()]).wait()
        return torch.cat(parts, dim=1)

    def _reduced(self, x: torch.Tensor, operation: Any) -> torch.Tensor:
        if self._reduce is not None and self._reduce.takes(x):
            return self._reduce(x, maximum=operation == dist.ReduceOp.MAX)
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        self._group.allreduce([x], options).wait()
        return x
