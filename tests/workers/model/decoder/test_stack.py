"""Our decoder against transformers: every family, whole, split into stages and cut into chunks, in fp32.

The two share no code below the tokenizer, and the tiny configurations are drawn so that every part matters:
norm weights and biases are not what they are initialised to, and rope scaling bends within the prompt.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers

from deltafront.benchmarks.testing import row_errors
from deltafront.workers.kv.cache import PagedKVCache
from deltafront.workers.kv.pages.pool import PAGE_TOKENS, pages_for
from deltafront.workers.model.decoder.load import load_stack
from deltafront.workers.model.decoder.stack import LayerStack
from deltafront.workers.model.directory.json_files import ModelError
from deltafront.workers.model.directory.layer_shares import LayerShare
from deltafront.workers.model.directory.model_config import ModelConfig, read_config
from deltafront.workers.model.directory.store import DEFAULT_MODEL, embedded_gguf, model_directory
from deltafront.workers.model.weights.stack_weights import StackSpec

LIMIT = 1e-4
TOKENS = 150
CUTS = {"whole": (TOKENS,), "chunks": (48, 16, 64, 22), "ragged": (7, 100, 1, 42)}
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
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
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
    "llama-biases": lambda: transformers.LlamaConfig(
        **SHAPE | {"hidden_size": 96}, attention_bias=True, mlp_bias=True
    ),
    "qwen3-biases": lambda: transformers.Qwen3Config(**SHAPE, attention_bias=True),
    "seed-oss": lambda: transformers.SeedOssConfig(**SHAPE),
    "mistral3": lambda: transformers.Mistral3Config(
        text_config=transformers.MistralConfig(**SHAPE, sliding_window=None),
        vision_config=transformers.PixtralVisionConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, patch_size=14
        ),
    ),
    "seed-oss-all-biases": lambda: transformers.SeedOssConfig(
        **SHAPE, attention_out_bias=True, mlp_bias=True
    ),
}


@dataclass(frozen=True)
class Case:
    """A saved model, what it is, token ids and the logits transformers gives for them."""

    directory: Path
    config: ModelConfig
    ids_T: torch.Tensor
    logits_TV: torch.Tensor


def model_class(config: Any) -> Any:
    """Mistral3 is a language model with parts for images."""
    wrapped = isinstance(config, transformers.Mistral3Config)
    return transformers.AutoModelForImageTextToText if wrapped else transformers.AutoModelForCausalLM


def expected_logits(directory: Path, ids_T: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    config = transformers.AutoConfig.from_pretrained(directory)
    model = model_class(config).from_pretrained(directory, dtype=dtype).eval()
    with torch.no_grad():
        return model(ids_T[None]).logits[0].float()


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
    model.save_pretrained(directory)
    ids_T = torch.randint(0, SHAPE["vocab_size"], (TOKENS,))
    return Case(directory, read_config(directory), ids_T, expected_logits(directory, ids_T))


class Pages:
    """Dense causal attention over a paged cache, for prefill chunks of one prompt and for decode rows."""

    def __init__(
        self,
        config: ModelConfig,
        tables: list[list[int]],
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        pages = 1 + max(page for table in tables for page in table)
        self.tables = [torch.tensor(table, dtype=torch.int32, device=device) for table in tables]
        layers = range(config.layers)
        self.cache = PagedKVCache(layers, config.kv_heads, config.head_dim, pages, dtype, device)

    def chunk(self, sequence: int, start: int) -> Callable[..., torch.Tensor]:
        def attend(layer: int, q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> torch.Tensor:
            table, end = self.tables[sequence], start + q_THD.shape[0]
            self.cache.write(layer, table, start, k_TGD, v_TGD)
            k_GSD, v_GSD = self.cache.gather(layer, table, end)
            positions_S = torch.arange(end, device=q_THD.device)
            seen_TS = positions_S <= positions_S[start:, None]
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
                k_GSD, v_GSD = self.cache.gather(layer, table, position + 1)
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


def held(weights: Any) -> dict[int, int]:
    """Numbers in every tensor of a stage, by where it lies: shared ones count once."""
    if isinstance(weights, torch.Tensor):
        return {weights.data_ptr(): weights.numel()}
    parts = weights if isinstance(weights, tuple) else vars(weights).values() if weights is not None else ()
    return {key: count for part in parts for key, count in held(part).items()}


@pytest.mark.parametrize("stages", [1, 2, 6])
def test_weights_and_kv_are_counted_as_they_are_loaded(case: Case, stages: int) -> None:
    config = case.config
    for stage, stack in enumerate(load_stages(case, stages)):
        ends = {"embedding": stage == 0, "head": stage == stages - 1}
        assert sum(held(stack._weights).values()) == config.weights(
            len(stack.layers), len(stack.mlps), **ends
        )
        cache = PagedKVCache(stack.layers, config.kv_heads, config.head_dim, 3, torch.float16, "cpu")
        assert 2 * cache.k_LPSGD.nbytes == 3 * PAGE_TOKENS * config.kv_values(len(stack.layers)) * 2


def assert_bf16_is_no_worse_than_transformers(logits_TV: torch.Tensor, case: Case) -> None:
    """Both are measured against fp32, in the mean and in the worst row."""
    theirs_TV = expected_logits(case.directory, case.ids_T, torch.bfloat16)
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
