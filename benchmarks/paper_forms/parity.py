"""Compares our selections with those of the papers' code, row by row, on the same inputs.

    TRITON_INTERPRET=1 python -m deltafront.benchmarks.paper_forms.parity FOLDER       # without a GPU
    python -m deltafront.benchmarks.paper_forms.parity FOLDER --tokens 16384           # with one

FOLDER contains any of these checkouts: x-attention (mit-han-lab), FlexPrefill (bytedance), SpargeAttn
(thu-ml), Quest (mit-han-lab), DELTA (hoenza). For each the script prints the number of identical rows, the
share of entries in other rows that ours and theirs both keep, and the number that each keeps. docs/methods.md
explains the differences.

Shape suffixes are those of `kernels.interface`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from deltafront.benchmarks.accuracy.quest import page_bounds
from deltafront.benchmarks.arguments import parser_of
from deltafront.benchmarks.paper_forms.levels import METHODS
from deltafront.benchmarks.paper_forms.parity_rows import (
    Compared,
    Rows,
    compared,
    file_module,
    on_cpu,
    ours,
    repeated,
    rows_of,
    without,
)
from deltafront.kernels.constants import BLOCK, PAGE_TOKENS
from deltafront.kernels.interface import AttentionInput
from deltafront.kernels.methods import load
from deltafront.kernels.paged_decode.cpu import select_pages
from deltafront.kernels.selectors.grouped.antidiagonal import tile_scores
from deltafront.tests.reference.structured import structured_input


def x_attention(folder: Path, x: AttentionInput) -> Iterator[Compared]:
    sys.path.insert(0, str(folder))
    with without("block_sparse_attn"):
        estimate = importlib.import_module("xattn.src.Xattention").xattn_estimate
    q, k = repeated(x)
    for stride in (8, 16):
        with on_cpu():
            how = {"block_size": BLOCK, "stride": stride, "threshold": 0.9, "use_triton": False}
            score, mask = estimate(q, k, chunk_size=x.q_BHTD.shape[2], causal=True, **how)
        del score
        theirs, named = rows_of(mask[0, :, : x.query_blocks, : x.key_blocks]), f"XAttention, stride {stride}"
        yield compared(f"{named}, tau 0.9", ours(x, "xattention", stride=stride, tau=0.9), theirs)
        yield compared(f"{named}, their diagonal and rule", as_x_attention(x, stride, 0.9), theirs)


def as_x_attention(x: AttentionInput, stride: int, tau: float) -> Rows:
    """Select tiles as XAttention's code does, for a prompt in one chunk. That code differs from the paper in
    two ways: cells on the diagonal include keys after their queries, and a row keeps one tile more than its
    threshold needs."""
    q, k = repeated(x)
    groups = q.shape[2] // stride
    q_HIF = q[0].reshape(q.shape[1], groups, -1).float()
    k_HJF = k[0].view(k.shape[1], groups, stride, -1).flip(2).reshape(k.shape[1], groups, -1).float()
    logit_HIJ = q_HIF @ k_HJF.transpose(1, 2) * (x.scale / stride)
    causal_IJ = torch.ones(groups, groups, dtype=torch.bool, device=q.device).tril()
    score_HNM = tile_scores(logit_HIJ[None], causal_IJ, BLOCK // stride)[0].double()
    blocks = score_HNM.shape[2]
    diagonal_NM = torch.eye(blocks, dtype=torch.bool, device=q.device)
    first_HNM = torch.where(diagonal_NM, score_HNM + 1e5, score_HNM)
    order_HNM = first_HNM.argsort(dim=-1, descending=True, stable=True)
    ordered_HNM = score_HNM.gather(-1, order_HNM)
    before_HNM = torch.nn.functional.pad(ordered_HNM.cumsum(-1), (2, 0))[..., :blocks]
    within_HNM = before_HNM < tau * score_HNM.sum(-1, keepdim=True)
    kept_HNM = torch.zeros_like(within_HNM).scatter(-1, order_HNM, within_HNM)
    kept_HNM[..., 0] = True
    return rows_of(kept_HNM & torch.ones_like(diagonal_NM).tril())


def flex_prefill(folder: Path, x: AttentionInput) -> Iterator[Compared]:
    rearrange = mock.MagicMock()
    rearrange.rearrange = lambda t, _pattern: t.flatten(1, 2)  # "b h g i j -> b (h g) i j", the only pattern
    with mock.patch.dict(sys.modules, {"einops": rearrange}):
        module = file_module(folder / "flex_prefill" / "ops" / "flex_prefill_attention.py")
    q, k, v = (t.transpose(1, 2).contiguous() for t in (x.q_BHTD, x.k_BGSD, x.v_BGSD))
    for tau in (0.0, 0.1):
        found = module.get_active_blocks(
            q, k, v, block_size=BLOCK, gamma=0.9, min_budget=1, max_budget=1 << 20, tau=tau
        )
        theirs: Rows = []
        for cells in found[0]:
            places = [divmod(cell, x.key_blocks) for cell in cells.tolist()]
            theirs += [
                {m for row, m in places if row == n and m <= n} | {0, n} for n in range(x.query_blocks)
            ]
        yield compared(
            f"FlexPrefill, gamma 0.9, tau {tau}", ours(x, "flex", gamma_flex=0.9, tau_flex=tau), theirs
        )


def sparge_attn(folder: Path, x: AttentionInput) -> Iterator[Compared]:
    with without("einops"):
        module = file_module(folder / "spas_sage_attn" / "utils.py")
    q, k = repeated(x)
    for theta in (0.1, 0.6):
        kept = module.get_block_map_meansim(
            q, k, is_causal=True, BLKQ=BLOCK, BLKK=BLOCK, simthreshd1=theta, cdfthreshd=0.98
        )
        theirs = [row | {0, n % x.query_blocks} for n, row in enumerate(rows_of(kept[0].bool()))]
        yield compared(
            f"SpargeAttn, tau 0.98, theta {theta}", ours(x, "sparge", tau=0.98, theta=theta), theirs
        )


def quest(folder: Path, x: AttentionInput) -> Iterator[Compared]:
    """Compare the pages that our Quest and the authors' select for the last query. Only our Quest always
    keeps the page being written."""
    packages = ("transformers.models.llama.modeling_llama", "transformers.cache_utils")
    with without("transformers", *packages, "transformers.models.mistral.modeling_mistral"):
        module = file_module(folder / "evaluation" / "quest_attention.py")
    q_HD = x.q_BHTD[0, :, -1].float()
    k_SHD = repeated(x)[1][0].transpose(0, 1).float()
    bound_HP = page_bounds(q_HD, k_SHD).T
    bound_HS = bound_HP.repeat_interleave(PAGE_TOKENS, dim=1)[:, : k_SHD.shape[0]]
    for budget in (16, 64):
        with on_cpu():
            mask = module.local_heavy_hitter_mask(bound_HS[None, :, None], budget * PAGE_TOKENS, PAGE_TOKENS)
        theirs = rows_of(mask[0, :, 0, ::PAGE_TOKENS])
        forced_HP = bound_HP.clone()
        forced_HP[:, -1] = torch.inf
        best_HK = forced_HP.topk(min(budget, forced_HP.shape[1]), dim=1).indices
        yield compared(f"Quest, {budget} pages", [set(row) for row in best_HK.tolist()], theirs)


def delta(folder: Path, x: AttentionInput) -> Iterator[Compared]:
    """Compare the page scores of our and the authors' DELTA, and the pages that they select, for one request.
    Logarithms are natural, as the name `log2e` of a factor in the authors' kernel implies."""
    parts = folder / "DELTA" / "Engine" / "DELTA"
    scores, selector_of = file_module(parts / "page_score.py"), file_module(parts / "page_selector.py")
    q_HD, k_SHD = x.q_BHTD[0, :, -1].float(), repeated(x)[1][0].transpose(0, 1).float()
    logit_HS = torch.einsum("hd,shd->hs", q_HD, k_SHD) * x.scale
    pages, device = logit_HS.shape[1] // PAGE_TOKENS, logit_HS.device
    logit_HS = logit_HS[:, : pages * PAGE_TOKENS].contiguous()
    lse_H, log2e = logit_HS.logsumexp(1), 1.4426950408889634
    theirs_RP = torch.zeros(1, pages, device=device)
    how: dict[str, Any] = {"log2e": log2e, "page_size": PAGE_TOKENS}
    scores.compute_page_scores_triton(logit_HS[None], lse_H[None], theirs_RP, **how)
    ours_RP = (logit_HS - lse_H[:, None]).exp().amax(0).view(1, pages, PAGE_TOKENS).sum(-1)
    torch.testing.assert_close(theirs_RP, ours_RP, rtol=1e-4, atol=1e-6)
    lengths_R = torch.tensor([pages * PAGE_TOKENS], dtype=torch.int32)
    for budget in (16, 64):
        if budget >= pages:
            continue
        made = selector_of.PageSelector(1, pages, True, budget, 1.0, 8, device)
        indptr, every = (
            torch.tensor([0, pages], dtype=torch.int32, device=device),
            torch.arange(pages, dtype=torch.int32, device=device),
        )
        one = torch.tensor([0, 1], dtype=torch.int32, device=device)
        made.plan(one, every, indptr, one[1:], every.clone(), indptr, L=8)
        chosen, _ = made.select(theirs_RP)
        selected_RK, counts_R = select_pages(ours_RP.cpu(), lengths_R, budget=budget, recency=8)
        mine = set(selected_RK[0, : int(counts_R[0])].tolist())
        yield compared(f"DELTA, {budget} pages, 8 recent", [mine], [set(chosen.tolist())])


CHECKOUTS: dict[str, Callable[[Path, AttentionInput], Iterator[Compared]]] = {
    "x-attention": x_attention,
    "FlexPrefill": flex_prefill,
    "SpargeAttn": sparge_attn,
    "Quest": quest,
    "DELTA": delta,
}


def main(given: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=2048, help="a multiple of 128")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args(given)
    load(METHODS)
    load("deltafront.benchmarks.whole_prompt.methods")
    x = structured_input(
        arguments.tokens, q_heads=4, kv_heads=2, head_dim=64, device=arguments.device, dtype=torch.float32
    )
    print("| authors' code, selection | rows alike | shared in other rows | entries, ours and theirs |")
    print("|---|---|---|---|")
    for name, compare in CHECKOUTS.items():
        if not (arguments.folder / name).is_dir():
            print(f"| {name} is not in {arguments.folder} | | | |")
            continue
        for row in compare(arguments.folder / name, x):
            alike, kept = f"{row.same} of {row.rows}", f"{row.ours}, {row.theirs}"
            print(f"| {row.name} | {alike} | {row.shared:.3f} | {kept} |", flush=True)


if __name__ == "__main__":
    main()
