"""Groups a streamed answer into blocks of reasoning, text and tool calls, as the Messages and Responses APIs
do."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from deltafront.service.request.answers import AnswerPart, CallPart


class BlockKind(Enum):
    REASONING = auto()
    TEXT = auto()
    CALL = auto()


class Step(Enum):
    OPEN = auto()
    GROW = auto()
    CLOSE = auto()


@dataclass
class Block:
    """A block, which may still grow. `text`: in a tool call, the arguments so far."""

    kind: BlockKind
    index: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


Change = tuple[Step, Block, str]
"""A step of a block, and the text that is added to it."""


class Blocks:
    """Groups an answer's parts into blocks. Text of nothing but white space makes no block."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._growing = False
        self._space = ""

    def push(self, parts: Iterable[AnswerPart]) -> list[Change]:
        changes = list[Change]()
        for part in parts:
            changes += self._more(BlockKind.REASONING, part.reasoning)
            changes += self._more(BlockKind.TEXT, part.content)
            for call in part.calls:
                changes += self._call(call)
        return changes

    def close(self) -> list[Change]:
        """Close the last block."""
        closed = [(Step.CLOSE, self.blocks[-1], "")] if self._growing else []
        self._growing, self._space = False, ""
        return closed

    def _more(self, kind: BlockKind, text: str) -> list[Change]:
        if not text:
            return []
        if self._growing and self.blocks[-1].kind is kind:
            return self._grow(text)
        text = self._space + text
        if not text.strip():
            self._space = text
            return []
        return [*self._open(Block(kind, len(self.blocks))), *self._grow(text)]

    def _call(self, call: CallPart) -> list[Change]:
        opened = list[Change]()
        if call.call_id:
            opened = self._open(Block(BlockKind.CALL, len(self.blocks), call.call_id, call.name))
        return opened + (self._grow(call.arguments) if call.arguments else [])

    def _open(self, block: Block) -> list[Change]:
        closed = self.close()
        self.blocks.append(block)
        self._growing = True
        return [*closed, (Step.OPEN, block, "")]

    def _grow(self, text: str) -> list[Change]:
        self.blocks[-1].pieces.append(text)
        return [(Step.GROW, self.blocks[-1], text)]
