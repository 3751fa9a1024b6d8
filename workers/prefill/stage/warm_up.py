"""Compiles all kernels before a stage takes requests, so that no request waits for a compiler.

Most kernels do not specialise on lengths, counts and positions, so dummy prompts with a full and a partial
chunk compile them. The others specialise on the prompt's length in power-of-two buckets. For each bucket, one
tile of queries attends to keys of the bucket's length.
"""

from collections.abc import Sequence

import torch

from deltafront.kernels.build import build
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.gated_delta.states import SequenceStates
from deltafront.kernels.interface import Attention, AttentionInput, StateSpec
from deltafront.kernels.methods import MethodSpec
from deltafront.workers.kv.cache import PagedKVCache
from deltafront.workers.model.calibrated.levels import thresholds_for
from deltafront.workers.model.calibrated.profile import Profile
from deltafront.workers.model.decoder.stack import AttentionCalls, LayerStack
from deltafront.workers.progress import Tell, silent

_RAGGED = 77
"""Tokens of a partial chunk. Kernels specialise on no divisor of this number."""


@torch.inference_mode()
def warm_up(
    stack: LayerStack,
    methods: Sequence[MethodSpec],
    chunk_tokens: int,
    profile: Profile | None = None,
    longest: int = 0,
    tell: Tell = silent,
) -> None:
    """Prefill a few dummy prompts in chunks with each method, in one layer of each kind.

    Args:
        longest: On a GPU, also compile for all `length_classes` up to this many tokens; 0: none.
    Raises:
        MethodError: The profile lacks the density that a method asks for.
    """
    on_gpu = stack.device.type == "cuda"
    for number, spec in enumerate(methods, start=1):
        tell(f"warming up {spec.name}, {number} of {len(methods)}")
        shortest = int(spec.values.get("min_tokens", 0))
        method = build(spec, thresholds_for(profile, spec), stack.config.windows)
        dummies = prompt_lengths(shortest, chunk_tokens)
        dummies += longest_dense_rows(shortest, chunk_tokens) if on_gpu else []
        for layer in first_of_kinds(stack):
            for tokens in dummies:
                full_chunks, rest = divmod(tokens, chunk_tokens)
                _read(stack, method, [chunk_tokens] * full_chunks + [rest] * (rest > 0), layer)
            attends_to_all = layer not in (*stack.config.window_layers, *stack.config.linear_layers)
            if on_gpu and longest and attends_to_all:
                _compile_for_lengths(stack, method, shortest, chunk_tokens, longest, layer)
    _compile_for_one_row(stack)
    stack.compile_gemms()
    if on_gpu:
        torch.cuda.synchronize(stack.device)
        torch.cuda.empty_cache()


@torch.inference_mode()
def warm_up_kv(stack: LayerStack) -> None:
    """Compile the kernels for 8-bit KV. They run on a temporary page, because the stage may share its own
    pages with a decode worker."""
    config = stack.config
    heads, attend_layers = (config.kv_heads, config.head_dim), config.page_layers(stack.layers)
    if not attend_layers:
        return
    layers = range(attend_layers[0], attend_layers[0] + 1)
    cache = PagedKVCache(layers, *heads, 1, stack.dtype, stack.device, int8=True)
    rows_T = torch.arange(1, device=stack.device)
    hidden_TC = torch.zeros(1, stack.config.hidden, dtype=stack.dtype, device=stack.device)

    def attend(layer: int, q_THD: torch.Tensor) -> torch.Tensor:
        cache.gather_rows(layer, rows_T)
        return torch.zeros_like(q_THD)

    calls = AttentionCalls(lambda layer: cache.kv_rows(layer, rows_T), attend)
    stack.run(hidden_TC, rows_T, calls, layers=layers)
    if stack.device.type == "cuda":
        torch.cuda.synchronize(stack.device)


def first_of_kinds(stack: LayerStack) -> list[int]:
    """Return the first layer of each kind: with a sliding window, linear attention, and other layers."""
    windows, linear = stack.config.window_layers, stack.config.linear_layers
    kinds = {(layer in windows, layer in linear): layer for layer in reversed(stack.layers)}
    return sorted(kinds.values())


def prompt_lengths(shortest: int, chunk_tokens: int) -> list[int]:
    """Return the lengths of the dummy prompts.

    The first has full chunks and a partial chunk. If `shortest` is not 0, the second has at most `shortest`
    tokens, for which the method uses dense attention.
    """
    return [
        _several_chunks(shortest, chunk_tokens) + min(_RAGGED, chunk_tokens - 1),
        *([min(shortest, _RAGGED)] if shortest else []),
    ]


