"""Compares sampling with transformers' warpers, an integer reference of the hash, and observed
frequencies."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from deltafront.kernels.sampling.sample import gumbel, sample
from deltafront.workers.decode.step_rows import Row, sampling_rows
from deltafront.workers.messages.requests import Sampling

VOCAB = 300
CPU = torch.device("cpu")
MASK = (1 << 64) - 1


def logits_of(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def draw(logits: torch.Tensor, rows: list[Sampling], positions: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given = sampling_rows([Row(0, (), 0, 0, row, False) for row in rows], logits.shape[1], CPU)
    return sample(logits, given, torch.as_tensor(positions))


def warped(logits_V: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return the distribution from which transformers would sample."""
    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits_V[None].clone())
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    return scores[0].softmax(-1)


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def reference_gumbel(seed: int, position: int, token: int) -> float:
    golden = 0x9E3779B97F4A7C15
    stream = _mix((_mix((seed * golden + golden) & MASK) + position * golden) & MASK)
    bits = _mix((stream + (token + 1) * golden) & MASK)
    return -math.log(-math.log(((bits >> 12) + 0.5) * 2.0**-52))


def test_noise_equals_the_hash_of_seed_position_and_token() -> None:
    seeds = [0, 1, 2**63 - 1, -1, 2**40 + 3]
    positions = [0, 5, 131_072, 7, 7]
    noise = gumbel(torch.tensor(seeds), torch.tensor(positions), 50)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        wanted = [reference_gumbel(seed & MASK, position, token) for token in range(50)]
        torch.testing.assert_close(noise[row], torch.tensor(wanted, dtype=torch.float64))


def test_noise_is_gumbel_and_uncorrelated_between_positions() -> None:
    noise = gumbel(torch.zeros(2, dtype=torch.int64), torch.tensor([1, 2]), 200_000)
    assert torch.isfinite(noise).all()
    for row in noise:
        assert float(row.mean()) == pytest.approx(0.5772, abs=0.01)
        assert float(row.std()) == pytest.approx(math.pi / math.sqrt(6), abs=0.01)
    assert abs(float(torch.corrcoef(noise)[0, 1])) < 0.01


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.5, top_k=7),
        Sampling(temperature=1.5, top_p=0.7),
        Sampling(temperature=0.8, top_k=40, top_p=0.9),
        Sampling(temperature=1.2, top_k=10_000, top_p=0.3),
        Sampling(temperature=1.0, top_k=1),
        Sampling(temperature=1.0, top_p=1e-6),
    ],
)
def test_sampled_frequencies_match_transformers_distribution(sampling: Sampling) -> None:
    count, vocab = 6000, 30
    logits_V = logits_of(1, seed=4, vocab=vocab)[0]
    wanted = warped(logits_V, sampling)
    ids, logprobs = draw(logits_V.expand(count, -1), [sampling] * count, torch.arange(count))
    found = torch.bincount(ids, minlength=vocab) / count
    assert bool((found[wanted == 0] == 0).all()), "a dropped token was drawn"
    assert float((found - wanted).abs().sum()) < 4 * math.sqrt(vocab / count)
    torch.testing.assert_close(logprobs, logits_V.log_softmax(-1)[ids])


@pytest.mark.parametrize("top_k", [0, 1, 5, 299, 300, 5000])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.95, 1.0])
def test_filters_keep_the_same_tokens_as_transformers(top_k: int, top_p: float) -> None:
    from deltafront.kernels.sampling.sample import _filter

    logits = logits_of(8, seed=2)
    sampling = Sampling(temperature=1.0, top_k=top_k, top_p=top_p)
    limit = torch.full((8,), min(top_k or VOCAB, VOCAB))
    kept = _filter(logits, limit, torch.full((8, 1), top_p)) > -math.inf
    for row in range(8):
        assert torch.equal(kept[row], warped(logits[row], sampling) > 0)


def test_temperature_zero_is_greedy_with_any_other_options() -> None:
    logits = logits_of(3)
    rows = [
        Sampling(temperature=0.0),
        Sampling(temperature=0.0, top_k=1, seed=4),
        Sampling(temperature=0.0, top_p=0.1),
    ]
    ids, _ = draw(logits, rows, [1, 2, 3])
    assert torch.equal(ids, logits.argmax(-1))


def test_tiny_temperature_gives_finite_nearly_greedy_samples() -> None:
    logits = logits_of(4)
    ids, logprobs = draw(
        logits, [Sampling(temperature=1e-30, top_p=0.9), Sampling(temperature=1e-6)] * 2, [1, 2, 3, 4]
    )
    assert torch.equal(ids, logits.argmax(-1)) and bool(torch.isfinite(logprobs).all())


def test_samples_do_not_depend_on_other_rows_of_the_batch() -> None:
    logits = logits_of(6, seed=1)
    rows = [
        Sampling(temperature=0.0),
        Sampling(temperature=1.0, seed=1),
        Sampling(temperature=0.7, top_k=9, seed=2),
        Sampling(temperature=1.0, top_p=0.6, seed=-3),
        Sampling(temperature=1.0, top_k=30, top_p=0.8, seed=2**64 - 1),
        Sampling(temperature=2.0, seed=1),
    ]
    positions = [10, 11, 12, 13, 14, 11]
    ids, logprobs = draw(logits, rows, positions)
    order = [4, 0, 5, 2, 3, 1]
    shuffled, _ = draw(logits[order], [rows[i] for i in order], [positions[i] for i in order])
    assert shuffled.tolist() == ids[order].tolist()
    for i, row in enumerate(rows):
        one, logprob = draw(logits[i : i + 1], [row], [positions[i]])
        assert (int(one), float(logprob)) == (int(ids[i]), float(logprobs[i]))


def test_noise_changes_with_seed_and_position() -> None:
    logits = torch.zeros(40, VOCAB)
    by_seed, _ = draw(logits, [Sampling(temperature=1.0, seed=seed) for seed in range(40)], [5] * 40)
    by_position, _ = draw(logits, [Sampling(temperature=1.0, seed=3)] * 40, range(40))
    assert len(set(by_seed.tolist())) > 30 and len(set(by_position.tolist())) > 30
