"""MInference's part of `parity`: its lines, its index of them, its block-sparse and its A-shape heads.

Their forward module runs as it is, head by head. Their CUDA kernel, which makes the index, is read from the
checkout at run time and compiled for the host. Shape suffixes as in `kernels.interface`; R rows of an index,
X its slots.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from deltafront.benchmarks.paper_forms.parity_rows import Compared, Rows, compared, ours, repeated, rows_of
from deltafront.benchmarks.whole_prompt.lines import (
    by_block,
    last_attention,
    single_line_masses,
    tiles_of_lines,
)
from deltafront.benchmarks.whole_prompt.vertical_slash import LAST_QUERIES
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput

FORCED_VERTICALS, FORCED_SLASHES = 30, 100
"""Lines that their code keeps whatever their mass: the first keys, the nearest distances. They count."""
Index = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""int32 block_count_R, block_offset_RX, column_count_R, column_index_RX of one head."""

_BEFORE = """
#include <algorithm>
using std::max;
using std::min;
#define __device__
#define __global__
static struct { int x, y, z; } blockIdx, threadIdx, blockDim = {1, 1, 1};
"""
_AFTER = """
extern "C" void index_of_head(const int* keys, const int* verticals, const int* slashes, int* block_count,
                              int* block_offset, int* column_count, int* column_index, int rows, int m, int n,
                              int nnz_v, int nnz_s) {
    for (blockIdx.z = 0; blockIdx.z < rows; blockIdx.z++)
        convert_vertical_slash_indexes_kernel(keys, verticals, slashes, block_count, block_offset,
                                              column_count, column_index, 1, rows, m, n, nnz_v, nnz_s);
}
"""


class HostIndex:
    """Their kernel `convert_vertical_slash_indexes_kernel`, one thread after another on the host.

    Args:
        source: Text of a .cu file. The text after the kernel only launches it and is left out.

    Raises:
        FileNotFoundError: there is no g++.
        subprocess.CalledProcessError: the file does not compile any more.
    """

    def __init__(self, source: str) -> None:
        kernel = source.split("void convert_vertical_slash_indexes_64x64(", maxsplit=1)[0]
        kernel = re.sub(r"(?m)^#include.*$", "", kernel)
        with tempfile.TemporaryDirectory() as folder:
            code, library = Path(folder, "index.cpp"), Path(folder, "index.so")
            code.write_text(_BEFORE + kernel + _AFTER)
            subprocess.run(["g++", "-O1", "-shared", "-fPIC", "-o", library, code], check=True)
            self._run = ctypes.CDLL(str(library)).index_of_head

    def __call__(
        self, vertical_X: torch.Tensor, slash_X: torch.Tensor, tokens: int, rows: int, keys: int
    ) -> Index:
        """The index of one head in blocks of rows x keys. Verticals ascend, slashes descend, both int32."""
        count, columns, diagonals = -(-tokens // rows), vertical_X.shape[0], slash_X.shape[0]
        found = [torch.zeros(count, slots, dtype=torch.int32) for slots in (1, diagonals, 1, columns)]
        given = [torch.tensor([tokens], dtype=torch.int32), vertical_X.contiguous(), slash_X.contiguous()]
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (*given, *found)]
        self._run(*pointers, count, rows, keys, columns, diagonals)
        return found[0][:, 0], found[1], found[2][:, 0], found[3]


