"""Launches the attention kernel that takes the device and the inputs: plain Triton or Hopper."""

from deltafront.kernels.attention.flash import launch_plain
from deltafront.kernels.attention.hopper import launch as hopper
from deltafront.kernels.attention.inputs import PackedKeys, QueryRows, check_launch
from deltafront.kernels.interface import AttentionInput, TileMask


def launch(
    x: AttentionInput,
    rows: QueryRows,
    tail: QueryRows | None = None,
    *,
    mask: TileMask | None = None,
    packed: PackedKeys | None = None,
    window: int = 0,
) -> None:
    """Attend with `rows` to the mask's tiles, to packed and then exact keys, or to every key without either.

    Args:
        tail: More rows, in steps of 1, that see every key; on Hopper in the same launch.
        window: How many of the last keys a row sees, its own included; 0: all.
    """
    check_launch(x)
    if not window and hopper.takes(x, rows) and (tail is None or hopper.takes(x, tail)):
        hopper.launch(x, rows, tail, mask=mask, packed=packed)
        return
    launch_plain(x, rows, mask=mask, packed=packed, window=window)
    if tail is not None:
        launch_plain(x, tail)
