"""The states of a gated-delta layer, and which of them a call reads and writes.

Shape suffixes: S slots, W inputs of the convolution that a state keeps, E channels of the convolution,
H value heads, K channels of a key, D channels of a value, R rows.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerStates:
    """The states of one layer, one in each slot.

    Attributes:
        conv_SWE: The last W = width - 1 inputs of the causal convolution, oldest first, in the model's dtype.
        recurrent_SHKD: The recurrent state, float32.
    """

    conv_SWE: torch.Tensor
    recurrent_SHKD: torch.Tensor


@dataclass(frozen=True)
class SequenceStates:
    """Rows of one sequence, in order.

    Attributes:
        first: The slot of the state before the first row.
        cuts: Pairs of a number of rows and a slot, ascending by rows. After that many rows the state is
            written to the slot. The last pair has all rows. Slot `first` may be among them.
    """

    states: LayerStates
    first: int
    cuts: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class StepStates:
    """One row each of different sequences. Row r reads and writes the state in slot slots_R[r] (int64).

    Padding rows may share a slot whose state is never read.
    """

    states: LayerStates
    slots_R: torch.Tensor


RowStates = SequenceStates | StepStates
