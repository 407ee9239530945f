"""How the scripts' templates are read and filled: what train.py and infer.py share."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from planner.allocator_settings import DEFAULT_ALLOCATOR, gives_back, parse_allocator
from planner.measure.environment import MMAP_THRESHOLD_BYTES

ATTENTION_COMMENTS = {
    "eager": "keeps a score per pair of tokens: grows with the square",
    "sdpa": "fused kernels keep no scores: grows with the length alone",
    "flash2": "keeps no scores, and no padding within",
}


def template(name: str) -> Template:
    """One of the templates."""
    return _environment().get_template(name)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("planner.emit"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["literal"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.filters["python"] = repr
    environment.filters["set_literal"] = lambda values: f"{{{', '.join(map(json.dumps, values))}}}"
    environment.globals["source"] = _source
    return environment


@cache
def _source(module: str, *names: str) -> str:
    """Functions and classes of ``planner.parts`` as they stand there: what is planned is what is done.

    Read, not imported: the losses' module loads torch, which a second plan does without.
    """
    text = (resources.files("planner.parts") / f"{module}.py").read_text(encoding="utf-8")
    found = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    lines = text.splitlines()
    return "\n\n\n".join("\n".join(lines[f.lineno - 1 : f.end_lineno]) for f in map(found.__getitem__, names))


def platform_context(plan: Mapping[str, Any]) -> dict[str, Any]:
    """What a script tells the allocators, and the attention that it asks for.

    Garbage collection of torch's allocator also needs the limit that its threshold is a share of.
    """
    options = parse_allocator(plan["request"].get("allocator") or DEFAULT_ALLOCATOR)
    attention, memory = plan["config"]["attention"], plan["memory"]
    return {
        "allocator": options.text,
        "expandable": options.expandable_segments,
        "limit_bytes": memory["ceiling_bytes"] - memory["context_bytes"],
        "collects": options.garbage_collection_threshold is not None,
        "on_cpu": plan["hardware"].get("kind") == "cpu",
        "mmap_threshold_bytes": MMAP_THRESHOLD_BYTES,
        "gives_back": gives_back(memory),
        "attention_name": "flash_attention_2" if attention == "flash2" else attention,
        "attention_comment": ATTENTION_COMMENTS[attention],
        "trust": ", trust_remote_code=True" if plan["request"].get("trust_remote_code") else "",
    }
