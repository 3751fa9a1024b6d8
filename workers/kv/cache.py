"""The paged KV cache of a range of layers.

A layer's slice [pages, page_tokens, kv_heads, head_dim] is FlashInfer's "NHD" layout. Decode kernels read it
in place. An 8-bit cache (`kernels.layers.kv_int8`) has a scale for each row of head_dim channels, in separate
tensors. KV is therefore a tuple of two tensors (k, v) or four (k, v, k's scales, v's scales), called its
sides. Shape suffixes also: R token slots of all pages.
"""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from deltafront.kernels.layers.kv_int8 import BYTES, Scales
from deltafront.kernels.layers.kv_int8 import gather as gather_int8
from deltafront.kernels.layers.rope import KVRows
from deltafront.workers.kv.pages.pool import PAGE_TOKENS, first_of_run, pages_for

if TYPE_CHECKING:
    from deltafront.workers.kv.states import StateCache

Sides = tuple[torch.Tensor, ...]
"""KV tensors of some tokens: k and v, [tokens, kv_heads, head_dim], in 8 bits also scales, [tokens,
kv_heads]."""


class KVCacheError(ValueError):
    """An access is outside the cache or the page table."""


class PagedKVCache:
    """The KV cache of a range of layers. It is zeroed, so that unwritten slots are finite numbers.

    Args:
        layers: Indices in the model of the layers that attend, ascending. A stage may have none.
        kv_heads: Number of KV heads of this tensor-parallel rank.
        dtype: The model's dtype.
        int8: True if KV is stored in 8 bits.
    """

    def __init__(
        self,
        layers: Sequence[int],
        kv_heads: int,
        head_dim: int,
        pages: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        int8: bool = False,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        if list(layers) != sorted(set(layers)):
            raise KVCacheError(f"layers must ascend, got {layers}")
        self.model_heads = kv_heads * ranks
        """Number of KV heads of all ranks."""
        self.heads = slice(rank * kv_heads, (rank + 1) * kv_heads)
        """This rank's slice of the model's KV heads."""
        shape = (len(layers), pages, PAGE_TOKENS, kv_heads, head_dim)
        self.memory = secrets.token_hex(8)
        """A random name of this memory. In a process that maps the memory, the cache has the same name."""
        self.layers = _as_range(layers)
        self.device = torch.device(device)
        self.model_dtype = dtype
        stored = BYTES if int8 else dtype
        self.k_LPSGD = _zeros(shape, stored, self.device)
        self.v_LPSGD = _zeros(shape, stored, self.device)
        self.k_scale_LPSG = _zeros(shape[:-1], BYTES, self.device) if int8 else None
        self.v_scale_LPSG = _zeros(shape[:-1], BYTES, self.device) if int8 else None
        self.states: StateCache | None = None
        """The states beside these pages. A stage that maps the pages maps them, too."""
        self._arrivals = _arrivals(self.device)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_arrivals": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._arrivals = _arrivals(self.device)

    @property
    def kv_heads(self) -> int:
        return self.k_LPSGD.shape[3]

    @property
    def head_dim(self) -> int:
        return self.k_LPSGD.shape[4]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which k and v are stored; uint8 if `int8`."""
        return self.k_LPSGD.dtype

    @property
    def sides(self) -> Sides:
        """The cache's tensors, each [layers, pages, page_tokens, …]."""
        if self.k_scale_LPSG is None or self.v_scale_LPSG is None:
            return self.k_LPSGD, self.v_LPSGD
        return self.k_LPSGD, self.v_LPSGD, self.k_scale_LPSG, self.v_scale_LPSG

    @property
    def int8(self) -> bool:
        return self.k_scale_LPSG is not None

    @property
    def pages(self) -> int:
        return self.k_LPSGD.shape[1]

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        index = self._index(layer)
        return self.k_LPSGD[index], self.v_LPSGD[index]

    def scales(self, layer: int) -> Scales | None:
        """Return views of a layer's scales, [pages, page_tokens, kv_heads]; None if the cache is not
        8-bit."""
        if self.k_scale_LPSG is None or self.v_scale_LPSG is None:
            return None
        index = self._index(layer)
        return Scales(self.k_scale_LPSG[index], self.v_scale_LPSG[index])

    def rows(self, layer: int) -> Sides:
        """Return a layer's tensors as views k_RGD, v_RGD, in 8 bits also the scales k_RG, v_RG.

        Slot s of page p is row p · page_tokens + s.
        """
        index = self._index(layer)
        return tuple(side[index].flatten(0, 1) for side in self.sides)

    def kv_rows(self, layer: int, rows_T: torch.Tensor) -> KVRows:
        """Return a layer's cache tensors with the rows `rows_T` to which its new K and V are written."""
        k_RGD, v_RGD, *scales = self.rows(layer)
        return KVRows(k_RGD, v_RGD, rows_T, Scales(*scales) if scales else None)

    def rows_of(self, pages: torch.Tensor, start: int, tokens: int) -> torch.Tensor:
        """Return the rows (rows_T, int64, on the device) of tokens start .. start+tokens-1 of a sequence.

        Args:
            pages: The sequence's page table (1-D, int32/int64). Each call copies a table that is on another
                device.
        Raises:
            KVCacheError: The table is too short.
        """
        if start < 0 or start + tokens > pages.numel() * PAGE_TOKENS:
            raise KVCacheError(
                f"tokens {start} .. {start + tokens - 1} do not fit the {pages.numel()} pages of the sequence"
            )
        positions_T = torch.arange(start, start + tokens, device=self.device)
        page_ids_T = pages.to(self.device, torch.int64)[positions_T // PAGE_TOKENS]
        return page_ids_T * PAGE_TOKENS + positions_T % PAGE_TOKENS

    def rows_of_run(self, first_page: int, start: int, tokens: int) -> torch.Tensor:
        """Return the rows of tokens start .. start+tokens-1 in contiguous pages that begin at
        `first_page`."""
        rows = self._span(first_page, start, tokens)
        return torch.arange(rows.start, rows.stop, device=self.device)

    def write(self, layer: int, pages: torch.Tensor, start: int, *sides_T: torch.Tensor) -> None:
        """Store KV of tokens start .. start+T-1 of one sequence. The tensors must have the cache's dtypes."""
        self._put(layer, self.rows_of(pages, start, sides_T[0].shape[0]), sides_T)

    def gather(self, layer: int, pages: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the first `tokens` tokens of a sequence. Return k_GSD and v_GSD in the model's dtype. They are
        views of token-major tensors, the layout of pages; from an 8-bit cache they are contiguous."""
        needed = -(-tokens // PAGE_TOKENS)
        if not 0 < tokens <= pages.numel() * PAGE_TOKENS:
            raise KVCacheError(f"{tokens} tokens asked of a sequence of {pages.numel()} pages")
        if self.int8:
            return self.gather_rows(layer, self.rows_of(pages, 0, tokens))
        table_N = pages[:needed].to(self.device, torch.int64)
        k_PSGD, v_PSGD = self.layer(layer)
        return _dense(k_PSGD, table_N, tokens), _dense(v_PSGD, table_N, tokens)

    def gather_rows(self, layer: int, rows_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the KV in these rows of an 8-bit cache into contiguous k_GSD, v_GSD in the model's dtype."""
        k_RGD, v_RGD, k_RG, v_RG = self.rows(layer)
        return gather_int8((k_RGD, v_RGD), Scales(k_RG, v_RG), rows_S, self.model_dtype)

    def write_run(self, layer: int, first_page: int, start: int, *sides_T: torch.Tensor) -> None:
        """Store KV of tokens start .. start+T-1 in contiguous pages, with plain copies."""
        own = self.sides_of_run(layer, first_page, start, sides_T[0].shape[0])
        for side_T, given_T in zip(own, sides_T, strict=True):
            side_T.copy_(given_T)

    @torch.inference_mode()
    def write_layers(
        self,
        pages: Sequence[int],
        start: int,
        layers: Mapping[int, Sides],
        after: Any = None,
    ) -> None:
        """Store received KV of one or more layers, from token `start` on, and wait until it is written.

        The KV may be in host memory. If the pages are contiguous, the GPU's copy engine copies it, which
        delays no other process on the GPU.

        Args:
            after: A CUDA event to wait for first.
        Raises:
            KVCacheError: The tokens do not fit the pages, or a layer is not in this cache. Nothing is
                written.
        """
        for layer in layers:
            self._index(layer)
        tokens = next(iter(layers.values()))[0].shape[0]
        first, inside = divmod(start, PAGE_TOKENS)
        count = pages_for(inside + tokens)
        touched = pages[first : first + count] if start >= 0 else ()
        run = first_of_run(touched) if len(touched) == count else None
        with self.moving(after):
            if run is not None:
                for layer, sides_T in layers.items():
                    self.write_run(layer, run, inside, *sides_T)
                return
            table_N = torch.tensor(pages, dtype=torch.int64, device=self.device)
            for layer, sides_T in layers.items():
                self.write(layer, table_N, start, *(side_T.to(self.device) for side_T in sides_T))

    @torch.inference_mode()
    def read(self, layer: int, pages: Sequence[int], start: int, tokens: int) -> Sides:
        """Copy tokens start .. start+tokens-1 of a sequence to the host.

        Raises:
            KVCacheError: The tokens are not in the pages.
        """
        first, inside = divmod(start, PAGE_TOKENS)
        table = pages[first : first + pages_for(inside + tokens)]
        if start < 0 or tokens < 1 or inside + tokens > len(table) * PAGE_TOKENS:
            raise KVCacheError(
                f"tokens {start} .. {start + tokens - 1} are not in the {len(pages)} pages of the sequence"
            )
        table_N = torch.tensor(table, dtype=torch.int64, device=self.device)
        index = self._index(layer)
        with self.moving():
            return tuple(
                side[index]
                .index_select(0, table_N)
                .flatten(0, 1)[inside : inside + tokens]
                .cpu()
                .contiguous()
                for side in self.sides
            )

    @contextmanager
    def moving(self, after: Any = None) -> Iterator[None]:
        """Run the copies of a `with` block on the copy stream, and wait for them at its end.

        Args:
            after: A CUDA event to wait for first.
        """
        if self._arrivals is None:
            yield
            return
        if after is not None:
            self._arrivals.wait_event(after)
        with torch.cuda.stream(self._arrivals):
            yield
        self._arrivals.synchronize()

    def view_run(self, layer: int, first_page: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views k_GSD, v_GSD of a sequence's first tokens. The pages must be contiguous, and the cache
        must not be 8-bit."""
        k_SGD, v_SGD = self.sides_of_run(layer, first_page, 0, tokens)
        return k_SGD.transpose(0, 1), v_SGD.transpose(0, 1)

    def sides_of_run(self, layer: int, first_page: int, start: int, tokens: int) -> Sides:
        """Return views of the KV of tokens start .. start+tokens-1, in contiguous pages."""
        rows = self._span(first_page, start, tokens)
        return tuple(side_R[rows] for side_R in self.rows(layer))

    def sides_of(self, layer: int, rows_T: torch.Tensor) -> Sides:
        """Return copies of the KV in these rows of a layer."""
        return tuple(side_R.index_select(0, rows_T) for side_R in self.rows(layer))

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page in every layer. On a GPU the copy is only launched: keep both pages allocated until it
        is complete."""
        for side in self.sides:
            side[:, target].copy_(side[:, source])

    def _put(self, layer: int, rows_T: torch.Tensor, sides_T: Sides) -> None:
        for side_R, side_T in zip(self.rows(layer), sides_T, strict=True):
            side_R.index_copy_(0, rows_T, side_T.to(side_R.dtype))

    def _span(self, first_page: int, start: int, tokens: int) -> slice:
        first, room = first_page * PAGE_TOKENS, self.pages * PAGE_TOKENS
        if first < 0 or start < 0 or tokens < 1 or first + start + tokens > room:
            raise KVCacheError(
                f"tokens {start} .. {start + tokens - 1} from page {first_page} on do not fit the cache's"
                f" {self.pages} pages"
            )
        return slice(first + start, first + start + tokens)

    def _index(self, layer: int) -> int:
        if layer not in self.layers:
            raise KVCacheError(f"layer {layer} is not one of layers {', '.join(map(str, self.layers))}")
        return self.layers.index(layer)


def _as_range(layers: Sequence[int]) -> Sequence[int]:
    """Return the layers as a range if they are contiguous, so that equal layers have an equal `repr`."""
    whole = range(layers[0], layers[-1] + 1) if layers else range(0)
    return whole if len(whole) == len(layers) else tuple(layers)


def row_forms(kv_heads: int, head_dim: int, dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and dtype of one token's KV in each tensor of a cache of `dtype`."""
    forms: list[tuple[tuple[int, ...], torch.dtype]] = [((kv_heads, head_dim), dtype)] * 2
    return [*forms, *[((kv_heads,), BYTES)] * 2] if dtype == BYTES else forms


def token_bytes(kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of one token's KV in one layer, scales included."""
    return sum(prod(shape) * kind.itemsize for shape, kind in row_forms(kv_heads, head_dim, dtype))


def _dense(x_PSGD: torch.Tensor, table_N: torch.Tensor, tokens: int) -> torch.Tensor:
    rows_NSGD = x_PSGD.index_select(0, table_N)
    return rows_NSGD.flatten(0, 1)[:tokens].transpose(0, 1)


def _arrivals(device: torch.device) -> Any:
    """Make the CUDA stream for copies of received KV, so that these do not wait for computation."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros. On a CPU, numpy's calloc allocates no physical memory before the first write."""
    if device.type != "cpu" or not prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    size = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(shape)
