"""How the K/V of a prompt is found again: roots, and a chain of hashes over pages.

A link is made from the link before and its page's token ids, so equal links have equal prefixes. The chain
says nothing of whose K/V it is: an entry is found by a root and a link.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from .methods import PAGE_TOKENS

LINK_BYTES = 16
PAGE_BYTES = PAGE_TOKENS * 4


def root_of(*about: object) -> bytes:
    """Return a root that is the same for equal values only. Their `repr` must say all of them."""
    return hashlib.sha256(repr(about).encode()).digest()[:LINK_BYTES]


def chain_of(ids: bytes, after: bytes = b"") -> bytes:
    """Return a link for each full page of `ids` (little-endian uint32). after: the link of the page before
    them; empty at a prompt's beginning."""
    links = []
    for end in range(PAGE_BYTES, len(ids) + 1, PAGE_BYTES):
        after = hashlib.sha256(after + ids[end - PAGE_BYTES : end]).digest()[:LINK_BYTES]
        links.append(after)
    return b"".join(links)


def links_of(chain: bytes) -> Iterator[bytes]:
    for place in range(0, len(chain), LINK_BYTES):
        yield chain[place : place + LINK_BYTES]


@dataclass(frozen=True, kw_only=True)
class PromptKey:
    """Finds what is remembered of a prompt, and names what it leaves.

    root: of owner, salt, model and the method that reads it. exact_root: the same of dense attention, whose
    K/V serves every method; equal to `root` where the method reads this prompt exactly. chain: of its full
    pages. tail: the packed ids behind them. lasting_tokens: of what a prefill group reads of it, so many
    first tokens get the K/V that they get in a longer prompt. retain_s: how long to keep it rather than
    others; None: it leaves nothing.
    """

    root: bytes
    exact_root: bytes
    lasting_tokens: int
    chain: bytes = field(repr=False)
    tail: bytes = field(repr=False, default=b"")
    retain_s: float | None = 0.0

    @property
    def exact(self) -> bool:
        return self.root == self.exact_root

    def longer(self, ids: bytes) -> bytes:
        """Return the chain with the pages that `ids` behind the prompt fill."""
        return self.chain + chain_of(self.tail + ids, self.chain[-LINK_BYTES:])
