"""Tiny models of every family with the logits that transformers gives for them, and our stacks over pages.

The configurations are drawn so that every part matters: norm weights and biases are not what they are
initialised to, and rope scaling bends within the prompt.
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

from deltafront.workers.kv.cache import PagedKVCache
from deltafront.workers.kv.pages.pool import pages_for
from deltafront.workers.model.decoder.load import load_stack
from deltafront.workers.model.decoder.stack import LayerStack
from deltafront.workers.model.directory.config_file import read_config
from deltafront.workers.model.directory.model_config import ModelConfig
from deltafront.workers.model.layer_shares import LayerShare
from deltafront.workers.model.weights.stack_weights import StackSpec

TOKENS = 150
CUTS = {"whole": (TOKENS,), "chunks": (48, 16, 64, 22), "ragged": (7, 100, 1, 42)}
ASKED = 48, 52, 21
"""A document in two chunks, and a question that is appended to it."""
SHAPE: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "head_dim": 16,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
WITHOUT_HEAD_DIM: dict[str, Any] = {"hidden_size": 96}
"""Families whose heads share the hidden size."""
PADDING: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.5, 2.0, 3.0, 4.5, 6.0, 8.0],
    "original_max_position_embeddings": 64,
}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 3.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
MINISTRAL3 = YARN | {"factor": 16.0, "mscale": 1.0, "mscale_all_dim": 0.7, "llama_4_scaling_beta": 0.3}
"""Queries grow four times within the prompt."""
MIXTURE = {
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
}
GLM_MIXTURE = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.5,
}
FP8_FILES = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
}
WINDOW = 37
"""Tokens: no multiple of a page or a block, and a quarter of the prompt."""
UNREAD = {"use_sliding_window": False}
"""In families with windows where transformers does not read it, and so they stay."""
MIXED = ["sliding_attention", "full_attention", "sliding_attention"] * 2
GEMMA3: dict[str, Any] = {
    **SHAPE,
    **PADDING,
    "num_attention_heads": 8,
    "sliding_window": WINDOW,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 16,
}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama3": lambda: transformers.LlamaConfig(
        **SHAPE | {"hidden_size": 96},
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "original_max_position_embeddings": 64,
            **LLAMA3,
        },
    ),
    "llama-linear-tied": lambda: transformers.LlamaConfig(
        **SHAPE | {"hidden_size": 96},
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    ),
    "mistral": lambda: transformers.MistralConfig(**SHAPE, sliding_window=None),
    "qwen2": lambda: transformers.Qwen2Config(**SHAPE, rope_parameters=YARN, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SHAPE | {"head_dim": 32}),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**SHAPE, **MIXTURE),
    "qwen3-moe-mixed": lambda: transformers.Qwen3MoeConfig(
        **SHAPE, **MIXTURE, decoder_sparse_step=2, mlp_only_layers=[3]
    ),
    "glm4-moe": lambda: transformers.Glm4MoeConfig(**SHAPE, **GLM_MIXTURE),
    "glm4-moe-groups": lambda: transformers.Glm4MoeConfig(
        **SHAPE | {"head_dim": 32},
        **GLM_MIXTURE | {"first_k_dense_replace": 3, "n_shared_experts": 2, "norm_topk_prob": False},
        n_group=4,
        topk_group=2,
        attention_bias=True,
        use_qk_norm=True,
    ),
    "qwen3-moe-not-normed": lambda: transformers.Qwen3MoeConfig(
        **SHAPE | {"head_dim": 32}, **MIXTURE | {"norm_topk_prob": False, "num_experts_per_tok": 1}
    ),
    "llama-biases": lambda: transformers.LlamaConfig(
        **SHAPE | {"hidden_size": 96}, attention_bias=True, mlp_bias=True
    ),
    "qwen3-biases": lambda: transformers.Qwen3Config(**SHAPE, attention_bias=True),
    "seed-oss": lambda: transformers.SeedOssConfig(**SHAPE),
    "mistral3": lambda: transformers.Mistral3Config(
        text_config=transformers.MistralConfig(
            **SHAPE | {"max_position_embeddings": 8192}, sliding_window=None
        ),
        vision_config=transformers.PixtralVisionConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, patch_size=14
        ),
    ),
    "ministral3": lambda: transformers.Ministral3Config(**SHAPE, rope_parameters=MINISTRAL3),
    "ministral3-multimodal": lambda: transformers.Mistral3Config(
        text_config=transformers.Ministral3Config(
            **SHAPE, rope_parameters=MINISTRAL3, tie_word_embeddings=True
        ),
        vision_config=transformers.PixtralVisionConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, patch_size=14
        ),
        tie_word_embeddings=True,
    ),
    "seed-oss-all-biases": lambda: transformers.SeedOssConfig(
        **SHAPE, attention_out_bias=True, mlp_bias=True
    ),
    "phi3": lambda: transformers.Phi3Config(**SHAPE | WITHOUT_HEAD_DIM, **PADDING),
    "phi3-longrope-partial": lambda: transformers.Phi3Config(
        **SHAPE | WITHOUT_HEAD_DIM,
        **PADDING,
        tie_word_embeddings=True,
        original_max_position_embeddings=64,
        rope_parameters=LONGROPE | {"partial_rotary_factor": 0.75},
    ),
    "granite": lambda: transformers.GraniteConfig(
        **SHAPE | WITHOUT_HEAD_DIM, tie_word_embeddings=True, **MULTIPLIERS
    ),
    "granite4": lambda: transformers.GraniteMoeHybridConfig(
        **SHAPE | WITHOUT_HEAD_DIM,
        **MULTIPLIERS,
        num_local_experts=0,
        shared_intermediate_size=80,
        layer_types=["full_attention"] * SHAPE["num_hidden_layers"],
        position_embedding_type="rope",
        mamba_n_heads=4,
    ),
    "smollm3": lambda: transformers.SmolLM3Config(**SHAPE, **PADDING, rope_parameters=YARN),
    "smollm3-listed": lambda: transformers.SmolLM3Config(
        **SHAPE, **PADDING, no_rope_layers=[0, 1, 1, 0, 0, 1], attention_bias=True
    ),
    "olmo2": lambda: transformers.Olmo2Config(**SHAPE | WITHOUT_HEAD_DIM),
    "glm": lambda: transformers.GlmConfig(**SHAPE, **PADDING),
    "glm4": lambda: transformers.Glm4Config(**SHAPE, **PADDING, attention_bias=False),
    "exaone4": lambda: transformers.Exaone4Config(
        **SHAPE, sliding_window=None, layer_types=["full_attention"] * SHAPE["num_hidden_layers"]
    ),
    "exaone4-windows": lambda: transformers.Exaone4Config(**SHAPE, sliding_window=WINDOW, layer_types=MIXED),
    "mistral-windows": lambda: transformers.MistralConfig(**SHAPE, sliding_window=WINDOW, **UNREAD),
    "mistral-mixed": lambda: transformers.MistralConfig(**SHAPE, sliding_window=WINDOW, layer_types=MIXED),
    "qwen2-windows": lambda: transformers.Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
    ),
    "phi3-windows": lambda: transformers.Phi3Config(
        **SHAPE | WITHOUT_HEAD_DIM, **PADDING, sliding_window=WINDOW, **UNREAD
    ),
    "olmo3": lambda: transformers.Olmo3Config(
        **SHAPE | WITHOUT_HEAD_DIM,
        sliding_window=WINDOW,
        rope_parameters={
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": YARN["rope_theta"]},
        },
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **GEMMA3, **UNREAD, rope_parameters={"full_attention": {"rope_type": "linear", "factor": 4.0}}
    ),
    "gemma3-multimodal": lambda: transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(
            **GEMMA3 | {"query_pre_attn_scalar": 40, "layer_types": MIXED, "vocab_size": 601}
        ),
        image_token_index=600,
        vision_config=transformers.SiglipVisionConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=28
        ),
    ),
    "exaone": lambda: transformers.LlamaConfig(
        **SHAPE | {"hidden_size": 96},
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    ),
    "arcee": lambda: transformers.ArceeConfig(**SHAPE | WITHOUT_HEAD_DIM, **PADDING, rope_parameters=YARN),
}


@dataclass(frozen=True, eq=False)
class Case:
    """A saved model, what it is, token ids and the logits transformers gives for them. theirs: the same
    model where transformers reads it, if not there."""

    directory: Path
    config: ModelConfig
    ids_T: torch.Tensor
    logits_TV: torch.Tensor
    theirs: Path | None = None


def model_class(config: Any) -> Any:
    """Some are a language model with parts for images."""
    wrapped = isinstance(config, transformers.Mistral3Config | transformers.Gemma3Config)
    return transformers.AutoModelForImageTextToText if wrapped else transformers.AutoModelForCausalLM


def expected_logits(directory: Path, ids_T: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with torch.no_grad():
        return transformers_model(directory, dtype)(ids_T[None]).logits[0].float()


@functools.lru_cache(maxsize=1)
def transformers_model(directory: Path, dtype: torch.dtype) -> Any:
    config = transformers.AutoConfig.from_pretrained(directory)
    return model_class(config).from_pretrained(directory, dtype=dtype).eval()


def likeliest(directory: Path, asked_T: torch.Tensor, answer: list[int]) -> list[int]:
    """The ids that transformers finds most likely in the place of each token of an answer. If they are the
    answer's, transformers would generate the same."""
    logits_TV = expected_logits(directory, torch.cat([asked_T, torch.tensor(answer)]))
    found: list[int] = logits_TV[len(asked_T) - 1 : -1].argmax(-1).tolist()
    return found


