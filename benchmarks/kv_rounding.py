"""Measures the cost of rounding K and V to 8 bits, form by form: KL against K/V that is not rounded.

    python -m deltafront.benchmarks.kv_rounding [--tokens 4096] [--text FILE]

The embedded 128K model in float32 on a CPU reads one document in one pass, and every layer sees K and V
rounded. A row of D channels, one key/value head of one token, has e4m3 or integers of -127 .. 127, times a
scale: a power of two, or one with some bits behind the point, for the row or for each 32 channels of it.
Prints for each form, for K and V alone and for both, the mean of KL over the last 2,048 positions, and the
bytes a row of D channels takes over D.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
import torch.nn.functional as F

from deltafront.benchmarks import DEMO_TEXT
from deltafront.benchmarks.reader import MODEL, load_text, load_tokenizer
from deltafront.kernels.layers.kv_int8 import dequantise, quantise
from deltafront.workers.model.decoder.load import load_model
from deltafront.workers.model.decoder.stack import LayerStack

Rounding = Callable[[torch.Tensor], torch.Tensor]
TAIL = 2048
"""Positions compared."""


def up_to_bits(x: torch.Tensor, bits: int | None) -> torch.Tensor:
    """The least numbers not below x with `bits` behind the point; None: x."""
    if bits is None:
        return x
    fraction, power = torch.frexp(x.clamp_min(2.0**-60))
    return torch.ldexp((fraction * 2 ** (bits + 1)).ceil() / 2 ** (bits + 1), power)


def e4m3(x: torch.Tensor) -> torch.Tensor:
    scale = up_to_bits(x.abs().amax(-1, keepdim=True) / 256, 0)
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def integers(bits: int | None, group: int | None = None) -> Rounding:
    """bits: of a scale behind the point; None: not rounded. group: channels of a scale; None: the row."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        parts = x.reshape(*x.shape[:-1], -1, group or x.shape[-1])
        scale = up_to_bits(parts.abs().amax(-1, keepdim=True) / 127, bits).clamp_min(1e-30)
        return ((parts / scale).round() * scale).reshape(x.shape)

    return rounded


def turned(rounding: Rounding) -> Rounding:
    """In channels that a Hadamard matrix mixes."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        matrix = torch.ones(1, 1)
        while len(matrix) < x.shape[-1]:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        matrix = matrix / x.shape[-1] ** 0.5
        found: torch.Tensor = rounding(x @ matrix) @ matrix.T
        return found

    return rounded


def as_kept(x: torch.Tensor) -> torch.Tensor:
    return dequantise(*quantise(x), x.dtype)


def forms(dim: int) -> dict[str, tuple[Rounding, float]]:
    """Each with its bytes over D."""
    of_32 = dim // 32 / dim
    return {
        "e4m3, power of two": (e4m3, 1 / dim),
        "int8, power of two": (integers(0), 1 / dim),
        "int8, 3 bits": (integers(3), 1 / dim),
        "int8, `kv_int8`": (as_kept, 1 / dim),
        "int8, exact scale": (integers(None), 4 / dim),
        "int8, power of two for 32 channels": (integers(0, 32), of_32),
        "int8, 3 bits for 32 channels": (integers(3, 32), of_32),
        "int8, 3 bits, Hadamard": (turned(integers(3)), 1 / dim),
    }


@torch.inference_mode()
def log_probabilities(stack: LayerStack, ids_T: torch.Tensor, k_as: Rounding, v_as: Rounding) -> torch.Tensor:
    """Return those of the next tokens, float64 [TAIL, vocabulary]."""

    def attend(_layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k_as(k), v_as(v)))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    hidden_TC = stack.forward(stack.embed(ids_T), torch.arange(len(ids_T)), attend)
    return stack.logits(hidden_TC[-TAIL:]).double().log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--text", type=Path, default=DEMO_TEXT)
    parser.add_argument("--tokens", type=int, default=4096)
    arguments = parser.parse_args()
    text = load_text(arguments.text, load_tokenizer(MODEL.path))
    ids_T = torch.tensor(list(chain(*text.take(random.Random(1), arguments.tokens))))
    stack = load_model(replace(MODEL, dtype="float32"), "cpu")

    def plain(x: torch.Tensor) -> torch.Tensor:
        return x

    wanted = log_probabilities(stack, ids_T, plain, plain)
    print("| form | bytes over a number's | KL, K | KL, V | KL, both |\n|---|---|---|---|---|")
    for name, (rounding, overhead) in forms(stack.config.head_dim).items():
        found = []
        for k_as, v_as in ((rounding, plain), (plain, rounding), (rounding, rounding)):
            got = log_probabilities(stack, ids_T, k_as, v_as)
            found.append(float((wanted.exp() * (wanted - got)).sum(-1).mean()))
        print(
            f"| {name} | {1 + overhead:.3f} | " + " | ".join(f"{kl:.6f}" for kl in found) + " |", flush=True
        )


if __name__ == "__main__":
    main()
