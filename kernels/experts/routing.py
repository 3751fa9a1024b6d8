"""Which experts each token goes to, and the tokens of each expert side by side. Nothing waits for the device.

Suffixes: T tokens, E experts, K experts of a token, M = T K assignments; assignment t K + k is token t's k-th
expert.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..launches import Launcher, cdiv, next_power_of_2

_TOKENS = 16
_ASSIGNMENTS = 256
_LEAST = tl.constexpr(-3.0e38)


@dataclass(frozen=True)
class Routes:
    """The experts of tokens.

    Args:
        share_M: Each assignment's weight in its token's sum, in float32.
        order_M: Assignments, those of expert 0 first, in any order within one; int32.
        counts_E: Assignments of each expert, int32.
    """

    share_M: torch.Tensor
    order_M: torch.Tensor
    counts_E: torch.Tensor


def cpu_route(logits_TE: torch.Tensor, per_token: int, normed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return expert_TK and share_TK: the most probable experts, with their probabilities in float32."""
    share_TK, expert_TK = logits_TE.float().softmax(-1).topk(per_token, dim=-1)
    return expert_TK, share_TK / share_TK.sum(-1, keepdim=True) if normed else share_TK


@triton.jit(do_not_specialize=["tokens"])
def route_kernel(
    logits_ptr, expert_ptr, place_ptr, share_ptr, counts_ptr, tokens,
    EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr, NORMED: tl.constexpr,
    TOKENS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """place: an assignment's place among its expert's. counts start at 0."""
    token_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert_E = tl.arange(0, EXPERTS_BLOCK)
    slot_K = tl.arange(0, SLOTS)
    inside_T = token_T < tokens
    inside_TE = inside_T[:, None] & (expert_E < EXPERTS)[None, :]
    at_TE = token_T.to(tl.int64)[:, None] * EXPERTS + expert_E[None, :]
    logit_TE = tl.load(logits_ptr + at_TE, mask=inside_TE, other=float("-inf")).to(tl.float32)
    logit_TE = tl.where(inside_T[:, None], logit_TE, 0.0)
    power_TE = tl.exp(logit_TE - tl.max(logit_TE, 1)[:, None])
    share_TE = power_TE / tl.sum(power_TE, 1)[:, None]
    least_TE = tl.maximum(logit_TE, _LEAST)  # NaN too: its tokens go to real experts, each once
    left_TE = tl.where(expert_E[None, :] < EXPERTS, least_TE, float("-inf"))
    chosen_TK = tl.zeros([TOKENS, SLOTS], tl.int32)
    share_TK = tl.zeros([TOKENS, SLOTS], tl.float32)
    for slot in range(PER_TOKEN):
        largest_T = tl.max(left_TE, 1)
        best_T = tl.min(tl.where(left_TE == largest_T[:, None], expert_E[None, :], EXPERTS - 1), 1)
        is_best_TE = expert_E[None, :] == best_T[:, None]
        best_share_T = tl.sum(tl.where(is_best_TE, share_TE, 0.0), 1)
        chosen_TK = tl.where(slot_K[None, :] == slot, best_T[:, None], chosen_TK)
        share_TK = tl.where(slot_K[None, :] == slot, best_share_T[:, None], share_TK)
        left_TE = tl.where(is_best_TE, float("-inf"), left_TE)
    if NORMED:
        share_TK = share_TK / tl.sum(share_TK, 1)[:, None]
    inside_TK = inside_T[:, None] & (slot_K < PER_TOKEN)[None, :]
    at_TK = token_T[:, None] * PER_TOKEN + slot_K[None, :]
    place_TK = tl.atomic_add(counts_ptr + chosen_TK, 1, mask=inside_TK, sem="relaxed")
    tl.store(expert_ptr + at_TK, chosen_TK, mask=inside_TK)
    tl.store(place_ptr + at_TK, place_TK, mask=inside_TK)
    tl.store(share_ptr + at_TK, share_TK, mask=inside_TK)


@triton.jit(do_not_specialize=["assignments"])
def order_kernel(
    expert_ptr, place_ptr, counts_ptr, order_ptr, assignments,
    EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, ASSIGNMENTS: tl.constexpr,
):  # fmt: skip
    at_M = tl.program_id(0) * ASSIGNMENTS + tl.arange(0, ASSIGNMENTS)
    expert_E = tl.arange(0, EXPERTS_BLOCK)
    inside_M = at_M < assignments
    counts_E = tl.load(counts_ptr + expert_E, mask=expert_E < EXPERTS, other=0)
    expert_M = tl.load(expert_ptr + at_M, mask=inside_M, other=0)
    before_M = tl.sum(tl.where(expert_E[None, :] < expert_M[:, None], counts_E[None, :], 0), 1)
    place_M = tl.load(place_ptr + at_M, mask=inside_M, other=0)
    tl.store(order_ptr + before_M + place_M, at_M, mask=inside_M)


_route, _order = Launcher(route_kernel), Launcher(order_kernel)


def kernel_route(logits_TE: torch.Tensor, per_token: int, normed: bool) -> Routes:
    tokens, experts = logits_TE.shape
    assignments, device, block = tokens * per_token, logits_TE.device, next_power_of_2(experts)
    expert_M, place_M, order_M = (
        torch.empty(assignments, dtype=torch.int32, device=device) for _ in range(3)
    )
    share_M = torch.empty(assignments, dtype=torch.float32, device=device)
    counts_E = torch.zeros(experts, dtype=torch.int32, device=device)
    _route[(cdiv(tokens, _TOKENS),)](
        logits_TE.contiguous(),
        expert_M,
        place_M,
        share_M,
        counts_E,
        tokens,
        EXPERTS=experts,
        PER_TOKEN=per_token,
        NORMED=normed,
        TOKENS=_TOKENS,
        EXPERTS_BLOCK=block,
        SLOTS=next_power_of_2(per_token),
        num_warps=4,
    )
    _order[(cdiv(assignments, _ASSIGNMENTS),)](
        expert_M,
        place_M,
        counts_E,
        order_M,
        assignments,
        EXPERTS=experts,
        EXPERTS_BLOCK=block,
        ASSIGNMENTS=_ASSIGNMENTS,
        num_warps=4,
    )
    return Routes(share_M, order_M, counts_E)
