"""Tiny models of every family with the logits that transformers computes, and our stacks over pages.

Weights and configurations are chosen so that every part affects the logits: norm weights and biases are
random, and RoPE scaling begins within the prompt.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

from deltafront.kernels.gated_delta.states import LayerStates, SequenceStates, StepStates
from deltafront.workers.kv.cache import PagedKVCache
from deltafront.workers.kv.pages.pool import pages_for
from deltafront.workers.model.decoder.load import load_stack
from deltafront.workers.model.decoder.stack import LayerStack
from deltafront.workers.model.directory.config_file import read_config
from deltafront.workers.model.directory.model_config import ModelConfig
from deltafront.workers.model.layer_shares import LayerShare
from deltafront.workers.model.weights.stack_weights import StackSpec
from deltafront.workers.settings import Quantisation

from .tiny_families import FAMILIES, SHAPE

TOKENS = 150
CUTS = {"whole": (TOKENS,), "chunks": (48, 16, 64, 22), "ragged": (7, 100, 1, 42)}
ASKED = 48, 52, 21
"""Tokens of a document's two chunks and of a question that extends it."""


@dataclass(frozen=True, eq=False)
class Case:
    """A saved model with its configuration, token ids, and transformers' logits for them. theirs: Directory
    of the same model in a form that transformers reads, if `directory` is not one."""

    directory: Path
    config: ModelConfig
    ids_T: torch.Tensor
    logits_TV: torch.Tensor
    theirs: Path | None = None


def model_class(config: Any) -> Any:
    """Return transformers' model class: for some families a language model with parts for images."""
    wrapped = config is not config.get_text_config()
    return transformers.AutoModelForImageTextToText if wrapped else transformers.AutoModelForCausalLM


def expected_logits(directory: Path, ids_T: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with torch.no_grad():
        return transformers_model(directory, dtype)(ids_T[None]).logits[0].float()


@functools.lru_cache(maxsize=1)
def transformers_model(directory: Path, dtype: torch.dtype) -> Any:
    config = transformers.AutoConfig.from_pretrained(directory)
    return model_class(config).from_pretrained(directory, dtype=dtype).eval()


def likeliest(directory: Path, asked_T: torch.Tensor, answer: list[int]) -> list[int]:
    """Return transformers' most likely token at the position of each token of an answer. If they equal the
    answer, transformers would generate it greedily."""
    logits_TV = expected_logits(directory, torch.cat([asked_T, torch.tensor(answer)]))
    found: list[int] = logits_TV[len(asked_T) - 1 : -1].argmax(-1).tolist()
    return found


def make_case(family: str, directory: Path) -> Case:
    torch.manual_seed(1)
    config = FAMILIES[family]()
    model = model_class(config).from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):  # states that keep some hundred rows
                weight.copy_(torch.linspace(-6.0, 0.0, len(weight)))
            elif weight.dim() == 1:
                weight.copy_(torch.randn_like(weight) * 0.3 + (0.0 if name.endswith("bias") else 1.0))
            elif name.endswith("_bias"):  # of all experts
                weight.copy_(torch.randn_like(weight) * 0.3)
        for name, bias in (*model.named_buffers(), *model.named_parameters()):
            if name.endswith("e_score_correction_bias"):
                bias.copy_(torch.randn_like(bias) * 0.3)
    model.save_pretrained(directory)
    ids_T = torch.randint(0, SHAPE["vocab_size"], (TOKENS,))
    ours = save_as_exaone(directory) if family == "exaone" else directory
    return Case(ours, read_config(ours), ids_T, expected_logits(directory, ids_T), directory)


def save_as_exaone(directory: Path) -> Path:
    """Save a Llama under EXAONE 3.5's names. EXAONE's own code computes the same."""
    names = {
        "model.layers.": "transformer.h.",
        "self_attn.o_proj": "attn.attention.out_proj",
        "self_attn.": "attn.attention.",
        "gate_proj": "c_fc_0",
        "up_proj": "c_fc_1",
        "down_proj": "c_proj",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "model.embed_tokens": "transformer.wte",
        "model.norm": "transformer.ln_f",
    }
    (target := directory / "exaone").mkdir()
    stored, raw = {}, json.loads((directory / "config.json").read_text())
    for name, tensor in load_file(directory / "model.safetensors").items():
        renamed = functools.reduce(lambda name, pair: name.replace(*pair), names.items(), name)
        stored[renamed] = tensor
    save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    for ours, theirs in (("num_hidden_layers", "num_layers"), ("rms_norm_eps", "layer_norm_epsilon")):
        raw[theirs] = raw.pop(ours)
    raw |= {"activation_function": raw.pop("hidden_act"), "architectures": ["ExaoneForCausalLM"]}
    (target / "config.json").write_text(json.dumps(raw | {"model_type": "exaone"}))
    return target


