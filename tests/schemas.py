"""Random JSON schemas with short answers, and random sets of tools."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

NAMES = st.text("abcxyz_", min_size=1, max_size=6)
LEAVES = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "string", "maxLength": 8}]),
    st.builds(lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
              st.integers(-50, 50), st.integers(0, 500)),
    st.builds(lambda values: {"enum": sorted(values)}, st.sets(NAMES, min_size=1, max_size=4)),
    st.just({"type": "string", "pattern": "^[a-f]{2,5}-[0-9]+$", "maxLength": 12}),
)  # fmt: skip


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def build(properties: dict[str, Any], optional: bool) -> dict[str, Any]:
        required = sorted(properties)[: len(properties) // 2] if optional else sorted(properties)
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    return st.builds(build, st.dictionaries(NAMES, inner, max_size=3), st.booleans())


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        _objects(inner),
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner,
                  st.integers(0, 3)),
        st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner),
    ),
    max_leaves=5,
)  # fmt: skip
TOOLS = st.lists(
    st.builds(
        lambda name, parameters: {"name": name, "description": "does it", "parameters": parameters},
        st.text("abcXYZ09_-.", min_size=1, max_size=12),
        _objects(SCHEMAS),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda tool: tool["name"],
)
