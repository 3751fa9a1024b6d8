"""The inputs of decode steps, in tensors that are allocated once; their CUDA graphs and results.

Shape suffixes: R requests of the batch, P columns of the page table.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from deltafront.kernels.layers.to_host import choices_to_host
from deltafront.kernels.sampling.sample import SamplingRows
from deltafront.workers.decode.sampling.row_options import AnswerSoFar, logit_options
from deltafront.workers.messages.events import TokenLogprob
from deltafront.workers.messages.requests import Sampling
from deltafront.workers.model.grammars import Mask

_NARROWEST = 512
"""Minimum number of columns of a narrowed page table: 8,192 tokens."""
_FACTOR = 4
"""Ratio of a page table's width to the next smaller width. Each column takes time to score and rank."""
_ROOM = 64
"""Minimum number of rows of a pinned buffer, so that torch reuses buffers of one size."""


@dataclass(frozen=True)
class Row:
    """A request's inputs to a decode step.

    Attributes:
        key: A number unique to the request.
        length: Number of tokens whose KV is in the pages.
        token: The last sampled token, at position `length`. The step writes its KV.
        so_far: Set if the sampling changes logits.
        state, boundary: The slots of the request's state and of its last page boundary's
            (`RequestStates`); 0: the model has none.
    """

    key: int
    pages: tuple[int, ...]
    length: int
    token: int
    sampling: Sampling
    selects_pages: bool
    so_far: AnswerSoFar | None = None
    state: int = 0
    boundary: int = 0


@dataclass(frozen=True)
class BatchShape:
    """The shape of a batch. A step's launches depend on nothing else. `columns`: width of the page table."""

    rows: int
    columns: int
    selects: bool

    @property
    def cells(self) -> int:
        return self.rows * self.columns * (1 + self.selects)


@dataclass(frozen=True)
class Batch:
    """Slices of the tensors in `StepRows`: the requests' rows, then padding rows up to `shape.rows`.

    Padding rows use the scratch page. `sampling` has no padding rows.
    """

    shape: BatchShape
    table_RP: torch.Tensor
    lengths_R: torch.Tensor
    ids_R: torch.Tensor
    selects_R: torch.Tensor
    states_R: torch.Tensor
    sampling: SamplingRows