def fresh_states(
    config: ModelConfig, slots: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> LayerStates:
    assert config.linear is not None
    conv_SWE = torch.zeros((slots, *config.linear.conv_shape), dtype=dtype, device=device)
    return LayerStates(conv_SWE, torch.zeros((slots, *config.linear.recurrent_shape), device=device))


Sinks = Callable[[int], torch.Tensor | None]
"""Returns a layer's attention sinks: `LayerStack.sinks`."""


def no_sinks(layer: int) -> None:
    return None


class Pages:
    """A paged KV cache with dense or windowed attention, for chunks of one prompt and for decode steps, and
    a state of each sequence for layers with linear attention."""

    def __init__(
        self,
        config: ModelConfig,
        tables: list[list[int]],
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        pages = 1 + max(page for table in tables for page in table)
        self.tables = [torch.tensor(table, dtype=torch.int32, device=device) for table in tables]
        layers, self.windows = range(config.layers), config.windows
        self.cache = PagedKVCache(layers, config.kv_heads, config.head_dim, pages, dtype, device)
        self.states = {
            layer: fresh_states(config, len(tables), dtype, device) for layer in config.linear_layers
        }

    def chunk_states(self, sequence: int, rows: int) -> Callable[[int], SequenceStates]:
        return lambda layer: SequenceStates(self.states[layer], sequence, ((rows, sequence),))

    def step_states(self) -> Callable[[int], StepStates]:
        """Return the states of all sequences, for a row of each."""
        return lambda layer: StepStates(states := self.states[layer], torch.arange(len(states.conv_SWE)))

    def chunk(self, sequence: int, start: int, sinks: Sinks = no_sinks) -> Callable[..., torch.Tensor]:
        def attend(layer: int, q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> torch.Tensor:
            table, end = self.tables[sequence], start + q_THD.shape[0]
            self.cache.write(layer, table, start, k_TGD, v_TGD)
            k_GSD, v_GSD = self.cache.gather(layer, table, end)
            positions_S = torch.arange(end, device=q_THD.device)
            seen_TS = positions_S <= positions_S[start:, None]
            seen_TS &= positions_S > positions_S[start:, None] - self.windows.get(layer, end)
            return sdpa(q_THD, k_GSD, v_GSD, seen_TS, sinks(layer))

        return attend

    def step(self, positions: list[int], sinks: Sinks = no_sinks) -> Callable[..., torch.Tensor]:
        rows = zip(self.tables, positions, strict=True)
        page_ids_T = torch.stack([table[position // 16] for table, position in rows])
        rows_T = page_ids_T * 16 + torch.tensor(positions) % 16

        def attend(layer: int, q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> torch.Tensor:
            for cache_RGD, new_TGD in zip(self.cache.rows(layer), (k_TGD, v_TGD), strict=True):
                cache_RGD[rows_T] = new_TGD
            out = []
            for row, (table, position) in enumerate(zip(self.tables, positions, strict=True)):
                sides = self.cache.gather(layer, table, position + 1)
                k_GSD, v_GSD = (side[:, -self.windows.get(layer, position + 1) :] for side in sides)
                out.append(sdpa(q_THD[row : row + 1], k_GSD, v_GSD, None, sinks(layer)))
            return torch.cat(out)

        return attend


def sdpa(
    q_THD: torch.Tensor,
    k_GSD: torch.Tensor,
    v_GSD: torch.Tensor,
    seen_TS: torch.Tensor | None,
    sink_H: torch.Tensor | None,
) -> torch.Tensor:
    if sink_H is not None:
        return _sdpa_with_sinks(q_THD, k_GSD, v_GSD, seen_TS, sink_H)
    q_HTD = q_THD.transpose(0, 1)[None]
    out = F.scaled_dot_product_attention(q_HTD, k_GSD[None], v_GSD[None], attn_mask=seen_TS, enable_gqa=True)
    return out[0].transpose(0, 1)


def _sdpa_with_sinks(
    q_THD: torch.Tensor,
    k_GSD: torch.Tensor,
    v_GSD: torch.Tensor,
    seen_TS: torch.Tensor | None,
    sink_H: torch.Tensor,
) -> torch.Tensor:
    k_HSD, v_HSD = (side.repeat_interleave(q_THD.shape[1] // len(side), 0) for side in (k_GSD, v_GSD))
    logits_HTS = q_THD.transpose(0, 1) @ k_HSD.mT * q_THD.shape[2] ** -0.5
    if seen_TS is not None:
        logits_HTS = logits_HTS.masked_fill(~seen_TS, float("-inf"))
    sinks_HT1 = sink_H[:, None, None].expand(-1, len(q_THD), 1).to(logits_HTS.dtype)
    weights_HTS = torch.cat([logits_HTS, sinks_HT1], dim=2).softmax(2)[:, :, :-1]
    return (weights_HTS @ v_HSD).transpose(0, 1)


def table_of(tokens: int, seed: int = 0) -> list[int]:
    return torch.randperm(pages_for(tokens) + 3, generator=torch.Generator().manual_seed(seed)).tolist()


@functools.lru_cache(maxsize=4)
def load_stages(
    case: Case,
    stages: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    quantisation: Quantisation | None = None,
) -> list[LayerStack]:
    return load_shares(case, case.config.split(stages), dtype, device, quantisation)


def load_shares(
    case: Case,
    shares: Sequence[LayerShare],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    quantisation: Quantisation | None = None,
) -> list[LayerStack]:
    return [
        load_stack(
            case.directory,
            StackSpec(
                config=case.config,
                layers=share.layers,
                mlps=share.mlps,
                embedding=share is shares[0],
                head=share is shares[-1],
                dtype=dtype,
                device=torch.device(device),
                quantisation=quantisation,
            ),
        )
        for share in shares
    ]


def prefill(
    stages: list[LayerStack], ids_T: torch.Tensor, cuts: tuple[int, ...], pages: Pages, sequence: int = 0
) -> torch.Tensor:
    logits, start = [], 0
    for length in cuts:
        hidden_TC = stages[0].embed(ids_T[start : start + length])
        positions_T = torch.arange(start, start + length)
        for stage in stages:
            attend, states = pages.chunk(sequence, start, stage.sinks), pages.chunk_states(sequence, length)
            hidden_TC = stage.forward(hidden_TC, positions_T, attend, row_states=states)
        logits.append(stages[-1].logits(hidden_TC))
        start += length
    return torch.cat(logits)
