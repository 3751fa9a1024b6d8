"""`deltafront drain`: takes the Ray node of this pod out of service, and returns when nothing runs there.

A pod's preStop. Serve starts what is on a node elsewhere, and lets it end what it has, only if Ray is told
that the node is going to be taken away; Kubernetes tells the pod alone.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Protocol

import typer

from .terminal import err, fail

_ASK_AGAIN_S = 1.0
_ANSWER_S = 30.0
"""A head that takes longer to answer is gone, as it is when the whole cluster is taken away."""


class DrainError(Exception):
    """Why a node cannot be drained, in one line."""


class Head(Protocol):
    """What Ray's head is asked. Nodes are named by their ids, in hex. Every method raises DrainError if it
    does not answer."""

    def nodes(self) -> dict[str, bool]:
        """The living nodes, and whether each is the head's own."""

    def drain(self, node: str, deadline_s: float) -> str:
        """Why it refuses; empty if it does not."""

    def actors(self, node: str) -> Sequence[str]:
        """The class of each actor that lives there; none if the node is gone."""


def drain_command(
    deadline_s: Annotated[
        int, typer.Option(min=1, help="Seconds until the node goes; what runs there has ended by then.")
    ],
    node_id: Annotated[
        str, typer.Option(help="Which node, where several run on this machine.", show_default=False)
    ] = "",
) -> None:
    """Have Ray move what runs on this node, and wait until nothing is left (a pod's preStop)."""
    try:
        head, here = RayHead(), {node_id} if node_id else _nodes_here()
        left = drained(head, here, deadline_s, _say)
    except DrainError as error:
        fail(str(error))
    if left:
        fail(f"not drained after {deadline_s} s: {_counted(left)}")
    _say("Drained: nothing runs here any more.")


def drained(
    head: Head,
    here: set[str],
    deadline_s: float,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Sequence[str]:
    """Drain the node that is `here`, and wait; what is left on it when deadline_s are over. say: is told what
    is waited for, whenever that changes. Raises DrainError."""
    living = head.nodes()
    found = sorted(here & living.keys())
    if not found:
        raise DrainError(f"none of Ray's nodes is here: {', '.join(sorted(here)) or 'no raylet runs'}")
    if len(found) > 1:
        raise DrainError(f"several of Ray's nodes are here, name one with --node-id: {', '.join(found)}")
    node, until, said = found[0], clock() + deadline_s, ""
    if living[node]:
        raise DrainError("this is the node of Ray's head, which nothing can take the place of")
    refused = head.drain(node, deadline_s)
    if refused:
        raise DrainError(f"Ray refuses to drain node {node}: {refused}")
    while left := head.actors(node):
        if said != (said := _counted(left)):
            say(f"Draining node {node}, waiting for {said}")
        if clock() >= until:
            break
        sleep(_ASK_AGAIN_S)
    return left


def _counted(actors: Sequence[str]) -> str:
    return ", ".join(f"{count} × {name}" for name, count in sorted(Counter(actors).items()))


def _say(line: str) -> None:
    err.print(line, markup=False, highlight=False, soft_wrap=True)


def _nodes_here() -> set[str]:
    """Of the raylets that run on this machine, or in this pod."""
    from ray._private.services import find_node_ids

    return set(find_node_ids())


class RayHead:
    """The head of the Ray cluster that this machine is part of, asked as `ray drain-node` asks it, since Ray
    has no public call for it. Raises DrainError if there is none."""

    def __init__(self) -> None:
        from ray._private.services import canonicalize_bootstrap_address_or_die
        from ray._raylet import GcsClient  # type: ignore[attr-defined]

        try:
            address = canonicalize_bootstrap_address_or_die("auto")
        except (ConnectionError, ValueError) as error:
            raise DrainError(f"no Ray runs here: {error}") from None
        with _answering(address):
            self._client = GcsClient(address=address)
        self._address = address

    def nodes(self) -> dict[str, bool]:
        from ray.core.generated.gcs_pb2 import GcsNodeInfo

        with _answering(self._address):
            found = self._client.get_all_node_info(timeout=_ANSWER_S, state_filter=GcsNodeInfo.ALIVE)
        return {node.node_id.hex(): node.is_head_node for node in found.values()}

    def drain(self, node: str, deadline_s: float) -> str:
        from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION

        why, until_ms = "it is taken away", int((time.time() + deadline_s) * 1000)
        with _answering(self._address):
            accepted, refused = self._client.drain_node(
                node, DRAIN_NODE_REASON_PREEMPTION, why, until_ms, timeout=_ANSWER_S
            )
        return "" if accepted else refused or "it does not say why"

    def actors(self, node: str) -> list[str]:
        async def living() -> Any:
            return await self._client.async_get_all_actor_info(actor_state_name="ALIVE", timeout=_ANSWER_S)

        with _answering(self._address):
            found = asyncio.run(living())
        return [actor.class_name for actor in found.values() if actor.address.node_id.hex() == node]


@contextmanager
def _answering(address: str) -> Iterator[None]:
    from ray.exceptions import RayError

    try:
        yield
    except (RayError, TimeoutError) as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DrainError(f"Ray's head at {address} does not answer: {line}") from None