class StepRows:
    """The input tensors of all decode steps. The host writes a row when its request joins the batch; each
    step updates token ids and lengths on the device.

    Batches are padded to a few sizes and page-table widths, so that each shape can have a CUDA graph. Without
    page selection, the widest table is used, since only page selection takes longer for a wider table.
    """

    def __init__(self, rows: int, pages: int, vocab: int, scratch_page: int, device: torch.device) -> None:
        self._vocab = vocab
        self._scratch_page = scratch_page
        self.sizes = [*(1 << n for n in range((rows - 1).bit_length())), rows]
        self._widths = _widths(pages)
        self.table_RP = torch.full((rows, self._widths[-1]), scratch_page, dtype=torch.int32, device=device)
        self.lengths_R = torch.zeros(rows, dtype=torch.int32, device=device)
        self.ids_R = torch.zeros(rows, dtype=torch.int64, device=device)
        self.selects_R = torch.zeros(rows, dtype=torch.int32, device=device)
        self.states_R = torch.zeros(rows, dtype=torch.int64, device=device)
        self.sampling = SamplingRows.room(rows, vocab, device)
        self._masked: set[int] = set()
        """Rows whose tokens are restricted by a mask."""
        self._keys: tuple[int, ...] = ()
        self._batch: Batch | None = None

    def batch(self, rows: Sequence[Row]) -> Batch:
        """Return the batch of these rows.

        Rows of the last batch's requests that come before any new one move on the device, since their tokens
        may be known only there. From the first new one on, rows are written.
        """
        keys = tuple(row.key for row in rows)
        if self._batch is None or keys != self._keys:
            before = {key: place for place, key in enumerate(self._keys)}
            kept = [before[key] for key in itertools.takewhile(before.__contains__, keys)]
            self._keys = ()  # if writing fails, all rows are written next time
            shape = self._shape(rows)
            self._move(kept)
            self._write(len(kept), rows[len(kept) :], shape.rows)
            self._batch, self._keys = self._view(shape, rows), keys
        return self._batch

    def constrain(self, batch: Batch, masks: Sequence[Mask | None]) -> SamplingRows:
        """Write the masks of allowed tokens, and return the batch's sampling parameters.

        Args:
            masks: One mask per row (None: all tokens are allowed), or empty.
        """
        if not masks:
            return batch.sampling
        for index in self._masked - {row for row, mask in enumerate(masks) if mask is not None}:
            self.sampling.allowed_RW[index] = -1
        self._masked = _write_masks(self.sampling, masks)
        return replace(batch.sampling, constrains=True)

    def padding(self, selecting: bool) -> Iterator[Batch]:
        """Yield a batch of padding rows in each shape. Overwrites the rows of requests.

        Args:
            selecting: Also yield the shapes that select pages.
        """
        self._batch, self._keys = None, ()
        self._write(0, [], self.sizes[-1])
        for rows in self.sizes:
            yield self._view(BatchShape(rows, self._widths[-1], False), [])
            for columns in self._widths if selecting else ():
                yield self._view(BatchShape(rows, columns, True), [])

    def _shape(self, rows: Sequence[Row]) -> BatchShape:
        size = next(size for size in self.sizes if size >= len(rows))
        if not any(row.selects_pages for row in rows):
            return BatchShape(size, self._widths[-1], False)
        pages = max(len(row.pages) for row in rows)
        return BatchShape(size, next(width for width in self._widths if width >= pages), True)

    def _move(self, places: Sequence[int]) -> None:
        """Move the rows at these places to the front."""
        first = next((place for place, before in enumerate(places) if place != before), len(places))
        if first == len(places):
            return
        places_R = torch.tensor(places[first:]).to(self.ids_R.device, non_blocking=True)
        chosen = self.sampling
        options = (chosen.drawn_R, chosen.temperature_R1, chosen.seed_R, chosen.top_k_R, chosen.top_p_R1)
        for x in (self.table_RP, self.lengths_R, self.ids_R, self.selects_R, self.states_R, *options):
            x[first : len(places)] = x[places_R]

    def _write(self, first: int, rows: Sequence[Row], end: int) -> None:
        if first == end:
            return
        self.table_RP[first:end] = self._scratch_page
        for index, row in enumerate(rows, first):
            # Copies of at most 64 KiB wait neither for a running step nor for copies of KV from host memory.
            pages_P = torch.tensor(row.pages, dtype=torch.int32)
            self.table_RP[index, : len(row.pages)].copy_(pages_P, non_blocking=True)
        none = [0] * (end - first - len(rows))
        for target, values in (
            (self.lengths_R, [row.length for row in rows]),
            (self.ids_R, [row.token for row in rows]),
            (self.selects_R, [int(row.selects_pages) for row in rows]),
            (self.states_R, [row.state for row in rows]),
        ):
            target[first:end].copy_(torch.tensor(values + none, dtype=target.dtype), non_blocking=True)
        if rows:
            _write_sampling(self.sampling, first, [row.sampling for row in rows], self._vocab)

    def _view(self, shape: BatchShape, rows: Sequence[Row]) -> Batch:
        return Batch(
            shape,
            self.table_RP[: shape.rows, : shape.columns],
            self.lengths_R[: shape.rows],
            self.ids_R[: shape.rows],
            self.selects_R[: shape.rows],
            self.states_R[: shape.rows],
            _written(self.sampling, rows, self._vocab),
        )