def make_case(family: str, directory: Path) -> Case:
    torch.manual_seed(1)
    config = FAMILIES[family]()
    model = model_class(config).from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.copy_(torch.randn_like(weight) * 0.3 + (0.0 if name.endswith("bias") else 1.0))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.3)
    model.save_pretrained(directory)
    ids_T = torch.randint(0, SHAPE["vocab_size"], (TOKENS,))
    ours = save_as_exaone(directory) if family == "exaone" else directory
    return Case(ours, read_config(ours), ids_T, expected_logits(directory, ids_T), directory)


def save_as_exaone(directory: Path) -> Path:
    """EXAONE 3.5's own code computes what a Llama does, under other names, and is not in transformers."""
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


class Pages:
    """Dense causal attention, or its windows, over a paged cache, for prefill chunks of one prompt and for
    decode rows."""

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

    def chunk(self, sequence: int, start: int) -> Callable[..., torch.Tensor]:
        def attend(layer: int, q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> torch.Tensor:
            table, end = self.tables[sequence], start + q_THD.shape[0]
            self.cache.write(layer, table, start, k_TGD, v_TGD)
            k_GSD, v_GSD = self.cache.gather(layer, table, end)
            positions_S = torch.arange(end, device=q_THD.device)
            seen_TS = positions_S <= positions_S[start:, None]
            seen_TS &= positions_S > positions_S[start:, None] - self.windows.get(layer, end)
            return sdpa(q_THD, k_GSD, v_GSD, seen_TS)

        return attend

    def step(self, positions: list[int]) -> Callable[..., torch.Tensor]:
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
                out.append(sdpa(q_THD[row : row + 1], k_GSD, v_GSD, None))
            return torch.cat(out)

        return attend


def sdpa(
    q_THD: torch.Tensor, k_GSD: torch.Tensor, v_GSD: torch.Tensor, seen_TS: torch.Tensor | None
) -> torch.Tensor:
    q_HTD = q_THD.transpose(0, 1)[None]
    out = F.scaled_dot_product_attention(q_HTD, k_GSD[None], v_GSD[None], attn_mask=seen_TS, enable_gqa=True)
    return out[0].transpose(0, 1)


def table_of(tokens: int, seed: int = 0) -> list[int]:
    return torch.randperm(pages_for(tokens) + 3, generator=torch.Generator().manual_seed(seed)).tolist()


@functools.lru_cache(maxsize=4)
def load_stages(
    case: Case, stages: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[LayerStack]:
    return load_shares(case, case.config.split(stages), dtype, device)


def load_shares(
    case: Case, shares: Sequence[LayerShare], dtype: torch.dtype = torch.float32, device: str = "cpu"
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
            hidden_TC = stage.forward(hidden_TC, positions_T, pages.chunk(sequence, start))
        logits.append(stages[-1].logits(hidden_TC))
        start += length
    return torch.cat(logits)
