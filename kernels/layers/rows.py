import torch

from deltafront.kernels.interface import KernelInputError


def check_rows(name: str, **rows: torch.Tensor) -> None:
    """Check that tensors are matrices of one shape, dtype and device, with contiguous rows."""
    first = next(iter(rows.values()))
    for key, x in rows.items():
        if x.dim() != 2 or x.shape != first.shape:
            raise KernelInputError(f"{name}: {key} is {tuple(x.shape)}, expected rows of {first.shape[-1]}")
        if x.dtype != first.dtype or x.device != first.device:
            raise KernelInputError(
                f"{name}: {key} is {x.dtype} on {x.device}, not {first.dtype} on {first.device}"
            )
        if x.stride(1) != 1:
            raise KernelInputError(f"{name}: {key}'s rows must be contiguous, stride is {x.stride(1)}")
