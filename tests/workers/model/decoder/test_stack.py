"""Our decoder against transformers: every family, whole, split into stages and cut into chunks, in fp32.

The two share no code below the tokenizer, and the tiny configurations are drawn so that every part matters:
norm weights and biases are not what they are initialised to, and rope scaling bends within the prompt.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

from deltafront.benchmarks.in_ranks import parts
from deltafront.benchmarks.testing import row_errors
from deltafront.workers.kv.cache import PagedKVCache
from deltafront.workers.kv.pages.pool import PAGE_TOKENS, pages_for
from deltafront.workers.model.decoder.load import load_model, load_stack
from deltafront.workers.model.decoder.stack import LayerStack
from deltafront.workers.model.directory.headers import check_weights
from deltafront.workers.model.directory.json_files import ModelError
from deltafront.workers.model.directory.mixture_config import MixtureConfig
from deltafront.workers.model.directory.model_config import SHARED, ModelConfig, read_config
from deltafront.workers.model.directory.store import DEFAULT_MODEL, embedded_gguf, model_directory
from deltafront.workers.model.directory.text_part import own_names
from deltafront.workers.model.family_registry import FAMILIES as SERVED
from deltafront.workers.model.family_registry import gguf_families
from deltafront.workers.model.layer_shares import LayerShare
from deltafront.workers.model.weights.gguf_source import GgufSource
from deltafront.workers.model.weights.stack_weights import StackSpec, read_stack
from deltafront.workers.settings import ModelSpec

from .gguf_files import GGUF, write_gguf

LIMIT = 1e-4
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
    "mistral-windows": lambda: transformers.MistralConfig(**SHAPE, sliding_window=WINDOW),
    "mistral-mixed": lambda: transformers.MistralConfig(**SHAPE, sliding_window=WINDOW, layer_types=MIXED),
    "qwen2-windows": lambda: transformers.Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
    ),
    "phi3-windows": lambda: transformers.Phi3Config(
        **SHAPE | WITHOUT_HEAD_DIM, **PADDING, sliding_window=WINDOW
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
        **GEMMA3, rope_parameters={"full_attention": {"rope_type": "linear", "factor": 4.0}}
    ),
    "gemma3-multimodal": lambda: transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(
            **GEMMA3 | {"query_pre_attn_scalar": 40, "layer_types": MIXED, "vocab_size": 300_000}
        ),
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


@dataclass(frozen=True)
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
    config = transformers.AutoConfig.from_pretrained(directory)
    model = model_class(config).from_pretrained(directory, dtype=dtype).eval()
    with torch.no_grad():
        return model(ids_T[None]).logits[0].float()


def greedy_tokens(directory: Path, ids_T: torch.Tensor, tokens: int) -> list[int]:
    """Transformers' answer, which no token ends."""
    theirs = model_class(config := transformers.AutoConfig.from_pretrained(directory))
    model = theirs.from_pretrained(directory, config=config, dtype=torch.float32).eval()
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)
    more: dict[str, Any] = {"attention_mask": torch.ones_like(ids_T[None]), "do_sample": False}
    with torch.no_grad():
        whole_BT = model.generate(ids_T[None], max_new_tokens=tokens, **more)
    answer: list[int] = whole_BT[0, len(ids_T) :].tolist()
    return answer


