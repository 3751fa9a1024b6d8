import asyncio
import builtins
import contextlib
import logging
import pydoc
import re
import secrets
import sys
import time
from collections.abc import Iterator
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deltafront.workers.messages.states import NAMESPACE
from deltafront.workers.remote import failure_of, start_actor

log = logging.getLogger(__name__)

HEAD_PATIENCE_S = 10.0
"""Seconds after which a head actor that does not answer counts as lost."""
REBUILD_PATIENCE_S = 600.0
"""Seconds that replacing lost actors may take. After that, Serve starts a new replica."""

_LAST_LINE = re.compile(
    r"^\s*(?P<kind>(?:\w+\.)*[A-Z]\w*(?:Error|Exception)): *(?P<message>\S.*)$", re.MULTILINE
)
"""Finds the last line of a traceback inside a text."""
_ASK_WHY_S = 10.0
"""Seconds to wait for the reason why a constructor failed. At first Ray may say only that the actor cannot be
reached."""


class Replica:
    """Base class of the Serve deployments that own a worker's actors. The actors die with the replica.

    A replica serves only health checks. API servers find the actors by name. When `head` is lost, the health
    check starts new actors for the dead ones (`_build`); live actors keep their loaded weights. If the new
    actors do not start, the health check fails, and Serve starts a new replica.

    Deploy a subclass with its module's `placement(config)` and `ray_actor_options={"num_cpus":
    REPLICA_CPUS}`. Its constructor calls `_begin`, which returns once all actors have loaded and raises any
    error of loading. Outside Serve, call `stop()` at the end.
    """

    head: Any
    """The actor that has the replica's name."""

    def __init__(self, prefix: str, drain_s: float = 0.0) -> None:
        self._prefix = prefix
        self._drain_s = drain_s
        # If Ray is not running, get_current_placement_group() would start it or join an old cluster.
        self._bundles = get_current_placement_group() if ray.is_initialized() else None
        self._actors: list[Any] = []
        self._rebuilding: asyncio.Future[None] | None = None
        self._began = 0.0

    def _begin(self) -> None:
        """Start all actors for the first time. Raises an actor's own exception, not Ray's wrapper."""
        with last_line_alone(type(self).__name__, served=self._bundles is not None):
            try:
                self._build()
            except RayActorError as error:
                raise self._why(error) from error

    def _why(self, error: RayActorError) -> RayActorError:
        """Return the error of the actor whose constructor failed; `error` if no constructor failed."""
        deadline = time.monotonic() + _ASK_WHY_S
        while not error.actor_init_failed and time.monotonic() < deadline:
            for actor in self._actors:
                try:
                    ray.get(actor.__ray_ready__.remote(), timeout=1.0)
                except RayActorError as found:
                    error = found if found.actor_init_failed else error
                except RayError:
                    continue
            time.sleep(0.1)
        return error

    def _build(self) -> None:
        """Start every missing actor, `head` last. Runs on a separate thread."""
        raise NotImplementedError

    async def check_health(self) -> None:
        """Check the actors, and start to replace lost ones. Serve calls this every second.

        The check succeeds while actors are being replaced, because loading takes longer than Serve waits.
        """
        if self._rebuilding is not None and not self._rebuilding.done():
            if time.monotonic() - self._began > REBUILD_PATIENCE_S:
                raise RuntimeError(f"{self.name} could not be replaced in {REBUILD_PATIENCE_S:g} s")
            return
        if self._rebuilding is not None:
            self._rebuilding.result()
        rebuilding = self._rebuilding
        fault = await self._fault()
        if fault and self._rebuilding is rebuilding:  # else a concurrent check has begun the replacement
            log.warning("%s: %s; replacing what is lost", self.name, fault)
            self._began = time.monotonic()
            self._rebuilding = asyncio.ensure_future(asyncio.to_thread(self._rebuild))

    async def _fault(self) -> str:
        try:
            async with asyncio.timeout(HEAD_PATIENCE_S):
                return str(await self.head.check.remote())
        except TimeoutError:
            return f"it has not answered for {HEAD_PATIENCE_S:g} s"
        except RayError as error:
            return f"it {failure_of(error).message}"

    def _rebuild(self) -> None:
        self._end(self.head)
        self._build()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the worker's numeric statistics, from which Serve's autoscaler chooses the replica count."""
        state = vars(await self.head.stats.remote())
        return {name: float(value) for name, value in state.items() if isinstance(value, int | float)}

    def __del__(self) -> Any:
        return self._drain() if self._bundles is not None and self._drain_s > 0 else None

    async def _drain(self) -> None:
        drain_s, self._drain_s = self._drain_s, 0.0  # once: Python will call __del__ again
        with contextlib.suppress(RayError, AttributeError):  # dead, or never started
            await self.head.drain.remote(drain_s)

    def stop(self) -> None:
        for actor in list(self._actors):
            self._end(actor)

    def _end(self, actor: Any) -> None:
        self._actors.remove(actor)
        ray.kill(actor)

    def _start(self, actor_class: Any, bundle: int, cpus: float, gpus: float, *arguments: Any) -> Any:
        self._actors.append(start_actor(actor_class, cpus, gpus, self._where(bundle), *arguments))
        return self._actors[-1]

    def _start_head(
        self, actor_class: Any, bundle: int, cpus: float, gpus: float, *arguments: Any, **named: Any
    ) -> None:
        """Start the actor that API servers find. Its name is new, because Ray may still know the old name."""
        self.name = self._prefix + secrets.token_hex(4)
        options = {"name": self.name, "namespace": NAMESPACE, **self._where(bundle)}
        self.head = start_actor(actor_class, cpus, gpus, options, self.name, *arguments, **named)
        self._actors.append(self.head)

    def _where(self, bundle: int) -> dict[str, Any]:
        if self._bundles is None:
            return {}
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self._bundles, bundle)}


@contextlib.contextmanager
def last_line_alone(name: str, *, served: bool) -> Iterator[None]:
    """Log the traceback of a constructor's error, and raise the actor's own exception.

    Args:
        served: True if this is a Serve replica. Serve shows the error as the deployment's message, where
            operators look for the reason. It then gets only the traceback's last line.
    """
    try:
        yield
    except Exception as error:
        log.error("%s cannot start", name, exc_info=True)
        if served:
            sys.tracebacklimit = 0
        raise cause_of(error) from None


def cause_of(error: Exception) -> Exception:
    """Return the exception that an actor raised; `error` itself if Ray does not report one."""
    if isinstance(error, RayTaskError):
        return error.cause if isinstance(error.cause, Exception) else error
    found = [*_LAST_LINE.finditer(str(error))] if isinstance(error, RayActorError) else []
    if not found:
        return error
    kind, message = found[-1]["kind"], found[-1]["message"]
    known = pydoc.locate(kind) if kind.startswith("deltafront.") else getattr(builtins, kind, None)
    if isinstance(known, type) and issubclass(known, Exception):
        with contextlib.suppress(TypeError):  # it takes more than a message
            return known(message)
    return RuntimeError(f"{kind}: {message}")
