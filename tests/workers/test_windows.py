"""Compares models with sliding windows, one with attention sinks, with transformers, for prompts of several
windows: in stages, decode steps, appended questions, recomputed blocks and calibration."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from deltafront.kernels.attention.inputs import window_begin
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.methods import MethodSpec, method_spec
from deltafront.tests.numerics import assert_rows_close, row_errors
from deltafront.tests.workers.in_process import local_controller
from deltafront.workers.calibration import delta_layer_search, delta_layers
from deltafront.workers.calibration.method_levels import method_levels
from deltafront.workers.calibration.probes import Document, Question
from deltafront.workers.calibration.tiles import tiles_read
from deltafront.workers.decode.decode_attention import LayerRole, PageSelectionError, plan_layers
from deltafront.workers.decode.reads import Read
from deltafront.workers.decode.runner import DecodeRunner, ReadStates
from deltafront.workers.decode.step_rows import Row
from deltafront.workers.messages.events import PrefillDone
from deltafront.workers.messages.requests import PrefillJob, Sampling
from deltafront.workers.messages.stages import FirstLogits, KVAnnouncement
from deltafront.workers.model.decoder.load import load_model
from deltafront.workers.model.decoder.recompute import BlockAttention
from deltafront.workers.model.decoder.stack import LayerStack
from deltafront.workers.prefill.group.chunks import ModelWork
from deltafront.workers.prefill.stage.warm_up import first_of_kinds
from deltafront.workers.settings import DecodeConfig, ModelSpec, PrefillConfig

LAYERS, VOCAB, WINDOW, TOKENS = 7, 199, 150, 700
WINDOWS, FULL = {0, 1, 3, 4, 6}, (2, 5)
_NEEDS = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, _NEEDS])]
SPARSE = method_spec("dpxa", {"min_tokens": 0, "tau": 0.3, "window": 1})


SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "sliding_window": WINDOW,
    "layer_types": ["full_attention" if layer in FULL else "sliding_attention" for layer in range(LAYERS)],
}


def gemma3(head_dim: int) -> Any:
    """Make a Gemma 3 with two RoPEs and norms with an offset."""
    config = transformers.Gemma3TextConfig(
        **SHAPE,
        intermediate_size=96,
        head_dim=head_dim,
        query_pre_attn_scalar=40,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    return transformers.Gemma3ForCausalLM(config)


def gpt_oss() -> Any:
    """Make a gpt-oss whose sinks take much of the attention."""
    config = transformers.GptOssConfig(
        **SHAPE, intermediate_size=32, head_dim=64, num_local_experts=4, num_experts_per_tok=2
    )
    made = transformers.GptOssForCausalLM(config)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if name.endswith("sinks"):
                weight.copy_(torch.randn_like(weight) + 4)
    return made


MODELS = {"gemma3": partial(gemma3, 64), "gemma3-heads-of-256": partial(gemma3, 256), "gpt-oss": gpt_oss}
"""Gemma's heads have 256 channels, for which GPU kernels have separate tile sizes."""
PARAMS = ["gemma3", pytest.param("gemma3-heads-of-256", marks=[pytest.mark.gpu, _NEEDS]), "gpt-oss"]


