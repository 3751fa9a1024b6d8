"""Top-k routing: chooses each token's experts and sorts the assignments by expert, without a host
synchronisation.

Shape suffixes: T tokens, E experts, K experts of a token, M = T K assignments; assignment t K + k is token
t's k-th expert.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from deltafront.kernels.launches import Launcher, cdiv, next_power_of_2

_TOKENS = 16
_ASSIGNMENTS = 256
_LEAST = tl.constexpr(-1.0e38)


@dataclass(frozen=True, kw_only=True)
class Router:
    """A model's routing of tokens to experts. Ties go to the lower expert.

    Attributes:
        per_token: Experts of a token.
        normed: Divide the chosen experts' probabilities by their sum.
        bias_E: None: probabilities are a softmax. Otherwise they are sigmoids. This float32 bias is added to
            choose experts, not to routing weights (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
        groups: Number of groups of adjacent experts.
        chosen_groups: Number of groups that a token may choose from. Groups are ranked by the sum of their
            two best experts.
        scale: Multiplier of routing weights (`routed_scaling_factor`).
    """

    per_token: int
    normed: bool
    bias_E: torch.Tensor | None = None
    groups: int = 1
    chosen_groups: int = 1
    scale: float = 1.0


@dataclass(frozen=True)
class Routes:
    """The routing of a batch of tokens.

    Attributes:
        share_M: Routing weight of each assignment, float32.
        order_M: int32, assignments sorted by expert; the order within an expert is arbitrary.
        counts_E: int32, assignments of each expert.
    """

    share_M: torch.Tensor
    order_M: torch.Tensor
    counts_E: torch.Tensor


def cpu_route(logits_TE: torch.Tensor, router: Router) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts on the CPU. Returns expert_TK and share_TK in float32, the best expert first."""
    logits_TE = choice_TE = logits_TE.float()
    if router.bias_E is None:
        share_TE = logits_TE.softmax(-1)
    else:
        share_TE = logits_TE.sigmoid()
        choice_TE = share_TE + router.bias_E
    if router.groups > 1:
        grouped_TGE = choice_TE.view(len(choice_TE), router.groups, -1)
        group_TG = _best(grouped_TGE.topk(2).values.sum(-1), router.chosen_groups)
        kept_TG = torch.zeros_like(grouped_TGE[..., 0], dtype=torch.bool).scatter_(1, group_TG, True)
        choice_TE = grouped_TGE.masked_fill(~kept_TG[..., None], float("-inf")).flatten(1)
    expert_TK = _best(choice_TE, router.per_token)
    share_TK = share_TE.gather(1, expert_TK)
    sum_T1 = share_TK.sum(-1, keepdim=True) if router.normed else 1.0
    return expert_TK, share_TK / sum_T1 * router.scale


def _best(score_TX: torch.Tensor, count: int) -> torch.Tensor:
    return score_TX.sort(dim=-1, descending=True, stable=True).indices[:, :count]


@triton.jit
def _of_best_groups(
    left_TE, expert_E, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr
):
    SIZE: tl.constexpr = EXPERTS // GROUPS
    group_E = expert_E // SIZE
    sum_TE = tl.full(left_TE.shape, float("-inf"), tl.float32)
    for group in range(GROUPS):
        mine_TE = tl.where(group_E[None, :] == group, left_TE, float("-inf"))
        first_T = tl.max(mine_TE, 1)
        first_at_T = tl.min(tl.where(mine_TE == first_T[:, None], expert_E[None, :], EXPERTS), 1)
        second_T = tl.max(tl.where(expert_E[None, :] == first_at_T[:, None], float("-inf"), mine_TE), 1)
        sum_TE = tl.where(group_E[None, :] == group, (first_T + second_T)[:, None], sum_TE)
    kept_TE = sum_TE > float("inf")
    for _ in range(CHOSEN_GROUPS):
        is_best_TE = sum_TE == tl.max(sum_TE, 1)[:, None]
        best_T = tl.min(tl.where(is_best_TE, group_E[None, :], GROUPS), 1)
        kept_TE = kept_TE | (group_E[None, :] == best_T[:, None])
        sum_TE = tl.where(kept_TE, float("-inf"), sum_TE)
    return kept_TE


@triton.jit(do_not_specialize=["tokens"])
def route_kernel(
    logits_ptr, bias_ptr, expert_ptr, place_ptr, share_ptr, counts_ptr, tokens,
    EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr, NORMED: tl.constexpr, BIASED: tl.constexpr,
    GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, SCALE: tl.constexpr,
    TOKENS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Choose the experts of TOKENS tokens. Write to place_ptr each assignment's index among its expert's
    assignments. The counts must be 0 at launch."""
    token_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    expert_E = tl.arange(0, EXPERTS_BLOCK)
    slot_K = tl.arange(0, SLOTS)
    inside_T = token_T < tokens
    inside_TE = inside_T[:, None] & (expert_E < EXPERTS)[None, :]
    at_TE = token_T.to(tl.int64)[:, None] * EXPERTS + expert_E[None, :]
    logit_TE = tl.load(logits_ptr + at_TE, mask=inside_TE, other=float("-inf")).to(tl.float32)
    logit_TE = tl.where(inside_T[:, None], logit_TE, 0.0)
    if BIASED:
        share_TE = 1.0 / (1.0 + tl.exp(-logit_TE))
        choice_TE = share_TE + tl.load(bias_ptr + expert_E, mask=expert_E < EXPERTS, other=0.0)[None, :]
    else:
        power_TE = tl.exp(logit_TE - tl.max(logit_TE, 1)[:, None])
        share_TE = power_TE / tl.sum(power_TE, 1)[:, None]
        choice_TE = logit_TE
    least_TE = tl.maximum(choice_TE, _LEAST)  # so that NaN logits also choose different, existing experts
    left_TE = tl.where(expert_E[None, :] < EXPERTS, least_TE, float("-inf"))
    if GROUPS > 1:
        kept_TE = _of_best_groups(left_TE, expert_E, EXPERTS, GROUPS, CHOSEN_GROUPS)
        left_TE = tl.where(kept_TE, left_TE, float("-inf"))
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
    share_TK *= SCALE
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


def kernel_route(logits_TE: torch.Tensor, router: Router) -> Routes:
    (tokens, experts), per_token = logits_TE.shape, router.per_token
    assignments, device, block = tokens * per_token, logits_TE.device, next_power_of_2(experts)
    expert_M, place_M, order_M = (
        torch.empty(assignments, dtype=torch.int32, device=device) for _ in range(3)
    )
    share_M = torch.empty(assignments, dtype=torch.float32, device=device)
    counts_E = torch.zeros(experts, dtype=torch.int32, device=device)
    _route[(cdiv(tokens, _TOKENS),)](
        logits_TE.contiguous(),
        share_M if router.bias_E is None else router.bias_E,
        expert_M,
        place_M,
        share_M,
        counts_E,
        tokens,
        EXPERTS=experts,
        PER_TOKEN=per_token,
        NORMED=router.normed,
        BIASED=router.bias_E is not None,
        GROUPS=router.groups,
        CHOSEN_GROUPS=router.chosen_groups,
        SCALE=router.scale,
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
