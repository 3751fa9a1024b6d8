"""Measures how much of a sparse method's error the forms of the Δ correction leave, in a real model's layers.

    python -m deltafront.benchmarks.lab.delta_forms --model MODEL --text FILE --tokens 1500 --samples 2

Every layer's q, k and v come from a dense prefill of RULER's prompts. In all forms every γ-th row is dense.
A form changes the rows j up to the next dense row, with i the last dense row:

    equation 5   by nothing
    equation 6   by dense_i - sparse_i
    lse          by (dense_i - s_i sparse_i) - (1 - s_i) sparse_j, where s_i = exp(sparse lse_i - dense lse_i)
                 is the sparse keys' share of the softmax: equation 3 without its approximation

times a factor: a number, or "fitted" to the first prompt in each layer and head, which is not measured then.
Equation 6 times a factor is the option `spread`; no prefill kernel returns what `lse` needs.
The error left is the sum over rows of |corrected - dense|² divided by that of the sparse output: the mean
over layers and heads, the median, and the share of heads where it is below 1.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from deltafront.benchmarks.arguments import told
from deltafront.benchmarks.harness import write_json
from deltafront.benchmarks.lab.arguments import lab_parser, model_of, prompts_of, recorded
from deltafront.benchmarks.lab.samples import tokenised
from deltafront.benchmarks.markdown import markdown
from deltafront.benchmarks.reader import load_tokenizer
from deltafront.kernels.build import options_for, part_of
from deltafront.kernels.constants import BLOCK
from deltafront.kernels.interface import AttentionInput, StateSpec, no_phase
from deltafront.kernels.methods import registered
from deltafront.workers.evaluation.prompts import Sample
from deltafront.workers.evaluation.reader import Reader
from deltafront.workers.evaluation.setting import known_method, parse_method
from deltafront.workers.model.decoder.load import load_model

Changes = Mapping[str, torch.Tensor]
"""By form: change_HTD, the change of the sparse output."""
HEADER = ("method", "gamma", "form", "error left", "median", "heads below 1")


def attended(x: AttentionInput, seen_HTS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 out_HTD and lse_HT1 of attention over the seen keys."""
    k_HSD, v_HSD = (kv[0].float().repeat_interleave(x.group, 0) for kv in (x.k_BGSD, x.v_BGSD))
    logits_HTS = (x.q_BHTD[0].float() @ k_HSD.transpose(1, 2)) * x.scale
    logits_HTS.masked_fill_(~seen_HTS, -math.inf)
    return logits_HTS.softmax(-1) @ v_HSD, logits_HTS.logsumexp(-1, keepdim=True)


def seen_keys(method: str, x: AttentionInput) -> torch.Tensor:
    """Return the keys of the tiles that a method selects, seen_HTS, causally."""
    spec, (_, heads, rows, dim) = parse_method(method), x.q_BHTD.shape
    selector = part_of(registered(spec).selector or "")(options_for(spec))
    shape = StateSpec(1, heads, x.k_BGSD.shape[1], dim, rows, x.q_BHTD.device, x.q_BHTD.dtype)
    mask = selector.select(x, selector.new_state(shape), no_phase)
    tiles_HNM = torch.zeros(heads, x.query_blocks, x.key_blocks, dtype=torch.bool)
    for h in range(heads):
        for n in range(x.query_blocks):
            tiles_HNM[h, n, mask.index_BHNM[0, h, n, : mask.count_BHN[0, h, n]].long()] = True
    seen_HTS = tiles_HNM.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)[:, :rows, :rows]
    return seen_HTS & torch.ones(rows, rows, dtype=torch.bool).tril()


def changes(
    dense: tuple[torch.Tensor, torch.Tensor], sparse: tuple[torch.Tensor, torch.Tensor], gamma: int
) -> Changes:
    """Compute each form's change of the sparse output, by form."""
    (full_HTD, lse_HT1), (out_HTD, seen_HT1) = dense, sparse
    own_T = torch.arange(out_HTD.shape[1]) // gamma * gamma
    share_HT1 = (seen_HT1 - lse_HT1).exp().clamp(max=1)
    missing_HTD = full_HTD - share_HT1 * out_HTD
    return {
        "equation 6": (full_HTD - out_HTD)[:, own_T],
        "lse": missing_HTD[:, own_T] - (1 - share_HT1[:, own_T]) * out_HTD,
    }