@pytest.fixture(scope="module", params=list(FAMILIES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    directory = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(1)
    config = FAMILIES[request.param]()
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
    ours = save_as_exaone(directory) if request.param == "exaone" else directory
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


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("cuts", CUTS.values(), ids=list(CUTS))
def test_logits_equal_transformers(case: Case, stages: int, cuts: tuple[int, ...]) -> None:
    stack = load_stages(case, stages)
    logits_TV = prefill(stack, case.ids_T, cuts, Pages(case.config, [table_of(TOKENS)]))
    assert logits_TV.dtype == torch.float32
    assert float(row_errors(logits_TV, case.logits_TV).max()) < LIMIT


def cut_at(halves: Sequence[int]) -> list[LayerShare]:
    """Shares that end at these places of A0 M0 A1 M1 …, and a last one."""
    bounds = itertools.pairwise([0, *halves, 2 * SHAPE["num_hidden_layers"]])
    return [LayerShare(range((a + 1) // 2, (b + 1) // 2), range(a // 2, b // 2)) for a, b in bounds]


@pytest.mark.parametrize(
    "halves",
    [(1,), (5,), (9,), (6,), (1, 3), (3, 8), (4, 9), (1, 3, 5, 7, 9), (2, 3, 5, 8)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_cut_within_a_layer_changes_no_bit(case: Case, halves: tuple[int, ...], dtype: torch.dtype) -> None:
    """Logits, keys and values: what goes on between the halves is what the norm would have added up."""
    whole, cut = load_stages(case, 1, dtype), load_shares(case, cut_at(halves), dtype)
    pages = [Pages(case.config, [table_of(TOKENS)], dtype) for _ in range(2)]
    wanted_TV, found_TV = (
        prefill(stages, case.ids_T, CUTS["ragged"], one)
        for stages, one in zip((whole, cut), pages, strict=True)
    )
    assert torch.equal(found_TV, wanted_TV)
    for side in ("k_LPSGD", "v_LPSGD"):
        assert torch.equal(*(getattr(one.cache, side) for one in pages))
    assert sum(len(stack.layers) for stack in cut) == sum(len(stack.mlps) for stack in cut) == 6


@pytest.mark.parametrize(
    ("layers", "mlps"),
    [
        (range(2, 4), range(4)),
        (range(2, 4), range(2, 5)),
        (range(2, 4), range(3, 4)),
        (range(2, 4), range(2, 2)),
        (range(2), range(-1, 2)),
        (range(2, 2), range(1, 2)),
    ],
)
def test_mlps_of_other_layers_are_refused(case: Case, layers: range, mlps: range) -> None:
    weights: Any = None
    with pytest.raises(ModelError, match="layers range"):
        LayerStack(
            StackSpec(
                config=case.config,
                layers=layers,
                mlps=mlps,
                embedding=True,
                head=True,
                dtype=torch.float32,
                device=torch.device("cpu"),
            ),
            weights,
        )


def test_decode_steps_of_a_batch_equal_prefill(case: Case) -> None:
    """Two sequences of different lengths, one row each per step, against whole-prompt logits."""
    stack = load_stages(case, 1)
    numbers = list(range(2 * (pages_for(TOKENS) + 3)))
    pages = Pages(case.config, [numbers[::2], numbers[1::2]])
    lengths = [140, 53]
    for sequence, length in enumerate(lengths):
        prefill(stack, case.ids_T[:length], (length,), pages, sequence)
    for step in range(6):
        positions = [length + step for length in lengths]
        hidden_TC = stack[0].embed(case.ids_T[positions])
        hidden_TC = stack[0].forward(hidden_TC, torch.tensor(positions), pages.step(positions))
        errors = row_errors(stack[0].logits(hidden_TC), case.logits_TV[positions])
        assert float(errors.max()) < LIMIT


def test_greedy_tokens_equal_transformers(case: Case) -> None:
    """Through two stages, one by one."""
    asked_T = case.ids_T[: sum(ASKED)]
    assert answered(case, load_stages(case, 2)) == greedy_tokens(case.theirs or case.directory, asked_T, 64)


def answered(case: Case, stages: list[LayerStack], tokens: int = 64) -> list[int]:
    end = sum(ASKED)
    pages, found = Pages(case.config, [table_of(end + tokens)]), list[int]()
    logits_TV = prefill(stages, case.ids_T[:end], ASKED, pages)
    for position in range(end, end + tokens):
        found.append(int(logits_TV[-1].argmax()))
        hidden_TC = stages[0].embed(torch.tensor(found[-1:]))
        for stage in stages:
            hidden_TC = stage.forward(hidden_TC, torch.tensor([position]), pages.step([position]))
        logits_TV = stages[-1].logits(hidden_TC)
    return found


def widths(config: ModelConfig, name: str) -> list[int]:
    """The matrices that one of `MixtureWeights` or `MlpWeights` is made of."""
    shared = [
        width for module, width in config.mlp_modules.items() if (module == SHARED) == ("shared" in name)
    ]
    return [width for width in shared for _ in range(2 if config.is_gated else 1)]


def test_each_rank_has_its_heads_and_columns(case: Case) -> None:
    """The parts of fused tensors are shared one by one."""
    spec = StackSpec(
        config=case.config,
        layers=range(6),
        embedding=True,
        head=True,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    whole = read_stack(case.directory, spec)
    counts = (case.config.q_heads, case.config.kv_heads, case.config.kv_heads)
    heads = [count * case.config.head_dim for count in counts]
    for rank in range(2):
        part = read_stack(case.directory, replace(spec, rank=rank, ranks=2))
        for layer in range(6):
            mine, theirs = part.attentions[layer].qkv.weight_OI, whole.attentions[layer].qkv.weight_OI
            assert torch.equal(mine, torch.cat([x.chunk(2)[rank] for x in theirs.split(heads)]))
            for name in ("gate_up", "shared_gate_up"):
                if (theirs := getattr(whole.mlps[layer], name, None)) is not None:
                    rows = theirs.weight_OI.split(widths(case.config.of_layer(layer), name))
                    mine = getattr(part.mlps[layer], name).weight_OI
                    assert torch.equal(mine, torch.cat([x.chunk(2)[rank] for x in rows]))
            for name in ("down", "shared_down"):
                if (theirs := getattr(whole.mlps[layer], name, None)) is not None:
                    mine = getattr(part.mlps[layer], name).weight_OI
                    assert torch.equal(mine, theirs.weight_OI.chunk(2, dim=1)[rank])


def test_two_ranks_equal_transformers(case: Case) -> None:
    def computed(stack: LayerStack) -> torch.Tensor:
        return prefill([stack], case.ids_T, CUTS["ragged"], Pages(stack.config, [table_of(TOKENS)]))

    stacks = parts(case.directory, 2)
    with ThreadPoolExecutor(len(stacks)) as threads:
        for logits_TV in threads.map(computed, stacks):
            assert float(row_errors(logits_TV, case.logits_TV).max()) < LIMIT


def test_a_gguf_gives_the_same_logits(case: Case, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    kind = request.node.callspec.params["case"]
    if kind not in GGUF:
        pytest.skip("of this family another case has a GGUF")
    raw = json.loads(((case.theirs or case.directory) / "config.json").read_text())
    tensors = load_file(case.directory / "model.safetensors")
    write_gguf(tmp_path / "model.gguf", raw, tensors, *GGUF[kind])
    (tmp_path / "config.json").write_text(json.dumps(GgufSource(tmp_path / "model.gguf").config()))
    found = Case(tmp_path, read_config(tmp_path), case.ids_T, case.logits_TV)
    stages = load_stages(found, 2)
    logits_TV = prefill(stages, case.ids_T, CUTS["chunks"], Pages(found.config, [table_of(TOKENS)]))
    assert float(row_errors(logits_TV, case.logits_TV).max()) < LIMIT
    assert answered(found, stages) == answered(case, load_stages(case, 2))


def test_its_fp8_files_give_the_logits_of_their_numbers(case: Case, tmp_path: Path) -> None:
    """Whatever a family's tensors are called and however they are fused."""
    raw = json.loads((case.directory / "config.json").read_text())
    plain = load_file(case.directory / "model.safetensors")
    stored = dict(plain)
    for own, name in own_names(plain, raw).items():
        if ".layers." in own and plain[name].dim() == 2 and not own.endswith("mlp.gate.weight"):
            scales_O1 = plain[name].abs().amax(1, keepdim=True) / 448
            stored[name] = (plain[name] / scales_O1).to(torch.float8_e4m3fn)
            stored[f"{name}_scale"], plain[name] = scales_O1, stored[name].float() * scales_O1
    logits = []
    for kind, tensors in (("plain", plain), ("fp8", stored)):
        (directory := tmp_path / kind).mkdir()
        said = {"quantization_config": FP8_FILES} if kind == "fp8" else {}
        (directory / "config.json").write_text(json.dumps(raw | said))
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        config = read_config(directory)
        check_weights(directory, config)
        stages = load_stages(replace(case, directory=directory, config=config), 2)
        logits.append(prefill(stages, case.ids_T, CUTS["chunks"], Pages(config, [table_of(TOKENS)])))
    assert torch.equal(*logits)


def test_every_family_with_a_gguf_has_a_case() -> None:
    written = {gguf.MODEL_ARCH_NAMES[architecture] for architecture, _permuted in GGUF.values()}
    assert written == gguf_families().keys()


OUTSIDE = """
from deltafront.workers.model.families.family import Family
from deltafront.workers.model.family_registry import register
register(Family(
    name="Mine", architecture="MineForCausalLM", model_type="mine", keys={"depth": "num_hidden_layers"},
    layers="blocks.", tensors={"up": "mlp.up_proj", "table": "model.embed_tokens"}, fixed={"qk_norm": True},
    implied={"head_dim": 32},
))
"""


@mock.patch.dict(SERVED)
def test_a_family_from_outside_is_one_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3 by other names: the module is all that a worker is told."""
    config = FAMILIES["qwen3"]()
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "theirs")
    (mine := tmp_path / "mine").mkdir()
    raw = json.loads((tmp_path / "theirs" / "config.json").read_text())
    raw |= {"architectures": ["MineForCausalLM"], "model_type": "mine", "depth": raw.pop("num_hidden_layers")}
    names = {"model.layers.": "blocks.", "mlp.up_proj": "up", "model.embed_tokens": "table"}
    stored = {}
    for name, tensor in load_file(tmp_path / "theirs" / "model.safetensors").items():
        stored[functools.reduce(lambda name, pair: name.replace(*pair), names.items(), name)] = tensor
    save_file(stored, mine / "model.safetensors", metadata={"format": "pt"})
    (mine / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if k != "head_dim"}))
    (mine / "tokenizer.json").write_text("{}")
    (tmp_path / "family_from_outside.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(tmp_path)
    spec = ModelSpec(path=str(mine), dtype="float32", family_modules=("family_from_outside",))
    stages = [load_model(spec, "cpu", stage, 2) for stage in range(2)]
    ids_T = torch.randint(0, SHAPE["vocab_size"], (TOKENS,))
    logits_TV = prefill(stages, ids_T, CUTS["chunks"], Pages(stages[0].config, [table_of(TOKENS)]))
    assert float(row_errors(logits_TV, expected_logits(tmp_path / "theirs", ids_T)).max()) < LIMIT


def test_every_family_has_a_case() -> None:
    made = {*(config().model_type for config in FAMILIES.values()), "exaone"}
    assert {family.model_type for family in SERVED.values()} <= made


def held(weights: Any) -> dict[int, int]:
    """Numbers in every tensor of a stage, by where it lies: shared ones count once."""
    if isinstance(weights, torch.Tensor):
        return {weights.data_ptr(): weights.numel()}
    if weights is None or isinstance(weights, MixtureConfig):
        return {}
    parts = weights if isinstance(weights, tuple) else vars(weights).values()
    return {key: count for part in parts for key, count in held(part).items()}


@pytest.mark.parametrize("stages", [1, 2, 6])
def test_weights_and_kv_are_counted_as_they_are_loaded(case: Case, stages: int) -> None:
    config = case.config
    for stage, stack in enumerate(load_stages(case, stages)):
        ends = {"embedding": stage == 0, "head": stage == stages - 1}
        assert sum(held(stack._weights).values()) == config.weights(stack.layers, stack.mlps, **ends)
        cache = PagedKVCache(stack.layers, config.kv_heads, config.head_dim, 3, torch.float16, "cpu")
        assert 2 * cache.k_LPSGD.nbytes == 3 * PAGE_TOKENS * config.kv_values(len(stack.layers)) * 2


def assert_bf16_is_no_worse_than_transformers(logits_TV: torch.Tensor, case: Case) -> None:
    """Both are measured against fp32, in the mean and in the worst row."""
    theirs_TV = expected_logits(case.theirs or case.directory, case.ids_T, torch.bfloat16)
    ours_T, theirs_T = (row_errors(x.cpu(), case.logits_TV) for x in (logits_TV, theirs_TV))
    assert float(ours_T.mean()) < 1.2 * float(theirs_T.mean())
    assert float(ours_T.max()) < 1.5 * float(theirs_T.max())


def test_bf16_is_no_worse_than_transformers(case: Case) -> None:
    pages = Pages(case.config, [table_of(TOKENS)], torch.bfloat16)
    logits_TV = prefill(load_stages(case, 2, torch.bfloat16), case.ids_T, CUTS["chunks"], pages)
    assert_bf16_is_no_worse_than_transformers(logits_TV, case)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_equals_transformers_on_the_cpu(case: Case, dtype: torch.dtype) -> None:
    pages = Pages(case.config, [table_of(TOKENS)], dtype, "cuda")
    logits_TV = prefill(load_stages(case, 2, dtype, "cuda"), case.ids_T, CUTS["chunks"], pages)
    assert logits_TV.is_cuda
    if dtype == torch.float32:
        assert float(row_errors(logits_TV.cpu(), case.logits_TV).max()) < LIMIT
    else:
        assert_bf16_is_no_worse_than_transformers(logits_TV, case)


def test_attention_gets_every_layer_with_its_heads(case: Case) -> None:
    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.append((layer, q.shape[1:], k.shape[1:]))
        return torch.zeros_like(q)

    seen: list[Any] = []
    (stack,) = load_stages(case, 1)
    stack.forward(stack.embed(case.ids_T[:4]), torch.arange(4), attend)
    shape = (case.config.q_heads, case.config.head_dim), (case.config.kv_heads, case.config.head_dim)
    assert seen == [(layer, *shape) for layer in range(6)]


def test_ends_that_a_stage_lacks_raise(case: Case) -> None:
    first, last = load_stages(case, 2)
    assert first.embed(case.ids_T).shape == (len(case.ids_T), case.config.hidden)
    assert (first.has_head, last.has_head) == (False, True)
    with pytest.raises(ModelError, match="no LM head"):
        first.logits(torch.zeros(1, case.config.hidden))
    with pytest.raises(ModelError, match="no embedding"):
        last.embed(case.ids_T)


@pytest.fixture(scope="module")
def smollm2() -> Case:
    try:
        embedded_gguf()
    except ModelError as error:
        pytest.skip(str(error))
    directory = model_directory(DEFAULT_MODEL)
    ids_T = torch.randint(3, 49152, (96,), generator=torch.Generator().manual_seed(2))
    return Case(directory, read_config(directory), ids_T, expected_logits(directory, ids_T))


@pytest.mark.parametrize(("stages", "cuts"), [(1, (96,)), (2, (96,)), (3, (32, 50, 14))])
def test_smollm2_equals_transformers(smollm2: Case, stages: int, cuts: tuple[int, ...]) -> None:
    stack = load_stages(smollm2, stages)
    logits_TV = prefill(stack, smollm2.ids_T, cuts, Pages(smollm2.config, [table_of(96)]))
    assert float(row_errors(logits_TV, smollm2.logits_TV).max()) < LIMIT