def _widths(pages: int) -> list[int]:
    widths = [max(16, 1 << (pages - 1).bit_length())]
    while widths[0] >= _FACTOR * _NARROWEST:
        widths.insert(0, widths[0] // _FACTOR)
    return widths


def sampling_rows(
    rows: Sequence[Row], vocab: int, device: torch.device, masks: Sequence[Mask | None] = ()
) -> SamplingRows:
    made = SamplingRows.room(len(rows), vocab, device)
    _write_sampling(made, 0, [row.sampling for row in rows], vocab)
    constrains = bool(_write_masks(made, masks))
    return replace(_written(made, rows, vocab), constrains=constrains)


def _write_masks(made: SamplingRows, masks: Sequence[Mask | None]) -> set[int]:
    """Write the masks of allowed tokens, and return the indices of rows that have one."""
    written = {index: mask for index, mask in enumerate(masks) if mask is not None}
    for index, mask in written.items():
        # CUDA takes at most 64 KiB immediately: the call waits neither for a running forward pass nor for
        # copies of KV from host memory.
        made.allowed_RW[index].copy_(torch.from_numpy(mask), non_blocking=True)
    return set(written)


def _write_sampling(made: SamplingRows, first: int, rows: Sequence[Sampling], vocab: int) -> None:
    for target, values in (
        (made.drawn_R, [row.temperature > 0 for row in rows]),
        (made.temperature_R1, [[row.temperature if row.temperature > 0 else 1.0] for row in rows]),
        (made.seed_R, [_signed(row.seed) for row in rows]),
        (made.top_k_R, [row.top_k if 0 < row.top_k < vocab else vocab for row in rows]),
        (made.top_p_R1, [[row.top_p] for row in rows]),
    ):
        value_R = torch.tensor(values, dtype=target.dtype)
        target[first : first + len(rows)].copy_(value_R, non_blocking=True)


def _written(made: SamplingRows, rows: Sequence[Row], vocab: int) -> SamplingRows:
    drawn = [row.sampling for row in rows if row.sampling.temperature > 0]
    filters = any(0 < row.top_k < vocab or row.top_p < 1 for row in drawn)
    options = logit_options([(row.sampling, row.so_far) for row in rows], vocab, made.seed_R.device)
    return replace(made.first(len(rows), draws=bool(drawn), filters=filters), options=options)


def _signed(seed: int) -> int:
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >= 1 << 63 else seed


@dataclass(frozen=True)
class SampledToken:
    """A request's next token and its log-probability.

    Attributes:
        pages_attended, pages_held: The pages that sparse layers attended to in this step, and the pages that
            hold their KV, both summed over these layers.
        top: The likeliest tokens; the row of the batch that asks for most sets their number.
    """

    token: int
    logprob: float
    pages_attended: int = 0
    pages_held: int = 0
    top: tuple[TokenLogprob, ...] = ()


class LaunchedStep:
    """A launched decode step. Its sampled tokens are being copied to the host.

    Args:
        ids_R, logprob_R: Results of `add_top`: for each row the sampled token, then the likeliest tokens, if
            any row asks for them.
        read: For each row, `SampledToken.pages_attended` and `pages_held`.
    """

    def __init__(self, ids_R: torch.Tensor, logprob_R: torch.Tensor, read: Sequence[tuple[int, int]]) -> None:
        self._read, count = read, len(ids_R)
        self._written: Any = None
        if ids_R.is_cuda:
            # Torch may reuse this buffer while an abandoned step still writes to it. The next step writes
            # later, since both run on one stream.
            self._chosen_R2 = torch.empty(max(count, _ROOM), 2, dtype=torch.float64, pin_memory=True)[:count]
            choices_to_host(ids_R, logprob_R, self._chosen_R2)
            self._written = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._written.record()
        else:
            self._chosen_R2 = torch.stack((ids_R.to(torch.float64), logprob_R.to(torch.float64)), dim=1)

    def chosen(self) -> list[SampledToken]:
        """Wait for this step, but not for later ones, and return its tokens."""
        if self._written is not None:
            self._written.synchronize()
        values = [(int(token), logprob) for token, logprob in self._chosen_R2.tolist()]
        each = len(values) // max(1, len(self._read))
        return [
            SampledToken(*values[row * each], *pages, top=_top(values[row * each + 1 : (row + 1) * each]))
            for row, pages in enumerate(self._read)
        ]


def _top(values: Sequence[tuple[int, float]]) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(token_id=token, logprob=logprob) for token, logprob in values)


class StepGraphs:
    """CUDA graphs, one for each batch shape.

    Each shape runs once before its capture, so that its kernels are loaded.

    Args:
        batches: One batch of every shape.
        forward: Returns a batch's logits_RV.

    Raises:
        RuntimeError: A capture failed.
    """

    def __init__(self, forward: Callable[[Batch], torch.Tensor], batches: Iterable[Batch]) -> None:
        self._graphs: dict[BatchShape, tuple[Any, torch.Tensor]] = {}
        pool = torch.cuda.graph_pool_handle()
        for batch in sorted(batches, key=lambda batch: batch.shape.cells, reverse=True):
            forward(batch)
            graph = torch.cuda.CUDAGraph()
            # Other threads may allocate memory meanwhile. Their work is not captured.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                logits_RV = forward(batch)
            self._graphs[batch.shape] = graph, logits_RV

    def __len__(self) -> int:
        return len(self._graphs)

    def replay(self, batch: Batch) -> torch.Tensor:
        """Replay the graph of the batch's shape. Returns logits_RV, which the next replay overwrites. Raises
        KeyError for an unknown shape."""
        graph, logits_RV = self._graphs[batch.shape]
        graph.replay()
        return logits_RV
