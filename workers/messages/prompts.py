"""Prefix-cache keys: a hash chain over a prompt's pages, under a root (owner, salt, model, method).

A link is a hash of the previous link and the page's token ids, so equal links mean equal prefixes. A cached
page's name is its root and its link.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from deltafront.kernels.constants import PAGE_TOKENS

LINK_BYTES = 16
PAGE_BYTES = PAGE_TOKENS * 4


def root_of(*about: object) -> bytes:
    """Hash these values into a root. Their `repr` must show them completely."""
    return hashlib.sha256(repr(about).encode()).digest()[:LINK_BYTES]


def chain_of(ids: bytes, after: bytes = b"") -> bytes:
    """Return a link for each full page of `ids` (little-endian uint32), concatenated.

    `after` is the link of the page before them; empty at a prompt's beginning.
    """
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
    """The key by which a prompt finds cached pages, and under which its own pages are cached.

    Attributes:
        root: Hash of owner, salt, model and the method that prefills the prompt.
        exact_root: The root for dense attention, whose KV serves every method; equal to `root` if the method
            prefills this prompt densely.
        lasting_tokens: Number of first tokens whose KV would be the same in a longer prompt.
        chain: Links of the full pages.
        tail: Packed token ids after the full pages.
        remembers: Whether to put the request's pages into the prefix cache when it ends.
        retain_s: Seconds for which its cached pages are evicted after all others.
    """

    root: bytes
    exact_root: bytes
    lasting_tokens: int
    chain: bytes = field(repr=False)
    tail: bytes = field(repr=False, default=b"")
    remembers: bool = True
    retain_s: float = 0.0

    @property
    def exact(self) -> bool:
        return self.root == self.exact_root

    def longer(self, ids: bytes) -> bytes:
        """Return the chain of the prompt followed by `ids` (packed)."""
        return self.chain + chain_of(self.tail + ids, self.chain[-LINK_BYTES:])
