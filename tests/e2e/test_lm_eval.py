"""lm-eval, an evaluation harness that nobody here wrote, scores the service as it scores transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from deltafront.benchmarks import DEMO_TEXT

from ..environments import python_with
from .wire import Wire

HERE = Path(__file__).parent
MARK = "scores: "
NEAR = {"rel": 1e-4, "abs": 1e-3}
"""The largest difference of float32 sums of log-probabilities. `tests/workers/decode/test_prompt_logprobs.py`
allows the same for one prompt."""


def flat(found: Any) -> list[float | bool]:
    """Return every number of lm-eval's results, in their order."""
    if isinstance(found, dict):
        found = list(found.values())
    return [one for inner in found for one in flat(inner)] if isinstance(found, list) else [found]


@pytest.mark.long
def test_lm_eval_scores_as_transformers_does(wire: Wire, http: str, model_directory: Path) -> None:
    python = python_with(HERE / "lm_eval.txt", "lm-eval")
    arguments = [http, wire.info().model, str(model_directory), str(DEMO_TEXT)]
    ours = {"PYTHONPATH": sysconfig.get_path("purelib"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [python, HERE / "run_lm_eval.py", *arguments],
        env={**os.environ, **ours}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert not ran.returncode, ran.stderr[-4000:]
    (line,) = [line for line in ran.stdout.splitlines() if line.startswith(MARK)]
    found = json.loads(line.removeprefix(MARK))
    served, own = flat(found["served"]), flat(found["transformers"])
    assert len(own) > 50 and True in own and False in own
    assert served == pytest.approx(own, **NEAR)
