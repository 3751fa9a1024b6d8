"""Prefix-cache keys: a hash chain over a prompt's pages, under a root (a hash of owner, salt, model, method).

Each page has a link, the hash of the previous link and the page's token ids. Equal links mean equal prefixes.
A root and a link together identify a cached page.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from deltafront.kernels.constants import PAGE_TOKENS

LINK_BYTES = 16
PAGE_BYTES = PAGE_TOKENS * 4


def root_of(*about: object) -> bytes:
    """Hash values into the root of prefix-cache keys. Unequal values must have an unequal `repr`."""
    return hashlib.sha256(repr(about).encode()).digest()[:LINK_BYTES]


def chain_of(ids: bytes, after: bytes = b"") -> bytes:
    """Return the concatenated links of the full pages of `ids` (little-endian uint32).

    `after` is the link of the previous page; empty at a prompt's beginning.
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
    """The prefix-cache key of a prompt. It finds cached pages, and the prompt's own pages are cached under
    it.

    Attributes:
        root: Hash of owner, salt, model and the method that prefills the prompt.
        exact_root: The root of dense attention, whose KV every method may use; equal to `root` if the method
            prefills this prompt densely.
        lasting_tokens: Number of first tokens whose KV would be the same in a longer prompt.
        chain: Concatenated links of the full pages.
        tail: Token ids (little-endian uint32) after the last full page.
        remembers: True if the request's pages go into the prefix cache when it ends.
        retain_s: Seconds for which its cached pages are evicted only after all other cached pages.
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
        """Return the chain of the prompt with the token `ids` (little-endian uint32) appended."""
        return self.chain + chain_of(self.tail + ids, self.chain[-LINK_BYTES:])


def boundary_before(tokens: int) -> int:
    """Return the last page boundary before a prompt's last token, which is always computed; 0: none."""
    return max(0, tokens - 1) // PAGE_TOKENS * PAGE_TOKENS


def state_places(tokens: int, kept_tokens: int, spacing: int) -> tuple[int, ...]:
    """Return where a prefill stage keeps a prompt's state, as numbers of tokens, ascending: every `spacing`
    tokens, at the last page boundary, at the end of the session, and at the prompt's end.

    Args:
        kept_tokens: Tokens of the session that the request makes; 0: none.
        spacing: A multiple of PAGE_TOKENS.
    """
    places = {*range(spacing, tokens, spacing), boundary_before(tokens), kept_tokens, tokens}
    return tuple(sorted(places - {0}))