@pytest.fixture(scope="module", params=PARAMS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny model whose window is no multiple of a page or block."""
    torch.manual_seed(3)
    directory = tmp_path_factory.mktemp(request.param)
    MODELS[request.param]().save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def spec_of(model: Path, rolling: bool = False) -> ModelSpec:
    return ModelSpec(path=str(model), dtype="float32", rolling_buffer=rolling)


def ids_of(tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, tokens).tolist()


def theirs(model: Path) -> Any:
    made = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    made.generation_config = transformers.GenerationConfig(pad_token_id=0)  # no end-of-sequence token
    return made


class Collector:
    def __init__(self) -> None:
        self.kv: dict[int, list[Any]] = defaultdict(list)
        self.logits_V = torch.empty(0)

    def announce(self, announcement: KVAnnouncement) -> None:
        for n in range(announcement.layers):
            self.kv[announcement.layer + n].append(announcement.payload.sides_T)

    def joined(self, layer: int) -> list[torch.Tensor]:
        """Return k_TGD and v_TGD of the whole prompt."""
        return [torch.cat(side) for side in zip(*self.kv[layer], strict=True)]

    def first_logits(self, message: FirstLogits) -> None:
        self.logits_V = torch.from_numpy(np.array(message.logits))


async def prefilled(
    model: Path, ids: list[int], method: MethodSpec, device: str = "cpu", rolling: bool = False, **more: Any
) -> tuple[Any, Any]:
    """Return the KV that a group hands over, and its report."""
    sink = Collector()
    config = PrefillConfig(cache_tokens=2048, stream_lease_s=600.0, device=device, **more)
    controller = local_controller(spec_of(model, rolling), config, sink)
    packed = np.asarray(ids, dtype="<u4").tobytes()
    try:
        job = PrefillJob(request_id="r", token_ids=packed, method=method, decode_worker="decode:x")
        events = [event async for event in controller.prefill(job)]
    finally:
        await controller.stop()
    assert isinstance(events[-1], PrefillDone)
    return sink, events[-1].report


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rolling", [False, True])
@pytest.mark.parametrize(("stages", "chunk"), [(1, 128), (2, 128), (3, 384), (7, 256)])
async def test_prefill_with_sliding_windows_equals_transformers(
    model: Path, stages: int, chunk: int, rolling: bool, device: str
) -> None:
    ids = ids_of(TOKENS)
    sink, report = await prefilled(
        model, ids, method_spec("dense"), device, rolling, stages=stages, chunk_tokens=chunk
    )
    assert {*sink.kv} == ({*FULL} if rolling else {*range(LAYERS)})
    with torch.no_grad():
        wanted_V = theirs(model)(torch.tensor(ids)[None]).logits[0, -1]
    assert float(row_errors(sink.logits_V[None], wanted_V[None]).max()) < 1e-4
    for density in report.density[:-1]:
        rows = range(-(-TOKENS // BLOCK))
        tiles = [row + 1 - (window_begin(row, WINDOW) if density.layer in WINDOWS else 0) for row in rows]
        assert (density.computed, density.causal) == (4 * sum(tiles), 4 * sum(row + 1 for row in rows))


async def test_sparse_methods_attend_to_windows_exactly_for_any_chunks(model: Path) -> None:
    ids = ids_of(TOKENS, 1)
    first, report = await prefilled(model, ids, SPARSE, stages=1, chunk_tokens=384)
    for stages, chunk in ((2, 128), (5, 256)):
        other, again = await prefilled(model, ids, SPARSE, stages=stages, chunk_tokens=chunk)
        assert float(row_errors(other.logits_V[None], first.logits_V[None]).max()) < 1e-4
        for layer in range(LAYERS):
            for side, wanted in zip(other.joined(layer), first.joined(layer), strict=True):
                assert_rows_close(side, wanted)
            assert report.density[layer].computed == again.density[layer].computed or layer == LAYERS - 1
    dense, _ = await prefilled(model, ids, method_spec("dense"), stages=1, chunk_tokens=384)
    for layer in range(FULL[0] + 1):  # no sparse layer comes before
        for side, wanted in zip(first.joined(layer), dense.joined(layer), strict=True):
            assert_rows_close(side, wanted)
    assert report.density[FULL[0]].computed < report.density[FULL[0]].causal


def runner_of(stack: LayerStack, **config: Any) -> DecodeRunner:
    plan = plan_layers(DecodeConfig(**config), stack.config.layers, stack.config.windows)
    return DecodeRunner(stack, plan, pages=80, max_batch=2, max_pages=70, state_slots=3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rolling", [False, True])
@pytest.mark.parametrize("selects", [False, True])
def test_appended_question_and_its_answer_equal_transformers(
    model: Path, selects: bool, rolling: bool, device: str
) -> None:
    """Page selection changes nothing here, because the page budget covers all pages."""
    document, question, tokens, slot = 500, 61, 64, 2
    ids = ids_of(document + question, 2)
    stack = load_model(spec_of(model, rolling), device)
    runner = runner_of(stack, full_layers=(), delta_layers=(2,), page_budget=64)
    for side in runner.cache.sides if runner.states is None else runner.states.slot(slot):
        side.fill_(float("nan"))  # what nobody wrote must not be read
    pages = tuple(np.random.default_rng(0).permutation(80)[:64].tolist())

    def append(start: int, end: int, last: bool = False) -> Any:
        states = ReadStates(slot if start else None, {end: (slot,)})
        return runner.append(pages, Read(start, ids[start:end]), last, states=states if rolling else None)

    append(0, 256)
    append(256, document)
    logits_V = append(document, len(ids), last=True).logits_V
    more: dict[str, Any] = {"state": slot} if rolling else {}
    row = Row(1, pages, len(ids), 0, Sampling(), selects, **more)
    found = [chosen.token for chosen in runner.first_tokens([logits_V], [row])]
    row = Row(1, pages, len(ids), found[0], Sampling(), selects, **more)
    while len(found) < tokens:
        found += [chosen.token for chosen in runner.decode([row])]
        row = Row(1, pages, row.length + 1, found[-1], Sampling(), selects, **more)
    ids_BT = torch.tensor(ids)[None]
    with torch.no_grad():
        mask_BT = torch.ones_like(ids_BT)
        whole_BT = theirs(model).generate(
            ids_BT, attention_mask=mask_BT, max_new_tokens=tokens, do_sample=False
        )
        wanted_V = theirs(model)(ids_BT).logits[0, -1]
    assert float(row_errors(logits_V[None].cpu(), wanted_V[None]).max()) < 1e-4
    assert found == whole_BT[0, len(ids) :].tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("blocks", [[1], [2, 4], [1, 2, 3]])
def test_recomputed_blocks_attend_within_their_windows(model: Path, blocks: list[int], device: str) -> None:
    """Recomputing blocks does not change a densely prefilled document. In another document, recomputed blocks
    become exact if all earlier ones are exact."""
    ids = ids_of(TOKENS, 3)
    runner = runner_of(load_model(spec_of(model), device), delta_layers=())
    pages = tuple(range(50))
    logits_V = runner.append(pages, Read(0, ids), last=True).logits_V
    sides = [side.clone() for side in runner.cache.sides]
    places = [page for block in blocks for page in range(block * 8, block * 8 + 8)] + [*range(40, 44)]
    for side in runner.cache.sides:
        side[:, places] = float("nan")  # their old KV must not be read
    chosen = [token for block in blocks for token in ids[block * BLOCK : (block + 1) * BLOCK]]
    question = Read(640, ids[640:])
    got_V = runner.recompute(pages, blocks, chosen, question, last=True).logits_V
    assert_rows_close(got_V[None].cpu(), logits_V[None].cpu())
    for side, exact in zip(runner.cache.sides, sides, strict=True):
        assert_rows_close(side[:, :43].cpu(), exact[:, :43].cpu())


def test_only_full_attention_layers_choose_blocks_to_recompute(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers with windows attend most to the blocks next to the question, whatever it asks."""
    looked: list[torch.Tensor] = []
    monkeypatch.setattr(BlockAttention, "add", lambda _self, q_THD, _k: looked.append(q_THD))
    runner, pages, ids = runner_of(load_model(spec_of(model), "cpu")), tuple(range(50)), ids_of(TOKENS, 4)
    runner.append(pages, Read(0, ids[:640]), last=False)
    runner.append(pages, Read(640, ids[640:], select_blocks=2, select_among=640), last=True)
    assert len(looked) == len(FULL)


def test_page_selection_applies_only_to_full_attention_layers(model: Path) -> None:
    windows = dict.fromkeys(WINDOWS, WINDOW)
    plan = plan_layers(DecodeConfig(full_layers=(), delta_layers=(2,)), LAYERS, windows)
    assert [layer for layer, role in enumerate(plan.roles) if role is LayerRole.SPARSE] == [5]
    assert plan.roles[2] is LayerRole.SCORING and plan.windows == windows
    with pytest.raises(PageSelectionError, match=r"delta_layers names \[3\], which attend to a window"):
        plan_layers(DecodeConfig(full_layers=(), delta_layers=(2, 3)), LAYERS, windows)


def documents(count: int) -> list[Document]:
    questions = [Question("a", tuple(ids_of(5, seed)), tuple(ids_of(3, seed))) for seed in range(2)]
    return [Document(ids_of(TOKENS, 10 + n), questions) for n in range(count)]


def test_calibration_applies_only_to_full_attention_layers(model: Path) -> None:
    stack = load_model(spec_of(model), "cpu")
    pages: dict[str, Any] = {"budget": 8, "recency": 2, "full_layers": ()}
    found = delta_layers.calibrate(stack, documents(2), 1, **pages)
    assert found.delta_layers == (2,)
    refined = delta_layer_search.refine(stack, documents(1), found, 1, **pages)
    assert refined.delta_layers == (2,) and refined.divergence is not None
    made = method_levels(stack, {TOKENS: documents(1)}, method_spec("dpxa", {"window": 1}), [0.8])
    (level,) = made.levels
    assert len(level.thresholds) == LAYERS
    assert all(level.thresholds[layer] == (1.0,) * 4 for layer in WINDOWS)
    assert any(level.thresholds[layer] != (1.0,) * 4 for layer in FULL)


def test_recorded_tiles_lie_inside_the_windows(model: Path) -> None:
    tiles = tiles_read(spec_of(model), ids_of(TOKENS), SPARSE, 256).read_LHNM
    for layer in WINDOWS:
        for row in range(tiles.shape[2]):
            assert (tiles[layer, :, row] == [window_begin(row, WINDOW) <= m <= row for m in range(6)]).all()
    assert not (tiles[list(FULL)] == np.tri(6, dtype=bool)).all()


def test_cost_model_counts_only_keys_inside_windows(model: Path) -> None:
    """A stage with windows is cheaper and therefore gets more layers. Its chunks cost the same at any
    position."""
    stack = load_model(spec_of(model), "cpu")
    config, per_pair = stack.config, stack.config.macs_per_pair
    (whole,) = ModelWork.of(config, 1, quantised=False).stages
    computed = [layer for layer in WINDOWS if layer != LAYERS - 1]
    matrices = (LAYERS - 1) * (config.attention_matrices + config.mlp_macs) + config.qkv_matrices
    assert whole.per_pair == len(FULL) * per_pair
    assert whole.per_token == matrices + len(computed) * WINDOW * per_pair
    assert first_of_kinds(stack) == [0, 2]