class Errors:
    """Sums of squared errors over rows, after and before correction: by method, gamma and form, and by layer
    and head."""

    def __init__(self, factors: Sequence[float]) -> None:
        self._factors = factors
        self._fitted = dict[tuple[str, int, str, int], torch.Tensor]()
        self._sums = dict[tuple[str, int, str], dict[int, torch.Tensor]]()

    def fit(self, key: tuple[str, int, str], layer: int, change: torch.Tensor, wanted: torch.Tensor) -> None:
        others = torch.arange(wanted.shape[1]) % key[1] > 0
        change, wanted = change[:, others], wanted[:, others]
        self._fitted[*key, layer] = _sum(change * wanted) / _sum(change.square()).clamp(min=1e-12)

    def measure(
        self, key: tuple[str, int, str], layer: int, change: torch.Tensor, wanted: torch.Tensor
    ) -> None:
        others, before = torch.arange(wanted.shape[1]) % key[1] > 0, _sum(wanted.square())
        named = {f"{key[2]} × {factor:g}": torch.tensor(factor) for factor in self._factors}
        named[f"{key[2]}, fitted"] = self._fitted[*key, layer][:, None, None]
        for form, factor in ({"equation 5": torch.zeros(())} | named).items():
            sums = self._sums.setdefault((*key[:2], form), {})
            left = _sum((wanted - factor * change)[:, others].square())
            sums[layer] = sums.get(layer, 0) + torch.stack([left, before])

    def rows(self) -> Iterator[list[object]]:
        for (method, gamma, form), sums in self._sums.items():
            left, before = torch.cat(list(sums.values()), dim=1)
            ratio = (left / before)[before > 0]
            cells = (ratio.mean(), ratio.median(), (ratio < 1).float().mean())
            yield [method, gamma, form, *(round(float(cell), 3) for cell in cells)]


def _sum(x_HTD: torch.Tensor) -> torch.Tensor:
    return x_HTD.sum((1, 2))


@torch.inference_mode()
def layers_of(reader: Reader, sample: Sample) -> Iterator[tuple[int, AttentionInput]]:
    """Prefill a prompt densely. Yield each layer without a window, with its q, k and v."""
    queries = dict[int, torch.Tensor]()
    reader.length = 0
    reader.append(sample.ids, look=queries.__setitem__)
    for layer, q_THD in queries.items():
        k_GSD, v_GSD = reader.document(layer)
        yield layer, AttentionInput.of(q_THD.transpose(0, 1)[None].contiguous(), k_GSD[None], v_GSD[None])


def main(given: Sequence[str] | None = None) -> int:
    parser = lab_parser(__doc__, ["multikey_1"], 4096)
    add = parser.add_argument
    add("--gamma", type=int, nargs="+", default=[16, 64])
    add("--factors", type=float, nargs="+", default=[1.0, 0.5, 0.25])
    methods = ["streaming:min_tokens=0,window=128", "dpxa:min_tokens=0,share=0.2"]
    add("--methods", type=told(known_method), nargs="+", default=methods)
    add("--every", type=int, default=1, help="measure every n-th layer")
    arguments = parser.parse_args(given)
    tokenizer, errors = load_tokenizer(arguments.model), Errors(arguments.factors)
    samples = tokenised(prompts_of(arguments, tokenizer), tokenizer)
    stack = load_model(model_of(arguments), arguments.device)
    reader = Reader(stack, max(one.tokens for one in samples))
    for number, sample in enumerate(samples):
        act = errors.measure if number else errors.fit
        for layer, x in layers_of(reader, sample):
            if layer % arguments.every == 0:
                _compare(layer, x, arguments.methods, arguments.gamma, act)
        if number:
            print(f"\nprompts: {number}\n{markdown(HEADER, list(errors.rows()))}", flush=True)
        if number and arguments.result:
            rows = [dict(zip(HEADER, row, strict=True)) for row in errors.rows()]
            write_json(arguments.result, {**recorded(arguments), "prompts": number, "rows": rows})
    return 0


def _compare(
    layer: int,
    x: AttentionInput,
    methods: Sequence[str],
    gammas: Sequence[int],
    act: Callable[[tuple[str, int, str], int, torch.Tensor, torch.Tensor], None],
) -> None:
    rows = x.q_BHTD.shape[2]
    dense = attended(x, torch.ones(rows, rows, dtype=torch.bool).tril())
    for method in methods:
        sparse = attended(x, seen_keys(method, x))
        for gamma in gammas:
            for form, change in changes(dense, sparse, gamma).items():
                act((method, gamma, form), layer, change, dense[0] - sparse[0])


if __name__ == "__main__":
    sys.exit(main())
