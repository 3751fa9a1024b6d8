"""Tests that a replica replaces its lost actors. The actors here only report their health."""

from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from deltafront.workers import replica as module
from deltafront.workers.model.directory.model_files import ModelError
from deltafront.workers.replica import Replica, cause_of


class Head:
    """An actor whose check.remote() returns `says`."""

    def __init__(self, says: Callable[[], Any]) -> None:
        self.check = self
        self._says = says

    async def remote(self) -> str:
        return str(await self._says())


async def well() -> str:
    return ""


async def lost() -> str:
    return "the group is lost: stage 1 died"


async def silent() -> str:
    await asyncio.Event().wait()
    return "never"


async def dead() -> str:
    raise ActorDiedError()


class Owner(Replica):
    def __init__(self, says: Callable[[], Any], build: Callable[[], None]) -> None:
        super().__init__("prefill:")
        self.name = "prefill:x"
        self.build = build
        self.head = Head(says)
        self._actors = [self.head]

    def _build(self) -> None:
        self.build()
        self.head = Head(well)
        self._actors.append(self.head)


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    actors: list[Any] = []
    monkeypatch.setattr(ray, "kill", actors.append)
    monkeypatch.setattr(module, "HEAD_PATIENCE_S", 0.01)
    return actors


@pytest.mark.parametrize("says", [lost, silent, dead])
async def test_replaces_a_head_actor_that_is_lost_silent_or_dead(
    says: Callable[[], Any], killed: list[Any]
) -> None:
    built: list[str] = []
    owner = Owner(says, lambda: built.append("again"))
    head = owner.head
    await owner.check_health()
    assert owner._rebuilding is not None
    await owner._rebuilding
    await owner.check_health()
    assert killed == [head] and built == ["again"] and owner.head is not head
    await owner.check_health()
    assert built == ["again"], "a head that is well is left alone"


async def test_concurrent_health_checks_replace_a_lost_head_actor_once(killed: list[Any]) -> None:
    built: list[str] = []

    async def lost_in_a_moment() -> str:
        await asyncio.sleep(0)
        return await lost()

    owner = Owner(lost_in_a_moment, lambda: built.append("again"))
    await asyncio.gather(*(owner.check_health() for _ in range(3)))
    assert owner._rebuilding is not None
    await owner._rebuilding
    assert built == ["again"] and len(killed) == 1


async def test_late_health_check_does_not_replace_the_new_head_actor(
    killed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HEAD_PATIENCE_S", 60.0)
    built, answer = list[str](), asyncio.Event()

    async def lost_but_late() -> str:
        await answer.wait()
        return "the group is lost: stage 1 died"

    owner = Owner(lost_but_late, lambda: built.append("again"))
    late = asyncio.create_task(owner.check_health())
    await asyncio.sleep(0)
    owner.head._says = lost
    await owner.check_health()
    assert owner._rebuilding is not None
    await owner._rebuilding
    answer.set()
    await late
    await owner._rebuilding
    assert built == ["again"]


async def test_replica_is_healthy_for_a_limited_time_while_replacing_actors(
    killed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    owner = Owner(lost, lambda: go_on.wait() and None)
    try:
        await owner.check_health()
        while not killed:
            await asyncio.sleep(0.005)
        for _ in range(3):
            await owner.check_health()
        assert len(killed) == 1, "it is replaced once"
        monkeypatch.setattr(module, "REBUILD_PATIENCE_S", -1.0)
        with pytest.raises(RuntimeError, match="prefill:x could not be replaced"):
            await owner.check_health()
    finally:
        go_on.set()
    assert owner._rebuilding is not None
    await owner._rebuilding
    await owner.check_health()


def of_a_constructor(error: Exception) -> ActorDiedError:
    """Return Ray's error for an actor whose constructor raised `error` in another process."""
    try:
        raise error
    except Exception:
        text = f"ray::DecodeActor.__init__() (pid=7)\n{traceback.format_exc()}"
    return ActorDiedError(RayTaskError("__init__", text, error, actor_id="a", pid=7, ip="10.0.0.1"))


@pytest.mark.parametrize("error", [ModelError("no model '/x': fetch it"), MemoryError("1 GiB is missing")])
def test_start_raises_the_actors_error_even_if_ray_says_unavailable(error: Exception) -> None:
    """Ray first says that the actor cannot be reached, and gives the reason a moment later."""
    errors = iter([ActorUnavailableError("RPC error", b"0" * 16), of_a_constructor(error)])

    class Actor:
        @property
        def __ray_ready__(self) -> Actor:
            return self

        def remote(self) -> None:
            raise next(errors)

    def build() -> None:
        raise ActorUnavailableError("RPC error", b"0" * 16)

    owner = Owner(well, build)
    owner._actors = [Actor()]
    with pytest.raises(type(error)) as raised:
        owner._begin()
    assert str(raised.value) == str(error) and raised.value.__suppress_context__
    said = traceback.format_exception_only(raised.value)
    assert said[-1].endswith(f"{type(error).__name__}: {error}\n")


def test_start_raises_rays_error_if_ray_gives_no_reason() -> None:
    died = ActorDiedError()
    assert cause_of(died) is died