def tiles_of_index(index: Index, rows: int, keys: int, blocks: int) -> torch.Tensor:
    """bool_NM: tiles of 128 that the blocks of rows x keys and the columns of an index touch."""
    block_count_R, offset_RX, column_count_R, column_RX = (part.long() for part in index)
    kept_RM = torch.zeros(offset_RX.shape[0], blocks + 1, dtype=torch.bool)
    ends = ((offset_RX, block_count_R), (offset_RX + keys - 1, block_count_R), (column_RX, column_count_R))
    for place_RX, count_R in ends:
        used_RX = torch.arange(place_RX.shape[1]) < count_R[:, None]
        kept_RM.scatter_(1, torch.where(used_RX, place_RX // BLOCK, blocks).clamp(max=blocks), True)
    return kept_RM[:, :blocks].reshape(-1, BLOCK // rows, blocks).any(1).tril()


# --- their modules -----------------------------------------------------------------------------------------

_PACKAGES = ("", ".ops", ".modules")
_MODULES = ("modules.minference_forward", "ops.block_sparse_flash_attention", "ops.streaming_kernel")


def _empty(name: str, **names: Any) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(names)
    return module


@contextmanager
def _without_cuda() -> Iterator[None]:
    """Without a GPU: what their code makes on "cuda" is made on the CPU."""
    if torch.cuda.is_available():
        yield
        return
    arange = torch.arange

    def here(*values: Any, device: Any = None, **how: Any) -> torch.Tensor:
        return arange(*values, device=None if device == "cuda" else device, **how)

    with mock.patch.object(torch, "arange", here), mock.patch.object(torch.cuda, "device", nullcontext):
        yield


def _modules(folder: Path) -> tuple[ModuleType, ModuleType, ModuleType]:
    """minference_forward, block_sparse_flash_attention and streaming_kernel. Triton's tuning needs a GPU and
    is left out."""
    names = {"math": math, "torch": torch, "nn": torch.nn}
    packages = {f"minference{part}": folder / f"minference{part.replace('.', '/')}" for part in _PACKAGES}
    available = mock.MagicMock(_is_package_available=lambda name: False)
    stubs: dict[str, Any] = {name: _empty(name, __path__=[str(path)]) for name, path in packages.items()}
    stubs |= {f"minference.modules.{name}": mock.MagicMock() for name in ("flexprefill", "quest")}
    stubs |= {f"minference.modules.{name}": _empty(name, **names) for name in ("kvcompression", "snapkv")}
    stubs |= {name: mock.MagicMock() for name in ("minference.cuda", "flash_attn", "transformers")}
    stubs |= {f"transformers.{name}": mock.MagicMock() for name in ("utils", "models.llama.modeling_llama")}
    stubs |= {"transformers.utils.import_utils": available}
    stubs |= dict.fromkeys(("sgl_kernel", "vllm", "vllm_flash_attn"))
    untuned = mock.patch("triton.autotune", lambda **how: lambda kernel: kernel)
    with mock.patch.dict(sys.modules, stubs), untuned, _without_cuda(), redirect_stdout(io.StringIO()):
        forward, blocks, streaming = (importlib.import_module(f"minference.{name}") for name in _MODULES)
    return forward, blocks, streaming


# --- vertical-slash heads ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lines:
    """The lines that their code chose for one head. vertical_X: keys. slash_X: distances. mass_LS: the last
    queries' attention."""

    vertical_X: torch.Tensor
    slash_X: torch.Tensor
    mass_LS: torch.Tensor


def their_lines(forward: ModuleType, x: AttentionInput, verticals: int, slashes: int) -> list[Lines]:
    """By query head, from `minference_prefill_kernel`; its kernels do not run."""
    q, k = repeated(x)
    found = []
    for h in range(q.shape[1]):
        config = {"best_pattern": [{str(h): ("vertical_and_slash", verticals, slashes, 1)}]}
        diagonals = mock.MagicMock(wraps=forward.sum_all_diagonal_matrix)
        changed = {"sum_all_diagonal_matrix": diagonals, "vertical_slash_sparse_attention": mock.MagicMock()}
        with mock.patch.multiple(forward, **changed):
            forward.minference_prefill_kernel(q[:, h, None], k[:, h, None], k[:, h, None], h, 0, config)
        chosen = changed["vertical_slash_sparse_attention"].call_args.args
        vertical_X, slash_X = (t.flatten().int().cpu() for t in chosen[3:5])
        mass_LS = diagonals.call_args.args[0][0, 0]
        found.append(Lines(vertical_X.sort().values, slash_X.sort(descending=True).values, mass_LS))
    return found


def as_minference(x: AttentionInput, verticals: int, slashes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """bool_HS of keys and of distances: our estimate with what their code does otherwise. Lines are single
    ones, and the forced ones are among those counted."""
    vertical_HS, slash_HS = (mass[0] for mass in single_line_masses(last_attention(x, LAST_QUERIES)))
    vertical_HS[:, :FORCED_VERTICALS] = torch.inf
    slash_HS[:, :FORCED_SLASHES] = torch.inf
    return _best(vertical_HS, verticals), _best(slash_HS, slashes)


def _best(mass_HS: torch.Tensor, count: int) -> torch.Tensor:
    order_HX = mass_HS.topk(min(count, mass_HS.shape[1]), dim=-1).indices
    return torch.zeros_like(mass_HS, dtype=torch.bool).scatter_(-1, order_HX, True)


def vertical_slash(
    forward: ModuleType, index: HostIndex, x: AttentionInput, verticals: int, slashes: int
) -> Iterator[Compared]:
    """The estimate, the lines, the tiles of these lines, and at last the tiles of `vertical_slash` itself.

    Raises:
        AssertionError: the last queries' attention is another.
    """
    theirs = their_lines(forward, x, verticals, slashes)
    torch.testing.assert_close(
        torch.stack([lines.mass_LS for lines in theirs]),
        last_attention(x, LAST_QUERIES)[0],
        rtol=1e-4,
        atol=1e-6,
    )
    named = f"MInference, {verticals} verticals and {slashes} slashes"
    vertical_HS, slash_HS = as_minference(x, verticals, slashes)
    yield compared(
        f"{named}: verticals", rows_of(vertical_HS), [set(one.vertical_X.tolist()) for one in theirs]
    )
    yield compared(f"{named}: slashes", rows_of(slash_HS), [set(one.slash_X.tolist()) for one in theirs])
    crossed_HNM = tiles_of_lines(by_block(vertical_HS.int()) > 0, by_block(slash_HS.int()) > 0)
    alike, mine = rows_of(crossed_HNM.tril()), ours(x, "vertical_slash", verticals=verticals, slashes=slashes)
    yield compared(f"{named}: tiles of their lines, index by rows", alike, _tiles(index, theirs, x, 1))
    yield compared(f"{named}: tiles of their lines, index by 64 rows", alike, _tiles(index, theirs, x, 64))
    yield compared(f"{named}: tiles", mine, _tiles(index, theirs, x, 64))


def _tiles(index: HostIndex, theirs: list[Lines], x: AttentionInput, size: int) -> Rows:
    """Tiles that their index touches, in blocks of size x size; size 1 is the lines themselves."""
    found: Rows = []
    for lines in theirs:
        blocks = index(lines.vertical_X, lines.slash_X, x.prompt_tokens, size, size)
        found += rows_of(tiles_of_index(blocks, size, size, x.key_blocks))
    return found


# --- the other heads ---------------------------------------------------------------------------------------


def block_sparse(module: ModuleType, x: AttentionInput, top: int) -> Iterator[Compared]:
    """Theirs force no block. Ours keep `top` beside sink and diagonal, so that rows are alike where `top`
    counts those of the two that theirs chose."""
    theirs = _their_blocks(module, x, top, BLOCK)
    mine = [ours(x, "minference_block_sparse", top=max(1, top - forced)) for forced in range(3)]
    both = [{0, n % x.query_blocks} for n in range(len(theirs))]
    counted = [mine[len(row & two)][n] for n, (row, two) in enumerate(zip(theirs, both, strict=True))]
    forced = [row | two for row, two in zip(theirs, both, strict=True)]
    named = f"MInference, {top} blocks"
    yield compared(f"{named}, forced ones counted", counted, forced)
    yield compared(named, mine[0], theirs)
    yield compared(f"{named}, theirs {2 * top} of 64", mine[0], _their_blocks(module, x, 2 * top, BLOCK // 2))


def _their_blocks(module: ModuleType, x: AttentionInput, top: int, size: int) -> Rows:
    """Tiles that their blocks of `size` x `size` touch. Their kernel reads as many of a row's blocks, in
    order, as are causal."""
    q, k = repeated(x)
    with mock.patch.object(module, "_triton_block_sparse_attention") as attention:
        module.block_sparse_attention(q, k, k, top, size, size)
    index_HNX = attention.call_args.args[4][0].long()
    rows = x.prompt_tokens // size
    kept_HNM = torch.zeros(index_HNX.shape[0], rows, index_HNX.shape[1], dtype=torch.bool, device=q.device)
    kept_HNM.scatter_(2, index_HNX[:, :rows], True)
    fine_HNM, per = kept_HNM[:, :, :rows].tril(), BLOCK // size
    return rows_of(fine_HNM.reshape(-1, rows // per, per, rows // per, per).any(4).any(2))


def a_shape(module: ModuleType, x: AttentionInput, sink: int, window: int) -> Compared:
    """All logits are 0 and each key's value names its tile, so that the output tells which tiles count."""
    tokens, blocks = x.prompt_tokens, x.key_blocks
    channels = max(16, 1 << (blocks - 1).bit_length())  # a head dimension that their kernel takes
    zero = torch.zeros(1, 1, tokens, channels, device=x.q_BHTD.device)
    value = torch.eye(channels, device=zero.device)[torch.arange(tokens, device=zero.device) // BLOCK]
    with _without_cuda():
        out_SM = module.streaming_forward(zero, zero, value[None, None], sink, window)[0, 0, :, :blocks]
    theirs = rows_of((out_SM > 0).reshape(blocks, BLOCK, blocks).any(1))
    mine = ours(x, "streaming", sink=sink, window=window)[: x.query_blocks]
    return compared(f"MInference, A-shape, sink {sink}, window {window}", mine, theirs)


def minference(folder: Path, x: AttentionInput) -> Iterator[Compared]:
    """Needs g++. The A-shape kernel needs Triton's interpreter or a GPU."""
    forward, blocks, streaming = _modules(folder)
    index = HostIndex((folder / "csrc" / "vertical_slash_index.cu").read_text())
    for verticals, slashes in ((50, 150), (100, 200)):
        yield from vertical_slash(forward, index, x, verticals, slashes)
    for top in (4, 8):
        yield from block_sparse(blocks, x, top)
    for sink, window in ((100, 800), (1024, 4096)):
        if window < x.prompt_tokens:
            yield a_shape(streaming, x, sink, window)
