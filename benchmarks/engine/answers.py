"""Writes the service's greedy answers to fixed prompts, to compare two checkouts or two configurations.

    python benchmarks/engine/answers.py OUT.json [--tokens 131072] [--ranks 2] …

Run it as a file, with the checkout to test as `deltafront` on the path. It prints each answer's first tokens
and writes all tokens, by method and page selection.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from deltafront.benchmarks.arguments import parser_of
from deltafront.benchmarks.engine.model import SHAPES, write_model
from deltafront.benchmarks.engine.setup import ANSWER_ROOM, Setup, dpxa_share
from deltafront.service.client.client import DeltafrontClient
from deltafront.service.local.server_process import LocalService
from deltafront.workers.messages.events import Token


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="8b")
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--density", type=float, default=0.055)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--decode-gpu", default="own")
    parser.add_argument("--chunk", type=int, default=16_384)
    parser.add_argument("--model", type=Path, default=Path("/dev/shm/deltafront-answers"))
    given = parser.parse_args()
    device: Literal["cuda", "cpu"] = "cuda" if torch.cuda.is_available() else "cpu"
    shape = replace(SHAPES[given.shape], positions=given.tokens + ANSWER_ROOM)
    write_model(given.model, shape, torch.device(device))
    of_ranks = {"ranks": given.ranks} if "ranks" in {field.name for field in fields(Setup)} else {}
    setup = Setup(
        given.model,
        shape,
        given.tokens,
        stages=given.stages,
        decode_gpu=given.decode_gpu,
        chunk_tokens=given.chunk,
        device=device,
        **of_ranks,
    )
    options = {"share": dpxa_share(given.density, given.tokens), "min_tokens": 0}
    ids = np.random.default_rng(4).integers(0, shape.vocab, given.tokens).tolist()
    answers: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalService(setup.write(Path(folder)), start_s=500) as service,
        DeltafrontClient(service.address) as client,
    ):
        for method, its in (("dense", {}), ("dpxa", options)):
            for selection in ("full", "delta"):
                events = client.generate(
                    ids,
                    method=method,
                    skip_cache=True,
                    options=its,
                    max_tokens=given.answer,
                    ignore_eos=True,
                    page_selection=selection,
                )
                tokens = [event for event in events if isinstance(event, Token)]
                answers[f"{method} {selection}"] = [[one.token_id, one.logprob] for one in tokens]
                print(method, selection, [one.token_id for one in tokens[:8]], flush=True)
    given.out.write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