def longest_dense_rows(shortest: int, chunk_tokens: int) -> list[int]:
    """Return the lengths of dummy prompts with the most dense rows in a launch: a full last chunk with the
    longest dense tail, and if `shortest` is not 0, a prompt of that length. Kernels may have other forms for
    few rows (`kernels.attention.hopper.split`), which the prompts of `prompt_lengths` compile."""
    whole = _several_chunks(shortest, chunk_tokens)
    return [whole + chunk_tokens - 1, *([shortest] if shortest else [])]


def _several_chunks(shortest: int, chunk_tokens: int) -> int:
    return max(2, shortest // chunk_tokens + 1) * chunk_tokens


def length_classes(longest: int) -> list[int]:
    """Return one length per power-of-two bucket: BLOCK, 2·BLOCK, 4·BLOCK, … below `longest`, and `longest`.
    All lengths of a bucket use the same compiled kernels."""
    return [BLOCK << power for power in range(longest.bit_length()) if BLOCK << power < longest] + [longest]


def _compile_for_lengths(
    stack: LayerStack, method: Attention, shortest: int, chunk_tokens: int, longest: int, layer: int
) -> None:
    """Run attention once per length bucket. Keys of at most `shortest` tokens are passed as the beginning of
    a longer prompt, since the method computes a whole prompt of that length densely."""
    config = stack.config

    def zeros(heads: int, tokens: int) -> torch.Tensor:
        return torch.zeros(1, heads, tokens, config.head_dim, dtype=stack.dtype, device=stack.device)

    k_BGSD, v_BGSD = zeros(config.kv_heads, longest), zeros(config.kv_heads, longest)
    for keys, rows in [*((keys, BLOCK) for keys in length_classes(longest)), (longest, chunk_tokens)]:
        start, total = max(0, -(-keys // BLOCK) * BLOCK - rows), keys if keys > shortest else longest
        seen = k_BGSD[:, :, :keys], v_BGSD[:, :, :keys]
        q_BHTD = zeros(config.q_heads, keys - start)
        x = AttentionInput.of(q_BHTD, *seen, q_start=start, prompt_tokens=total, sink_H=stack.sinks(layer))
        method.attend(x, method.new_state(_spec(stack, total, layer)))


def _compile_for_one_row(stack: LayerStack) -> None:
    hidden_TC = torch.zeros(1, stack.config.hidden, dtype=stack.dtype, device=stack.device)
    position_T = torch.zeros(1, dtype=torch.int64, device=stack.device)
    stack.forward(hidden_TC, position_T, lambda _layer, q_THD, _k, _v: torch.zeros_like(q_THD))
    if stack.has_head:
        stack.logits(hidden_TC)


def _spec(stack: LayerStack, tokens: int, layer: int) -> StateSpec:
    config = stack.config
    heads = config.q_heads, config.kv_heads, config.head_dim
    return StateSpec(1, *heads, tokens, stack.device, stack.dtype, layer=layer)


def _read(stack: LayerStack, method: Attention, chunks: Sequence[int], layer: int) -> None:
    config, total = stack.config, sum(chunks)
    state = method.new_state(_spec(stack, total, layer))
    k_BGSD = torch.empty(1, config.kv_heads, 0, config.head_dim, dtype=stack.dtype, device=stack.device)
    v_BGSD = k_BGSD

    def attend(_layer: int, q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> torch.Tensor:
        nonlocal k_BGSD, v_BGSD
        k_BGSD = torch.cat((k_BGSD, k_TGD.transpose(0, 1)[None]), dim=2)
        v_BGSD = torch.cat((v_BGSD, v_TGD.transpose(0, 1)[None]), dim=2)
        q_BHTD = q_THD.transpose(0, 1)[None]
        x = AttentionInput.of(
            q_BHTD, k_BGSD, v_BGSD, q_start=start, prompt_tokens=total, sink_H=stack.sinks(layer)
        )
        return method.attend(x, state)[0][0].transpose(0, 1)

    def states(_layer: int) -> SequenceStates:
        return SequenceStates(stack.fresh_states(1), 0, ((tokens, 0),))

    start = 0
    for tokens in chunks:
        hidden_TC = torch.randn(tokens, config.hidden, device=stack.device).to(stack.dtype)
        positions_T = torch.arange(start, start + tokens, device=stack.device)
        stack.forward(hidden_TC, positions_T, attend, range(layer, layer + 1), states)
        start += tokens
