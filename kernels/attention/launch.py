"""Launches the attention kernel that fits the device and the inputs: plain Triton or Hopper."""

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
    """Compute attention of `rows` over the mask's tiles, or over packed and exact keys. Without mask and
    packed keys, compute it over all causal keys.

    Args:
        tail: Further consecutive rows, computed densely. The Hopper kernel takes them in the same launch
            unless it splits keys.
        window: Sliding window in keys, including the row's own key. 0: no window.
    """
    check_launch(x)
    if not window and x.sink_H is None and hopper.takes(x, rows) and (tail is None or hopper.takes(x, tail)):
        hopper.launch(x, rows, tail, mask=mask, packed=packed)
        return
    launch_plain(x, rows, mask=mask, packed=packed, window=window)
    if tail is not None:
        launch_plain(x, tail)
