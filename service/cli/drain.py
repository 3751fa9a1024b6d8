"""`deltafront drain`: drain this pod's Ray node, as a preStop hook.

Kubernetes announces a pod's termination only to the pod, not to Ray. If Ray drains the node, Serve replaces
its replicas and lets them finish.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Annotated, Any

import typer

from deltafront.service.cli.terminal import err, fail

_PERIOD_S = 1.0
_TIMEOUT_S = 30.0
"""Timeout of a call to the head."""
_HEAD_BACK_S = 90.0
"""How long to wait for a missing head: it may be drained itself, and without it nothing is replaced. After
this time the whole cluster has ended."""


class DrainError(Exception):
    """The node cannot be drained. The message is one line."""


def drain_command(
    deadline_s: Annotated[int, typer.Option(min=1, help="Seconds after which the node ends, at the latest.")],
    node_id: Annotated[
        str, typer.Option(help="Id of the node, if several run on this machine.", show_default=False)
    ] = "",
) -> None:
    """Drain this Ray node and wait until nothing runs on it (for a pod's preStop hook)."""
    from ray._private.services import find_node_ids

    try:
        head = RayHead()
        nodes = {node_id} if node_id else set(find_node_ids())
        left = drain_node(head, nodes, deadline_s, _say)
    except DrainError as error:
        fail(str(error))
    if left:
        fail(f"not drained after {deadline_s} s: {_count_by_class(left)}")
    _say("Drained: nothing runs here any more.")


def drain_node(
    head: RayHead,
    local: set[str],
    deadline_s: float,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Sequence[str]:
    """Drain the only node among `local` that Ray knows.

    If Ray's head is unreachable, wait, then request the drain again, because a new head does not know of it.

    Returns:
        The classes of the actors that still run after deadline_s.

    Raises:
        DrainError: There is no such node or more than one, or Ray refuses, or its head stays away.
    """
    from ray.exceptions import RayError

    heard, deadline, node, said = clock(), clock() + deadline_s, "", ""
    while True:
        try:
            node = node or _begin(head, local, deadline - clock())
            left, heard = head.actors(node), clock()
            if not left or heard >= deadline:
                return left
            line = f"Draining node {node}, waiting for {_count_by_class(left)}"
        except (RayError, TimeoutError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            node, line = "", f"Ray's head at {head.address} does not answer: {reason}"
            if clock() >= min(deadline, heard + _HEAD_BACK_S):
                raise DrainError(line) from None
            line += "; waits until it is back"
        if line != said:
            say(said := line)
        sleep(_PERIOD_S)


def _begin(head: RayHead, local: set[str], deadline_s: float) -> str:
    node = _find_node(head, local)
    if refusal := head.drain(node, deadline_s):
        raise DrainError(f"Ray refuses to drain node {node}: {refusal}")
    return node


def _find_node(head: RayHead, local: set[str]) -> str:
    is_head = head.nodes()
    known = sorted(local & is_head.keys())
    if not known:
        raise DrainError(f"none of Ray's nodes is here: {', '.join(sorted(local)) or 'no raylet runs'}")
    if len(known) > 1:
        raise DrainError(f"several of Ray's nodes are here, name one with --node-id: {', '.join(known)}")
    if is_head[known[0]]:
        raise DrainError("this is the node of Ray's head, which nothing can take the place of")
    return known[0]


def _count_by_class(actors: Sequence[str]) -> str:
    return ", ".join(f"{count} × {name}" for name, count in sorted(Counter(actors).items()))


def _say(line: str) -> None:
    err.print(line, markup=False, highlight=False, soft_wrap=True)


class RayHead:
    """A client of the Ray cluster's head, using the calls of `ray drain-node`. Nodes are ids in hex.

    Raises:
        DrainError: No Ray runs here.
        RayError, TimeoutError: Methods raise them if the head does not answer.
    """

    def __init__(self) -> None:
        from ray._private.services import canonicalize_bootstrap_address_or_die

        try:
            self.address = canonicalize_bootstrap_address_or_die("auto")
        except (ConnectionError, ValueError) as error:
            raise DrainError(f"no Ray runs here: {error}") from None

    @cached_property
    def _client(self) -> Any:
        from ray._raylet import GcsClient  # type: ignore[attr-defined]

        return GcsClient(address=self.address)

    def nodes(self) -> dict[str, bool]:
        """Return the ids of living nodes, and whether each is the head node."""
        from ray.core.generated.gcs_pb2 import GcsNodeInfo

        nodes = self._client.get_all_node_info(timeout=_TIMEOUT_S, state_filter=GcsNodeInfo.ALIVE)
        return {node.node_id.hex(): node.is_head_node for node in nodes.values()}

    def drain(self, node: str, deadline_s: float) -> str | None:
        """Drain a node. Returns Ray's reason if it refuses."""
        from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION

        deadline_ms = int((time.time() + deadline_s) * 1000)
        accepted, reason = self._client.drain_node(
            node, DRAIN_NODE_REASON_PREEMPTION, "it is taken away", deadline_ms, timeout=_TIMEOUT_S
        )
        return None if accepted else reason or "it does not say why"

    def actors(self, node: str) -> list[str]:
        """List the classes of a node's living actors."""

        async def living() -> Any:
            return await self._client.async_get_all_actor_info(actor_state_name="ALIVE", timeout=_TIMEOUT_S)

        actors = asyncio.run(living())
        return [actor.class_name for actor in actors.values() if actor.address.node_id.hex() == node]
