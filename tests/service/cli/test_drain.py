"""`deltafront drain`: its calls to Ray's head, its waiting time, and its errors."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from deltafront.service.cli import drain
from deltafront.service.cli.drain import DrainError, drain_node
from deltafront.service.cli.main import app

GROUP, STAGE, WORKER = "ServeReplica:deltafront:PrefillGroup", "StageActor", "DecodeActor"


class FakeHead:
    """The head of a cluster with nodes `head`, `a` and `b`. left: lists of actors on `a`, one for each call.
    The last one is repeated."""

    def __init__(self, *left: list[str], refuses: str = "") -> None:
        self._left, self._refuses = list(left), refuses
        self.asked: list[tuple[str, float]] = []
        self.now = 0.0

    def nodes(self) -> dict[str, bool]:
        return {"head": True, "a": False, "b": False}

    def drain(self, node: str, deadline_s: float) -> str:
        self.asked.append((node, deadline_s))
        return self._refuses

    def actors(self, node: str) -> list[str]:
        assert self.asked == [(node, 60)], "it looks before it has asked"
        return self._left.pop(0) if len(self._left) > 1 else self._left[0]

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def run(head: FakeHead, *here: str) -> tuple[list[str], list[str]]:
    """Run the command. Return the actors that were left, and the printed lines."""
    said: list[str] = []
    left = drain_node(head, set(here), 60, said.append, lambda: head.now, head.sleep)
    return list(left), said


def test_drain_waits_until_its_own_node_is_empty() -> None:
    everything = [STAGE, GROUP, STAGE]
    head = FakeHead(everything, everything, [GROUP], [])
    left, said = run(head, "a", "dead long ago")
    assert left == []
    assert head.asked == [("a", 60)]
    assert said == [
        f"Draining node a, waiting for 1 × {GROUP}, 2 × {STAGE}",
        f"Draining node a, waiting for 1 × {GROUP}",
    ], "each once"


def test_drain_ends_at_the_deadline_and_not_before() -> None:
    head = FakeHead([WORKER])
    left, _ = run(head, "a")
    assert left == [WORKER]
    assert head.now == 60


def test_drain_returns_at_once_from_an_empty_node() -> None:
    head = FakeHead([])
    assert run(head, "b") == ([], [])
    assert head.asked == [("b", 60)]
    assert head.now == 0


@pytest.mark.parametrize(
    ("here", "says"),
    [
        ([], "none of Ray's nodes is here: no raylet runs"),
        (["gone"], "none of Ray's nodes is here: gone"),
        (["a", "b"], "several of Ray's nodes are here, name one with --node-id: a, b"),
        (["head"], "the node of Ray's head"),
    ],
)
def test_refuses_to_drain_unless_one_worker_node_is_named(here: list[str], says: str) -> None:
    head = FakeHead([])
    with pytest.raises(DrainError, match=says):
        run(head, *here)
    assert head.asked == []


def test_drain_refused_by_ray_prints_the_reason() -> None:
    with pytest.raises(DrainError, match="refuses to drain node a: it is busy"):
        run(FakeHead([WORKER], refuses="it is busy"), "a")


class AwayHead(FakeHead):
    """A head that misses the first `away` calls, each for 20 s."""

    address = "10.0.0.1:6379"

    def __init__(self, away: int) -> None:
        super().__init__([WORKER], [])
        self._away = away

    def nodes(self) -> dict[str, bool]:
        if self._away:
            self._away -= 1
            self.now += 20.0
            raise TimeoutError("Deadline Exceeded")
        return super().nodes()

    def actors(self, node: str) -> list[str]:
        return self._left.pop(0) if len(self._left) > 1 else self._left[0]


def test_drain_waits_while_the_ray_head_moves_too() -> None:
    head, said = AwayHead(2), list[str]()
    assert drain_node(head, {"a"}, 540, said.append, lambda: head.now, head.sleep) == []
    assert head.asked == [("a", 540 - head.now + 1)], "what is left of the time that the pod has"
    assert said[0] == "Ray's head at 10.0.0.1:6379 does not answer: Deadline Exceeded; waits until it is back"


class MovedHead(FakeHead):
    """A head that is away from second 200 to second 240, while the node drains."""

    address = AwayHead.address

    def nodes(self) -> dict[str, bool]:
        if 200 <= self.now < 240:
            self.now += 10.0
            raise TimeoutError("Deadline Exceeded")
        return super().nodes()

    def actors(self, node: str) -> list[str]:
        self.nodes()
        return [WORKER] if self.now < 300 else []


def test_new_ray_head_is_asked_to_drain_the_node_again() -> None:
    head, said = MovedHead(), list[str]()
    assert drain_node(head, {"a"}, 540, said.append, lambda: head.now, head.sleep) == []
    assert [node for node, _left_s in head.asked] == ["a", "a"], "a new head is asked again"
    assert len(said) == 3 and said[0] == said[2], "draining, the head is away, draining"


def test_drain_ends_if_the_head_does_not_return() -> None:
    head = AwayHead(1000)
    with pytest.raises(DrainError, match=r"does not answer: Deadline Exceeded$"):
        drain_node(head, {"a"}, 540, lambda _line: None, lambda: head.now, head.sleep)
    assert 90 <= head.now <= 120 and head.asked == []


def command(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["drain", *arguments])
    return done.exit_code, done.stderr


@pytest.mark.parametrize(
    ("left", "code", "says"),
    [([], 0, "nothing runs here any more"), ([WORKER], 1, "not drained after 60 s: 1 × DecodeActor")],
)
def test_drain_command_exits_with_its_status(
    monkeypatch: pytest.MonkeyPatch, left: list[str], code: int, says: str
) -> None:
    def waited(_head: object, here: set[str], deadline_s: float, _say: object) -> list[str]:
        assert (here, deadline_s) == ({"a"}, 60)
        return left

    monkeypatch.setattr(drain, "RayHead", FakeHead)
    monkeypatch.setattr(drain, "drain_node", waited)
    status, output = command("--deadline-s", "60", "--node-id", "a")
    assert (status, says in output) == (code, True), output


def test_drain_says_in_one_line_that_ray_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "nowhere")
    status, output = command("--deadline-s", "60")
    assert status == 1
    assert "no Ray runs here" in output
    assert output.count("\n") == 1, output


def test_refuses_a_deadline_that_is_not_positive() -> None:
    assert command("--deadline-s", "0")[0] == 2
    assert command()[0] == 2
