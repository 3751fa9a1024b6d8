"""Which number format keeps the answers: one model in one process, needles at full length.

    python -m deltafront.benchmarks.precision --text FILE [FILE …] --tokens 131072 --needles 100 \
        --dtypes bfloat16 float16 float32 --methods dense dpxa

The document is read in chunks by the same layers and kernels as a prefill worker's, then each question is
answered greedily with full attention by torch. No service, so that only the arithmetic differs. Prints exact
answers and writes the JSON of --result.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn.functional import scaled_dot_product_attention

from deltafront.benchmarks import needles as hay
from deltafront.benchmarks.harness import commit_of
from deltafront.benchmarks.long_context import make_document
from deltafront.kernels.build import build
from deltafront.kernels.interface import AttentionInput, StateSpec
from deltafront.kernels.methods import method_spec
from deltafront.workers.model import store as model_store
from deltafront.workers.model.config import ModelConfig, read_config
from deltafront.workers.model.decoder import LayerStack, load_stack

ROOT = Path(__file__).resolve().parent.parent
ADAPTER = ROOT / "deploy" / "models" / "smollm2-135m-128k"
MODEL = "smollm2-135m-instruct"
DTYPES = ("bfloat16", "float16", "float32")
LONGEST_ANSWER = 48


class Reader:
    """A stack with its keys and values of one sequence, of at most `room` tokens."""

    def __init__(self, stack: LayerStack, room: int) -> None:
        config = stack.config
        shape = (config.layers, 1, config.kv_heads, room, config.head_dim)
        self._stack = stack
        self._k_LBGSD = torch.zeros(shape, dtype=stack.dtype, device=stack.device)
        self._v_LBGSD = torch.zeros_like(self._k_LBGSD)
        self.length = 0

    def read(self, ids: Sequence[int], method: str, chunk: int) -> None:
        """Read a document from the start with a prefill method."""
        self.length = 0
        config, attention = self._stack.config, build(method_spec(method))
        spec = StateSpec(
            1,
            config.q_heads,
            config.kv_heads,
            config.head_dim,
            len(ids),
            self._stack.device,
            self._stack.dtype,
        )
        states = [attention.new_state(replace(spec, layer=layer)) for layer in range(config.layers)]
        for first in range(0, len(ids), chunk):

            def attend(layer: int, q_BHTD: torch.Tensor, start: int = first) -> torch.Tensor:
                k_BGSD, v_BGSD = self._seen(layer, start + q_BHTD.shape[2])
                x = AttentionInput.of(
                    q_BHTD.contiguous(), k_BGSD, v_BGSD, q_start=start, prompt_tokens=len(ids)
                )
                return attention.attend(x, states[layer])[0]

            self._forward(ids[first : first + chunk], attend)

    def next_token(self, ids: Sequence[int]) -> int:
        """Append ids and give the most likely next one."""
        start = self.length

        def attend(layer: int, q_BHTD: torch.Tensor) -> torch.Tensor:
            rows = q_BHTD.shape[2]
            k_BGSD, v_BGSD = self._seen(layer, start + rows)
            seen_TS = None
            if rows > 1:
                seen_TS = torch.ones(rows, start + rows, dtype=torch.bool, device=q_BHTD.device).tril(start)
            return scaled_dot_product_attention(q_BHTD, k_BGSD, v_BGSD, attn_mask=seen_TS, enable_gqa=True)

        hidden_TC = self._forward(ids, attend)
        return int(self._stack.logits(hidden_TC[-1:]).argmax())

    def _forward(
        self, ids: Sequence[int], attend: Callable[[int, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        start, end = self.length, self.length + len(ids)

        def stored(layer: int, q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor) -> torch.Tensor:
            self._k_LBGSD[layer, 0, :, start:end] = k_TGD.transpose(0, 1)
            self._v_LBGSD[layer, 0, :, start:end] = v_TGD.transpose(0, 1)
            out_BHTD = attend(layer, q_THD.transpose(0, 1)[None])
            return out_BHTD[0].transpose(0, 1)

        positions_T = torch.arange(start, end, device=self._stack.device)
        hidden_TC = self._stack.forward(self._stack.embed(torch.tensor(ids)), positions_T, stored)
        self.length = end
        return hidden_TC

    def _seen(self, layer: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._k_LBGSD[layer, :, :, :tokens], self._v_LBGSD[layer, :, :, :tokens]


def answer(reader: Reader, tokenizer: Tokenizer, question: str) -> str:
    """The greedy answer up to a full stop; the reader then forgets the question."""
    before, given = reader.length, []
    token = reader.next_token(tokenizer.encode(question).ids)
    while len(given) < LONGEST_ANSWER and "." not in tokenizer.decode([token]):
        given.append(token)
        token = reader.next_token([token])
    reader.length = before
    text: str = tokenizer.decode(given)
    return text


def load(directory: Path, config: ModelConfig, dtype: str, device: str) -> LayerStack:
    return load_stack(
        directory,
        config,
        range(config.layers),
        embedding=True,
        head=True,
        dtype=getattr(torch, dtype),
        device=device,
        adapter=ADAPTER,
    )


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, nargs="+", default=[hay.DEMO_TEXT])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--needles", type=int, default=40)
    parser.add_argument("--questions", type=int, default=10)
    parser.add_argument("--seed", type=int, nargs="+", default=[3])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--methods", nargs="+", default=["dense"])
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--result", type=Path)
    parser.add_argument("--hardware", default="", help="what it ran on, for the record")
    parser.add_argument("--commit", help="recorded instead of git's answer, where there is no git")
    arguments = parser.parse_args()
    directory = model_store.model_directory(MODEL)
    config = read_config(directory, {"rope_theta": 8e6, "max_position_embeddings": 131_072})
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    documents = [
        (text.stem, seed, *make_document(text, arguments, seed, tokenizer))
        for text, seed in itertools.product(arguments.text, arguments.seed)
    ]
    rows = []
    for dtype in arguments.dtypes:
        reader = Reader(load(directory, config, dtype, arguments.device), arguments.tokens)
        for (text, seed, document, asked), method in itertools.product(documents, arguments.methods):
            reader.read(tokenizer.encode(document).ids, method, arguments.chunk)
            answers = {needle: answer(reader, tokenizer, needle.question) for needle in asked}
            wrong = {n.value: said.strip() for n, said in answers.items() if not n.answered_by(said)}
            exact = len(asked) - len(wrong)
            row = {"dtype": dtype, "text": text, "seed": seed, "method": method, "tokens": reader.length}
            rows.append({**row, "asked": len(asked), "exact": exact, "wrong": wrong})
            print(rows[-1], flush=True)
    if arguments.result:
        commit = arguments.commit or commit_of(ROOT)
        result = {"hardware": arguments.hardware, "commit": commit, "rows": rows}
        arguments.result.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
