"""The tensor work of a decode worker, on one thread: prefill of appended text, first tokens, decode steps.

A decode step's inputs have fixed addresses, and its launches depend only on the batch's shape. Each step can
therefore replay a CUDA graph.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from deltafront.kernels.build import build
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.gated_delta.states import RowStates, SequenceStates, StepStates
from deltafront.kernels.interface import Attention, AttentionInput, StateSpec
from deltafront.kernels.layers.rope import KVRows
from deltafront.kernels.methods import method_spec
from deltafront.kernels.sampling.sample import add_top, sample
from deltafront.workers.decode.decode_attention import BatchRows, LayerPlan, StepAttention
from deltafront.workers.decode.reads import Read
from deltafront.workers.decode.step_rows import (
    Batch,
    LaunchedStep,
    Row,
    SampledToken,
    StepGraphs,
    StepRows,
    sampling_rows,
)
from deltafront.workers.kv.cache import PagedKVCache
from deltafront.workers.kv.pages.pool import PAGE_TOKENS, pages_for
from deltafront.workers.kv.pages.request_pages import PageCopy
from deltafront.workers.kv.pages.state_slots import SCRATCH
from deltafront.workers.kv.rolling_buffers import (
    RollingBuffers,
    SequenceBuffers,
    StepBuffers,
    make_states,
)
from deltafront.workers.kv.states import LinearStates
from deltafront.workers.messages.events import Token
from deltafront.workers.messages.requests import Sampling
from deltafront.workers.model.decoder.recompute import BlockAttention, BlockQueries, rows_of_blocks
from deltafront.workers.model.decoder.stack import AttentionCalls, LayerStack, no_states
from deltafront.workers.model.grammars import Mask
from deltafront.workers.settings import KVDtype

_RAGGED = 77
"""Maximum number of tokens that warm-up appends. Triton specialises no kernel on a divisor of it."""
_LOGIT_ROWS = 32
"""Number of rows of logits that are computed at once for `prompt_logprobs`, to bound memory."""
_AGAIN = 2
"""Number of blocks that warm-up recomputes. More blocks would compile no other kernel."""


@dataclass(frozen=True)
class ReadResult:
    """The result of a `Read`.

    Attributes:
        logits_V: Logits after the last token, if requested.
        blocks: The blocks that the last tokens attend to most, ascending.
        logprobs: The target tokens (`Read.targets`) with their log-probabilities.
    """

    logits_V: torch.Tensor | None = None
    blocks: Sequence[int] = ()
    logprobs: tuple[Token, ...] = ()


@dataclass(frozen=True)
class ReadPart:
    """Consecutive layers of a `Read` or a `Recompute`. Its parts run in order and share a unique `key`."""

    key: int
    layers: range


@dataclass(frozen=True)
class ReadStates:
    """The state slots of one `Read`.

    Attributes:
        first: The slot of the state before its first token; None: it is the sequence's first token.
        cuts: The slots for the states after a number of the sequence's tokens, ascending. The last is after
            the `Read`.
    """

    first: int | None
    cuts: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True)
class _Begun:
    """A `Read` or a `Recompute` whose first layers are computed.

    Its tensors stay on the device, since an upload could wait for copies of KV from host memory.

    Attributes:
        table_N: The request's page table; of a `Recompute`, the pages that its rows attend to.
        rows_T: The rows of the KV cache that it writes to.
        queries: Set if blocks are recomputed, whose rows come first.
    """

    hidden_TC: torch.Tensor
    positions_T: torch.Tensor
    table_N: torch.Tensor
    rows_T: torch.Tensor
    select_blocks: BlockAttention | None
    queries: BlockQueries | None = None


class DecodeRunner:
    """Runs a model, or one tensor-parallel rank's part of it, over a KV cache of `pages` pages.

    All ranks make the same calls in the same order, and each samples every token from the same logits.

    Args:
        max_batch: Maximum number of requests in a decode step.
        max_pages: Maximum number of pages of a request.
        state_slots: Number of slots for states, if the model has layers with a state.
    """

    def __init__(
        self,
        stack: LayerStack,
        plan: LayerPlan,
        *,
        pages: int,
        max_batch: int,
        max_pages: int,
        kv_dtype: KVDtype | None = None,
        state_slots: int = 0,
    ) -> None:
        model = stack.config
        self.stack = stack
        self.max_batch = max_batch
        self.asynchronous = stack.device.type == "cuda"
        """True if a launched step runs while the caller continues, as on a GPU."""
        self.scratch_page = pages
        self.cache = PagedKVCache(
            model.page_layers(range(model.layers)),
            model.kv_heads,
            model.head_dim,
            pages + 1,
            stack.dtype,
            stack.device,
            int8=kv_dtype == "int8",
            rank=stack.collectives.rank,
            ranks=stack.collectives.ranks,
        )
        layers, slots = range(model.layers), state_slots + 1
        self.states = make_states(model, layers, slots, stack.dtype, stack.device)
        """The states of linear attention, or rolling buffers; None if the model has neither."""
        self.cache.states = self.states
        self._rows = StepRows(max_batch, max_pages, model.vocab, self.scratch_page, stack.device)
        self._graphs: StepGraphs | None = None
        self._begun: dict[int, _Begun] = {}
        self._unchosen: tuple[Sequence[Row], Batch, torch.Tensor]
        self._plan = plan
        self._scale = model.head_dim**-0.5
        self._dense: Attention = build(method_spec("dense"), windows=model.windows)

    @property
    def any_token(self) -> Mask:
        return np.full(-(-self.stack.config.vocab // 32), -1, dtype=np.int32)

    @property
    def batch_sizes(self) -> Sequence[int]:
        """The batch sizes to which decode steps are padded, ascending."""
        return self._rows.sizes

    @torch.inference_mode()
    def first_tokens(
        self,
        logits: Sequence[object],
        rows: Sequence[Row],
        copies: Sequence[PageCopy] = (),
        masks: Sequence[Mask | None] = (),
    ) -> list[SampledToken]:
        """Copy the pages of `copies`, then sample each row's first token from its logits (float32 [V]).
        `masks` are as in `choose`.

        Greedy tokens of logits in host memory, where a stage's arrive, are chosen there. On a GPU that a
        stage shares, each of the small kernels and copies would wait for its turn. Sampled tokens are not:
        a CPU would sort the vocabulary for milliseconds.
        """
        if copies:
            self.copy_pages(copies)
        rows_V = [x if torch.is_tensor(x) else torch.as_tensor(np.asarray(x)) for x in logits]
        greedy = all(row.sampling.temperature <= 0 for row in rows)
        on_host = greedy and all(x.device.type == "cpu" for x in rows_V)
        device = rows_V[0].device if on_host else self.stack.device
        logits_RV = torch.stack([x.to(device, torch.float32) for x in rows_V])
        positions_R = torch.tensor([row.length for row in rows], device=device)
        sampling = sampling_rows(rows, logits_RV.shape[1], device, masks)
        ids_R, logprob_R = sample(logits_RV, sampling, positions_R)
        chosen = add_top(logits_RV, ids_R, logprob_R, _most_top(rows))
        return LaunchedStep(*chosen, [(0, 0)] * len(rows)).chosen()

    @torch.inference_mode()
    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy pages, and wait until all ranks have done so: then rank 0 may reuse the source pages."""
        for source, target in copies:
            self.cache.copy_page(source, target)
        if self.stack.collectives.ranks == 1:
            return
        # A sum of another dtype would have to be compiled at the first copy.
        self.stack.collectives.sum(torch.zeros(1, dtype=self.stack.dtype, device=self.stack.device))

    @torch.inference_mode()
    def append(
        self,
        pages: Sequence[int],
        step: Read,
        last: bool,
        copy: PageCopy | None = None,
        part: ReadPart | None = None,
        states: ReadStates | None = None,
    ) -> ReadResult:
        """Prefill the tokens of a `Read`. The KV of earlier tokens is in the pages.

        Args:
            last: True if the logits after the last token are wanted.
            copy: A page to copy first.
            part: The layers to compute; None: all. The runner keeps hidden states between the parts of a
                `Read`. The last part returns the result.
            states: The state slots, if the model has layers with a state.
        """
        cache, start, windows = self.cache, step.start, self.stack.config.windows
        if part is not None and part.layers.start:
            begun = self._begun.pop(part.key)
        else:
            if copy is not None:
                cache.copy_page(*copy)
            begun = self._begin(pages, step)
        table_N, rows_T, select_blocks = begun.table_N, begun.rows_T, begun.select_blocks
        buffers = self._read_buffers(step, states)

        def kv_rows(layer: int) -> KVRows:
            if buffers is not None and buffers.has(layer):
                return buffers.kv_rows(layer)
            return cache.kv_rows(layer, rows_T)

        def attend(layer: int, q_THD: torch.Tensor) -> torch.Tensor:
            if buffers is not None and buffers.has(layer):
                buffers.keep(layer)
                return self._attend_densely(layer, q_THD, *buffers.seen(), buffers.before)
            window = windows.get(layer)
            first = max(0, start + 1 - window) // PAGE_TOKENS if window else 0
            before = first * PAGE_TOKENS
            k_GSD, v_GSD = cache.gather(layer, table_N[first:], step.end - before)
            if select_blocks is not None and window is None:
                select_blocks.add(q_THD, k_GSD)
            return self._attend_densely(layer, q_THD, k_GSD, v_GSD, start - before)

        calls = AttentionCalls(kv_rows, attend, self._read_states(step, states) or no_states)
        hidden_TC = self._run(begun, calls, part)
        self._copy_states(states)
        if hidden_TC is None:
            return ReadResult()
        logits_V = self.stack.logits(hidden_TC[-1:])[0] if last else None
        blocks = () if select_blocks is None else select_blocks.most_attended(step.select_blocks)
        logprobs = self._logprobs(hidden_TC, step) if step.targets else ()
        self.wait()
        return ReadResult(logits_V, blocks, logprobs)

    def _run(self, begun: _Begun, calls: AttentionCalls, part: ReadPart | None) -> torch.Tensor | None:
        """Run the part's layers (None: all). Returns hidden_TC after the last layer. If more parts follow,
        keeps the hidden states for them, waits for the device, and returns None."""
        layers = self.stack.layers if part is None else part.layers
        hidden_TC = self.stack.run(begun.hidden_TC, begun.positions_T, calls, layers=layers)
        if part is None or layers.stop == self.stack.layers.stop:
            return hidden_TC
        self._begun[part.key] = replace(begun, hidden_TC=hidden_TC)
        self.wait()
        return None

    def _read_states(self, step: Read, states: ReadStates | None) -> Callable[[int], RowStates] | None:
        if not isinstance(self.states, LinearStates) or states is None:
            return None
        cache, first = self.states, states.first
        cuts = tuple((tokens - step.start, slots[0]) for tokens, slots in states.cuts.items())
        if first is None:
            first = cuts[-1][1]
            cache.clear(first)
        return lambda layer: SequenceStates(cache.layer(layer), first, cuts)

    def _read_buffers(self, step: Read, states: ReadStates | None) -> SequenceBuffers | None:
        if not isinstance(self.states, RollingBuffers) or states is None:
            return None
        cuts = ((tokens, slots[0]) for tokens, slots in states.cuts.items())
        return SequenceBuffers(self.states, step.start, step.end, states.first, cuts)

    def _copy_states(self, states: ReadStates | None) -> None:
        """Copy the states after a `Read` that belong into several slots."""
        if self.states is None or states is None:
            return
        for source, *others in states.cuts.values():
            self.states.take(others, self.states, source)

    def _logprobs(self, hidden_TC: torch.Tensor, step: Read) -> tuple[Token, ...]:
        """Compute the log-probabilities of `step.targets`, a few rows of logits at a time."""
        found = list[SampledToken]()
        for at in range(0, len(step.targets), _LOGIT_ROWS):
            ids = step.targets[at : at + _LOGIT_ROWS]
            logits_TV = self.stack.logits(hidden_TC[at : at + len(ids)])
            ids_T = torch.tensor(ids, dtype=torch.int64, device=self.stack.device)
            logprob_T = logits_TV.log_softmax(-1).gather(1, ids_T[:, None])[:, 0]
            chosen = add_top(logits_TV, ids_T, logprob_T, step.top)
            found += LaunchedStep(*chosen, [(0, 0)] * len(ids)).chosen()
        return tuple(
            Token(index=place, token_id=one.token, logprob=one.logprob, top=one.top)
            for place, one in enumerate(found, step.start + 1)
        )

    def forget_read(self, key: int) -> None:
        """Drop the hidden states of an unfinished `Read` or `Recompute`; unknown keys are ignored."""
        self._begun.pop(key, None)

    def _begin(self, pages: Sequence[int], step: Read) -> _Begun:
        packed = torch.tensor([*pages, *step.ids], dtype=torch.int32, device=self.stack.device)
        both = packed.to(torch.int64)  # int32 halves the bytes on a link that copies may occupy
        table_N, ids_T = both[: len(pages)], both[len(pages) :]
        select_blocks = None
        if step.select_blocks:
            select_blocks = BlockAttention(step.select_among, self.stack.collectives)
        rows_T = self.cache.rows_of(table_N, step.start, len(step.ids))
        positions_T = torch.arange(step.start, step.end, device=self.stack.device)
        return _Begun(self.stack.embed(ids_T), positions_T, table_N, rows_T, select_blocks)

    @torch.inference_mode()
    def recompute(
        self,
        pages: Sequence[int],
        blocks: Sequence[int],
        ids: Sequence[int],
        question: Read,
        last: bool,
        part: ReadPart | None = None,
    ) -> ReadResult:
        """Recompute the KV of whole blocks with dense attention, and prefill the question in the same pass.

        Args:
            blocks: At least one block before the question, ascending. `ids` are their tokens.
            last, part: As in `append`.
        """
        cache, recomputed = self.cache, len(ids)
        if part is not None and part.layers.start:
            begun = self._begun.pop(part.key)
        else:
            begun = self._begin_again(pages, blocks, ids, question)
        context_N, queries = begun.table_N, begun.queries
        assert queries is not None

        def kv_rows(layer: int) -> KVRows:
            return cache.kv_rows(layer, begun.rows_T)

        def attend(layer: int, q_THD: torch.Tensor) -> torch.Tensor:
            k_GSD, v_GSD = cache.gather(layer, context_N, len(context_N) * PAGE_TOKENS)
            blocks_PHD = queries.attend(layer, q_THD[:recomputed], k_GSD, v_GSD)
            window = self.stack.config.windows.get(layer)
            first = max(0, question.start + 1 - window) if window else 0
            seen, q_THD = slice(first, question.end), q_THD[recomputed:]
            asked_THD = self._attend_densely(
                layer, q_THD, k_GSD[:, seen], v_GSD[:, seen], question.start - first
            )
            return torch.cat([blocks_PHD, asked_THD])

        hidden_TC = self._run(begun, AttentionCalls(kv_rows, attend), part)
        if hidden_TC is None:
            return ReadResult()
        logits_V = self.stack.logits(hidden_TC[-1:])[0] if last else None
        self.wait()
        return ReadResult(logits_V, blocks)

    def _begin_again(
        self, pages: Sequence[int], blocks: Sequence[int], ids: Sequence[int], question: Read
    ) -> _Begun:
        device, own = self.stack.device, -(-question.end // BLOCK)
        asked = self._begin(pages, question)
        ids_P = torch.tensor(ids, dtype=torch.int64, device=device)
        positions_P = rows_of_blocks(blocks, device)
        rows_P = asked.table_N[positions_P // PAGE_TOKENS] * PAGE_TOKENS + positions_P % PAGE_TOKENS
        return _Begun(
            torch.cat([self.stack.embed(ids_P), asked.hidden_TC]),
            torch.cat([positions_P, asked.positions_T]),
            self._with_blocks(asked.table_N, blocks, own),
            torch.cat([rows_P, asked.rows_T]),
            None,
            BlockQueries(self.stack, blocks, own),
        )

    def _with_blocks(self, table_N: torch.Tensor, blocks: Sequence[int], own: int) -> torch.Tensor:
        """Return the pages of `own` blocks from the start, then those of `blocks` again. Pages that the table
        lacks at the end of the `own` blocks are not attended to."""
        per_block = BLOCK // PAGE_TOKENS
        pages_N = table_N[: own * per_block]
        lacking = own * per_block - len(pages_N)
        again = (table_N[block * per_block : (block + 1) * per_block] for block in blocks)
        return torch.cat([pages_N, table_N[:1].expand(lacking), *again])

    def wait(self) -> None:
        """Wait until a GPU has run what was launched."""
        if self.stack.device.type == "cuda":
            torch.cuda.current_stream(self.stack.device).synchronize()

    def _attend_densely(
        self, layer: int, q_THD: torch.Tensor, k_GSD: torch.Tensor, v_GSD: torch.Tensor, start: int
    ) -> torch.Tensor:
        q_BHTD = q_THD.transpose(0, 1)[None].to(k_GSD.dtype)
        sink_H = self.stack.sinks(layer)
        x = AttentionInput.of(q_BHTD, k_GSD[None], v_GSD[None], q_start=start, sink_H=sink_H)
        config = self.stack.config
        heads = config.q_heads, config.kv_heads, config.head_dim
        spec = StateSpec(1, *heads, k_GSD.shape[1], k_GSD.device, k_GSD.dtype, layer)
        out_BHTD, _coverage = self._dense.attend(x, self._dense.new_state(spec))
        return out_BHTD[0].transpose(0, 1).to(q_THD.dtype)

    def decode(self, rows: Sequence[Row]) -> list[SampledToken]:
        """Run one decode step, and wait for its tokens."""
        return self.launch(rows).chosen()

    def launch(self, rows: Sequence[Row], masks: Sequence[Mask | None] = ()) -> LaunchedStep:
        """Launch a decode step. If the next step has the same rows, it may be launched before this step's
        tokens are known.

        Args:
            masks: As in `choose`.
        """
        self._launch_forward(rows)
        return self._launch_choice(masks)

    def forward(self, rows: Sequence[Row]) -> None:
        """Launch a decode step up to its logits. `choose` must follow. The masks for `choose` depend on the
        previous step's tokens, which need not be known here."""
        self._launch_forward(rows)

    def choose(self, masks: Sequence[Mask | None]) -> LaunchedStep:
        """Launch the sampling of the step that `forward` has launched.

        Args:
            masks: For each row, a bit mask of the tokens that it may choose; None: all. Empty: no row has a
                mask.
        """
        return self._launch_choice(masks)

    @torch.inference_mode()
    def _launch_forward(self, rows: Sequence[Row]) -> None:
        batch = self._rows.batch(rows)
        logits_RV = self._forward(batch) if self._graphs is None else self._graphs.replay(batch)
        if self.states is not None:
            for row in rows:
                if row.boundary and (row.length + 1) % PAGE_TOKENS == 0:
                    self.states.take([row.boundary], self.states, row.state)
        self._unchosen = rows, batch, logits_RV

    @torch.inference_mode()
    def _launch_choice(self, masks: Sequence[Mask | None]) -> LaunchedStep:
        (rows, batch, logits_RV), count = self._unchosen, len(self._unchosen[0])
        lengths_R = batch.lengths_R[:count].add_(1)
        ids_R, logprob_R = sample(logits_RV[:count], self._rows.constrain(batch, masks), lengths_R)
        batch.ids_R[:count].copy_(ids_R)
        read = [self._plan.pages_read(row.length + 1, row.selects_pages) for row in rows]
        return LaunchedStep(*add_top(logits_RV[:count], ids_R, logprob_R, _most_top(rows)), read)

    def _forward(self, batch: Batch) -> torch.Tensor:
        positions_R = batch.lengths_R
        page_ids_R = batch.table_RP.gather(1, (positions_R // PAGE_TOKENS).to(torch.int64)[:, None])[:, 0]
        rows_R = page_ids_R.to(torch.int64) * PAGE_TOKENS + positions_R % PAGE_TOKENS
        selects_R = batch.selects_R if batch.shape.selects else None
        buffers = None
        if isinstance(self.states, RollingBuffers):
            buffers = StepBuffers(self.states, batch.states_R, positions_R, batch.table_RP.shape[1])
        rolling_RP = None if buffers is None else buffers.table_RP
        rows = BatchRows(batch.table_RP, positions_R + 1, selects_R, rolling_RP)
        step = StepAttention(self._plan, rows, self._scale, self.stack.collectives)

        def kv_rows(layer: int) -> KVRows:
            if buffers is not None and buffers.has(layer):
                return buffers.kv_rows(layer)
            return self.cache.kv_rows(layer, rows_R)

        def attend(layer: int, q_RHD: torch.Tensor) -> torch.Tensor:
            if buffers is not None and buffers.has(layer):
                return step.attend(layer, q_RHD, *buffers.layer(layer), sink_H=self.stack.sinks(layer))
            kv = *self.cache.layer(layer), self.cache.scales(layer)
            return step.attend(layer, q_RHD, *kv, sink_H=self.stack.sinks(layer))

        def row_states(layer: int) -> RowStates:
            assert isinstance(self.states, LinearStates), "only linear-attention layers ask"
            return StepStates(self.states.layer(layer), batch.states_R)

        calls = AttentionCalls(kv_rows, attend, row_states)
        hidden_RC = self.stack.run(self.stack.embed(batch.ids_R), positions_R, calls)
        return self.stack.logits(hidden_RC)

    @torch.inference_mode()
    def compile(self) -> None:
        """Compile the GEMMs of prefill, and on a GPU capture the CUDA graphs of decode steps. No step may
        run."""
        self.stack.compile_gemms()
        if not self.asynchronous:
            return
        self._graphs = StepGraphs(self._forward, self._rows.padding(self._plan.calibrated))


def _most_top(rows: Sequence[Row]) -> int:
    return max((row.sampling.top_logprobs for row in rows), default=0)


def warm_up(runner: DecodeRunner, tokens: int, selects_pages: bool) -> None:
    """Compile all kernels and capture the CUDA graphs of decode steps, before the first request.

    Args:
        tokens: The longest request in tokens.
        selects_pages: True if the worker has Δ-layers, which score pages for selection.
    """
    sampled = Sampling(temperature=1.0, top_p=0.9, top_k=50)
    batches = [(False,), (True,), (True, False)] if selects_pages else [(False,), (False, False)]
    runner.compile()
    key, ragged = 0, min(_RAGGED, tokens // 2)
    longest = tokens - ragged - 2  # two steps follow
    for length in sorted({min(100, longest), longest}):
        pages = (runner.scratch_page,) * pages_for(length + ragged + 2)
        question = Read(length, [0] * ragged)
        look = replace(question, select_blocks=_AGAIN, select_among=length)
        if runner.states is not None:
            look = question  # blocks of such a model cannot be recomputed
        states = ReadStates(SCRATCH, {look.end: (SCRATCH,)})
        result = runner.append(pages, look, last=True, states=states)
        if result.blocks:
            runner.recompute(pages, result.blocks, [0] * BLOCK * len(result.blocks), question, last=True)
        logits_V = result.logits_V
        for batch in batches:
            rows = []
            for selects, sampling in zip(batch[: runner.max_batch], (Sampling(), sampled), strict=False):
                key -= 1  # requests count upwards
                rows.append(Row(key, pages, length + ragged, 0, sampling, selects))
            runner.decode(rows)
            runner.decode(rows)
        for sampling in (Sampling(), Sampling(temperature=1.0), sampled):
            row = Row(0, pages, length + ragged, 0, sampling, False)
            for count in runner.batch_sizes:  # torch chooses kernels by the batch size
                runner.first_tokens([logits_V] * count, [row] * count)
                runner.first_tokens([logits_V] * count, [row] * count, (), [runner.any_token] * count)
