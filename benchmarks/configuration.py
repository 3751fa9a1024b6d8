"""Makes docs/configuration.md: every configuration key, from the dataclasses that define the keys.

A key's description is the docstring after its field, or its line under `Attributes:` of its class.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from deltafront.benchmarks.markdown import markdown
from deltafront.service.config import ServiceConfig
from deltafront.service.settings import DoorConfig
from deltafront.workers.settings import DecodeConfig, HandoffConfig, ModelSpec, PrefillConfig

SECTIONS: Mapping[str, type] = {
    "model": ModelSpec,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "handoff": HandoffConfig,
    "door": DoorConfig,
}
HEADER = ("key", "type", "default", "bounds", "what it does", "level")
BASIC = {
    "model": "path adapter dtype profile quantisation max_position_embeddings",
    "prefill": "groups stages device gpus_per_stage chunk_tokens cache_tokens method_options warm_up",
    "decode": (
        "workers tensor_parallel device gpus cache_tokens kv_dtype host_cache_gib page_selection page_budget"
        " delta_layers recompute_blocks max_batch warm_up"
    ),
    "handoff": "transport",
    "door": (
        "replicas host grpc_port http_port metrics_port tokens_file token_requests tls_certificate tls_key"
        " model_name default_method default_max_tokens reasoning sampling_defaults prefix_scope tracing"
    ),
}
"""Keys that a first configuration sets. The others are advanced."""


def table(section: str) -> str:
    return markdown(HEADER, list(rows(section)))


def rows(section: str) -> Iterator[list[str]]:
    """Yield a row for each key of a section. Raises KeyError for a key without a description."""
    kind = SECTIONS[section]
    properties = ServiceConfig.model_json_schema()["$defs"][kind.__name__]["properties"]
    words = {name: text for one in reversed(kind.__mro__[:-1]) for name, text in _words(one).items()}
    for name, schema in properties.items():
        level = "basic" if name in BASIC[section].split() else "advanced"
        yield [f"`{name}`", _type(schema), _default(schema), _bounds(schema), words[name], level]


def _words(kind: type) -> dict[str, str]:
    """Find the descriptions of the fields that a class declares, without those of its base classes."""
    (tree,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef)
    found = _attributes(ast.get_docstring(tree) or "")
    for field, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match after:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    found[field.target.id] = _line(text)
    return found


def _attributes(docstring: str) -> dict[str, str]:
    listed = docstring.partition("Attributes:\n")[2]
    entries = re.findall(r"^ {4}(\w[\w, ]*): (.*(?:\n {8}.*)*)", listed, re.MULTILINE)
    return {name: _line(text) for names, text in entries for name in names.split(", ")}


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _one(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of a value that is not null."""
    forms = [form for form in schema.get("anyOf", ()) if form.get("type") != "null"]
    return forms[0] if forms else schema


def _type(schema: Mapping[str, Any]) -> str:
    form = _one(schema)
    if form.get("type") == "array":
        return f"list of {_type(form['items'])}"
    names = {"integer": "int", "number": "float", "boolean": "bool", "string": "str", "object": "map"}
    if "$ref" in form:
        return "map"
    path = form.get("format") == "path" or form.get("pattern") == "^/"
    return "path" if path else names[form["type"]] if "type" in form else "str or map"


def _default(schema: Mapping[str, Any]) -> str:
    if "default" not in schema:
        return "{}" if schema.get("type") == "object" else "required"
    value = schema["default"]
    return "–" if value is None else f"`{json.dumps(value)}`"


def _bounds(schema: Mapping[str, Any]) -> str:
    form = _one(schema)
    if choices := form.get("enum") or [form[key] for key in ("const",) if key in form]:
        return ", ".join(f"`{choice}`" for choice in choices)
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "multipleOf": "multiple of"}
    return ", ".join(f"{sign} {form[key]:,}" for key, sign in signs.items() if key in form)
