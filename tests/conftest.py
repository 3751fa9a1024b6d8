"""Runs Triton kernels in the interpreter if there is no CUDA device, fixes the seeds, and tells pytest-xdist
which tests share a process."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

# Before numpy is imported, whose small matrix products the interpreter uses: a second thread would wait by
# spinning, and take the core of other processes.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is defined
    from . import interpreter

    interpreter.without_idle_work()
    # Fill new memory with NaN, so that a test that reads it unwritten fails in every run, not by chance. On
    # a GPU this would also choose other kernels.
    torch.use_deterministic_algorithms(True, warn_only=True)

torch.set_num_threads(1)

# Calling Ray without a started cluster is an error. Otherwise Ray would join the last cluster in its files,
# which may be a dead one of another test, and would try to reach it forever.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"

# Ray and tests fork this process. gRPC's fork handlers could hang the child or cancel the parent's calls.
# Only children that call gRPC need them, and none does.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

# By default Ray's workers have low priority, so besides other tests they would get almost no CPU, and slow
# starts fail.
for _name, _value in {
    "RAY_worker_niceness": "0",
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_gcs_server_port_wait_time_s": "300",
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "300",
    "RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S": "300",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "300",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
}.items():
    os.environ.setdefault(_name, _value)

# No deadline, because a busy machine makes examples slow. The same examples at every run, so that only a
# change can break a test; `pytest --hypothesis-profile=random` looks for new ones.
settings.register_profile("random", deadline=None)
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")

TOGETHER = {
    "tests/e2e/": "end to end",
    "tests/deploy/test_cluster.py": "cluster",
    "tests/service/door/clients/": "clients",
    "tests/service/test_served.py": "served",
    "tests/service/local/test_serve_process.py": "serve",
    "tests/workers/prefill/test_prefill_group.py": "actors",
    "tests/workers/decode/test_decode_worker.py": "actors",
    "tests/workers/test_mapped_actors.py": "actors",
    "tests/workers/kv/test_exported_pages_deaths.py": "actors",
    "tests/kernels/test_compile_sm90.py": "compiler",
    "tests/workers/test_states.py": "states",
    "tests/workers/test_specialisations.py": "specialisations",
    "tests/workers/model/decoder/test_stack.py": "families",
    "tests/workers/test_resume.py": "resumed",
    "tests/workers/model/weights/test_gguf_tokenizer.py": "vocabularies",
    "tests/workers/model/weights/test_tekken.py": "vocabularies",
    "tests/service/door/test_reasoning.py": "vocabularies",
    "tests/service/door/test_page.py": "browser",
}
"""Groups of test files that run in one process, because they share a service that starts slowly or take long;
the longest first. Each group has its own ports, so groups may run at the same time. A process may get several
groups, in this order, because Serve's settings must be in the environment before Ray is imported."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--acceptance", action="store_true", help="run tests/e2e at full size")
    parser.addoption("--image", action="store_true", help="build the image, which takes minutes")
    parser.addoption("--cluster", action="store_true", help="run tests/deploy/cluster, on a Kubernetes")
    parser.addoption("--ranks", type=int, default=1, help="ranks of a decode engine in tests/workers")
    parser.addoption("--long", action="store_true", help="run the tests of make test-long, and no others")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort this run's tests: the groups of TOGETHER first, in their order. With several ranks only those run
    whose engine has them."""
    long, several = config.getoption("--long"), config.getoption("--ranks") > 1

    def runs(item: pytest.Item) -> bool:
        has_ranks = not {"bench", "served"}.isdisjoint(getattr(item, "fixturenames", ()))
        return (item.get_closest_marker("long") is not None) == long and (has_ranks or not several)

    config.hook.pytest_deselected(items=[item for item in items if not runs(item)])
    items[:] = [item for item in items if runs(item)]
    starts = list(TOGETHER)

    def place(item: pytest.Item) -> int:
        return next((n for n, start in enumerate(starts) if item.nodeid.startswith(start)), len(starts))

    items.sort(key=place)


def pytest_fixture_setup(fixturedef: Any) -> None:
    """Refuse fixtures of scope "package": these folders are no packages, so they would live until the end of
    the session, and their Ray would fail the next file that starts one."""
    assert fixturedef.scope != "package", f"{fixturedef.argname}: take the scope module or session"


def pytest_collection_finish() -> None:
    """Keep the tests and their modules out of garbage collection, because they live until the end."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedule the groups of TOGETHER first. Every other file is one unit, so that one process makes and
    imports what its tests share."""
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False  # do not sort by number of tests

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((TOGETHER[start] for start in TOGETHER if nodeid.startswith(start)), file)

    return Together(config, log)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # without CUDA, torch.manual_seed would keep a stack trace for each test
        torch.default_generator.manual_seed(0)
    yield
