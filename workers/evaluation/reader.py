"""Prefills documents with one model in one process, in chunks and with any attention method, like a prefill
worker but without the service.

Shape suffixes are defined in `workers.model.decoder.stack` and `kernels.interface`; also L layers, P
recomputed rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch

from deltafront.kernels.attention.dense import DenseBackend
from deltafront.kernels.build import build, runs_a_block
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput, Phase, StateSpec, TileCounts, no_phase
from deltafront.kernels.layers.kv_int8 import dequantise, quantise
from deltafront.kernels.layers.rope import KVRows
from deltafront.workers.decode.reads import tail_start
from deltafront.workers.evaluation.sample_states import SampleStates
from deltafront.workers.evaluation.setting import parse_method
from deltafront.workers.model.calibrated.levels import thresholds_for
from deltafront.workers.model.calibrated.profile import Profile
from deltafront.workers.model.decoder.recompute import BlockAttention, BlockQueries, rows_of_blocks
from deltafront.workers.model.decoder.stack import AttentionCalls, LayerStack
from deltafront.workers.prefill.stage.phases import phase_timer
from deltafront.workers.settings import KVDtype


@dataclass(frozen=True)
class Reading:
    """The result of prefilling a document.

    Attributes:
        tail_TC: Hidden rows of the document's last positions.
        density: Share of causal tiles that prefill computed, over all layers with attention. Recomputed
            blocks and appended questions are not counted.
        milliseconds: Time of selection and attention in all layers and chunks: device time on a GPU,
            wall-clock time on a CPU.
        runs: Mean number of runs of similar keys in a block, by layer; None where the method finds none.
    """

    tail_TC: torch.Tensor
    density: float
    milliseconds: float
    runs: tuple[float | None, ...] = ()


class Reader:
    """A model's layers and the KV cache of one sequence.

    Args:
        room: Maximum length of the sequence in tokens.
        profile: The model's profile, for methods with the option `density`.
        kv_dtype: `int8` rounds K and V as int8 pages do, but stores them in the stack's dtype. None: no
            rounding.
        kv: k_LBGSD and v_LBGSD to use, L the layers with attention. None: allocate them.
        states: States of linear attention, and this sequence's place among them. None: allocate them.
    """

    def __init__(
        self,
        stack: LayerStack,
        room: int,
        profile: Profile | None = None,
        kv_dtype: KVDtype | None = None,
        kv: tuple[torch.Tensor, torch.Tensor] | None = None,
        states: tuple[SampleStates, int] | None = None,
    ) -> None:
        config = stack.config
        self._index = {layer: n for n, layer in enumerate(config.attention_layers(stack.layers))}
        shape = (len(self._index), 1, config.kv_heads, room, config.head_dim)
        self.stack = stack
        self._states, self._place = states or (SampleStates(stack, 1), 0)
        self.kv_dtype = kv_dtype
        self._profile = profile
        if kv is None:
            k_LBGSD = torch.zeros(shape, dtype=stack.dtype, device=stack.device)
            kv = k_LBGSD, torch.zeros_like(k_LBGSD)
        self._k_LBGSD, self._v_LBGSD = kv
        self._ids_T = torch.zeros(0, dtype=torch.int64)
        self.length = 0

    def read(self, ids: Sequence[int], method: str, chunk: int, tail: int = 1, *, after: int = 0) -> Reading:
        """Prefill a document with a method and return the hidden rows of its `tail` last positions.

        Args:
            after: A multiple of BLOCK. The first `after` tokens are already in the KV cache, prefilled with
                the same method, and only the tokens after them are prefilled.

        Raises:
            MethodError: The method is unknown, or the profile has no level for it.
            ValueError: The document has more tokens than the model has positions.
        """
        config, named = self.stack.config, parse_method(method)
        if len(ids) > config.positions:
            raise ValueError(f"{len(ids)} tokens, but the model has {config.positions} positions")
        self.length = after
        if not after:
            self._states.clear(self._place)
        self._ids_T = torch.tensor(ids, device=self.stack.device)
        attention = build(named, thresholds_for(self._profile, named), self.stack.config.windows)
        spec = StateSpec(
            1,
            config.q_heads,
            config.kv_heads,
            config.head_dim,
            len(ids),
            self.stack.device,
            self.stack.dtype,
        )
        states = {layer: attention.new_state(replace(spec, layer=layer)) for layer in self._index}
        timer, counts = phase_timer(self.stack.device), list[TileCounts]()
        tails: list[torch.Tensor] = []
        for first in range(after, len(ids), chunk):

            def attend(layer: int, q_BHTD: torch.Tensor, start: int = first) -> torch.Tensor:
                k_BGSD, v_BGSD = self._seen(layer, start + q_BHTD.shape[2])
                x = AttentionInput.of(
                    q_BHTD.contiguous(),
                    k_BGSD,
                    v_BGSD,
                    q_start=start,
                    prompt_tokens=len(ids),
                    sink_H=self.stack.sinks(layer),
                )
                out_BHTD, covered = attention.attend(x, states[layer], timer.phase)
                counts.append(covered)
                return out_BHTD

            hidden_TC = self._forward(ids[first : first + chunk], attend)
            tails = [rows_TC[-tail:] for rows_TC in (*tails, hidden_TC)]
        computed = torch.stack([covered.computed for covered in counts]).sum()
        density = float(computed) / sum(covered.causal for covered in counts)
        milliseconds = 1e3 * sum(timer.seconds().values())
        self._states.mark(self._place, "read")
        runs = (runs_a_block(states[layer]) if layer in states else None for layer in self.stack.layers)
        return Reading(torch.cat(tails)[-tail:], density, milliseconds, tuple(runs))

    def rewind(self) -> None:
        """Return the states of linear attention to the end of the document."""
        self._states.rewind(self._place, "read")

    def next_logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Append ids with full attention and return logits_V of the next token."""
        return self.stack.logits(self.append(ids)[-1:])[0]

    def end_again(self, reading: Reading, blocks: int) -> AbstractContextManager[Reading]:
        """Recompute the blocks that the end of the prompt attends to most, then prefill the end again,
        densely, like a decode worker with `recompute_blocks` (`decode.reads`).

        When the context manager exits, the recomputed blocks get their old KV back. The prompt's end keeps
        its new KV.

        Args:
            reading: The result of prefilling the whole prompt.

        Returns:
            A context with `reading` and the new hidden row of the last position.
        """
        whole = self._ids_T.tolist()
        start = tail_start(len(whole))
        return self._appended(reading, start, whole[start:], blocks)

    def asked(
        self, reading: Reading, question: Sequence[int], blocks: int
    ) -> AbstractContextManager[Reading]:
        """Append a question to a prefilled document, like a decode worker that appends text to a session.
        Arguments and result are those of `end_again`."""
        return self._appended(reading, len(self._ids_T), question, blocks)

    @contextmanager
    def _appended(self, reading: Reading, start: int, ids: Sequence[int], blocks: int) -> Iterator[Reading]:
        chosen = self._chosen(start, ids, blocks) if blocks else []
        with self.recomputed(chosen):
            self.length = start
            yield replace(reading, tail_TC=self.append(ids)[-1:])

    def _chosen(self, start: int, ids: Sequence[int], blocks: int) -> list[int]:
        """Prefill `ids` after the first `start` tokens. Return the numbers of the `blocks` blocks, at most,
        that they attend to most."""
        looks = BlockAttention(start)
        self.length = start
        self.append(ids, look=lambda layer, q_THD: looks.add(q_THD, self.document(layer)[0]))
        return looks.most_attended(blocks)

    def append(
        self, ids: Sequence[int], look: Callable[[int, torch.Tensor], None] | None = None
    ) -> torch.Tensor:
        """Prefill `ids` after the tokens so far, with dense attention, and return their hidden_TC. Call
        look(layer, q_THD) in every layer without a window, after the layer's keys are in the KV cache."""
        start = self.length

        def attend(layer: int, q_BHTD: torch.Tensor) -> torch.Tensor:
            rows = q_BHTD.shape[2]
            k_BGSD, v_BGSD = self._seen(layer, start + rows)
            window = self.stack.config.windows.get(layer, 0)
            if look is not None and not window:
                look(layer, q_BHTD[0].transpose(0, 1))
            x = AttentionInput.of(q_BHTD.contiguous(), k_BGSD, v_BGSD, sink_H=self.stack.sinks(layer))
            return DenseBackend(window=window).attend(x, None, None, no_phase)

        return self._forward(ids, attend)

    def kept(self, x: torch.Tensor) -> torch.Tensor:
        """Round keys or values [..., D] as pages of `kv_dtype` do: quantise and dequantise them."""
        return x if self.kv_dtype is None else dequantise(*quantise(x), x.dtype)

    def document(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of a layer's KV cache, k_GSD and v_GSD, of all tokens so far."""
        k_BGSD, v_BGSD = self._seen(layer, self.length)
        return k_BGSD[0], v_BGSD[0]

    @contextmanager
    def recomputed(self, blocks: Sequence[int], phase: Phase = no_phase) -> Iterator[None]:
        """Recompute the KV of these blocks (ascending) with dense attention over all tokens before them. The
        old KV returns when the `with` block ends. phase: Times the recomputation."""
        if not blocks:
            yield
            return
        rows_P = rows_of_blocks(blocks, self.stack.device)
        both = self._k_LBGSD, self._v_LBGSD
        before = [x_LBGSD[:, :, :, rows_P] for x_LBGSD in both]
        try:
            with phase("recompute"):
                self._recompute(blocks, rows_P)
            yield
        finally:
            for x_LBGSD, x_LBGPD in zip(both, before, strict=True):
                x_LBGSD[:, :, :, rows_P] = x_LBGPD

    def _recompute(self, blocks: Sequence[int], rows_P: torch.Tensor) -> None:
        """Compute the blocks' KV, layer by layer. New rows go to a separate buffer first, because layers
        write token by token and the document's KV cache is stored head by head."""
        config, stack = self.stack.config, self.stack
        shape = (len(rows_P), config.kv_heads, config.head_dim)
        k_PGD, v_PGD = (torch.empty(shape, dtype=stack.dtype, device=stack.device) for _ in "kv")
        fresh = KVRows(k_PGD, v_PGD, torch.arange(len(rows_P), device=stack.device))
        queries = BlockQueries(stack, blocks, own=blocks[-1])

        def placed(x_GSD: torch.Tensor, x_PGD: torch.Tensor) -> torch.Tensor:
            x_GPD = self.kept(x_PGD.transpose(0, 1))
            x_GSD.index_copy_(1, rows_P, x_GPD)
            return torch.cat([x_GSD[:, : blocks[-1] * BLOCK], x_GPD], dim=1)

        def attend(layer: int, q_PHD: torch.Tensor) -> torch.Tensor:
            k_GSD, v_GSD = (x_LBGSD[self._index[layer], 0] for x_LBGSD in (self._k_LBGSD, self._v_LBGSD))
            return queries.attend(layer, q_PHD, placed(k_GSD, k_PGD), placed(v_GSD, v_PGD))

        calls = AttentionCalls(lambda _layer: fresh, attend)
        stack.run(stack.embed(self._ids_T[rows_P]), rows_P, calls)

    def _forward(
        self, ids: Sequence[int], attend: Callable[[int, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        start, end = self.length, self.length + len(ids)

        def stored(layer: int, q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> torch.Tensor:
            for x_LBGSD, new_TGD in ((self._k_LBGSD, k_TGD), (self._v_LBGSD, v_TGD)):
                x_LBGSD[self._index[layer], 0, :, start:end] = self.kept(new_TGD).transpose(0, 1)
            out_BHTD = attend(layer, q_THD.transpose(0, 1)[None])
            return out_BHTD[0].transpose(0, 1)

        positions_T = torch.arange(start, end, device=self.stack.device)
        states = self._states.rows(self._place, start, len(ids))
        hidden_TC = self.stack.forward(
            self.stack.embed(torch.tensor(ids)), positions_T, stored, row_states=states
        )
        self.length = end
        return hidden_TC

    def _seen(self, layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        k_BGSD, v_BGSD = (x_LBGSD[self._index[layer]] for x_LBGSD in (self._k_LBGSD, self._v_LBGSD))
        return k_BGSD[:, :, :tokens], v_BGSD[:, :, :tokens]
