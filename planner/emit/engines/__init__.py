"""The same plan for other engines: ``plan export --to NAME PLAN``."""

from __future__ import annotations

from planner.emit.engines.accelerate import FSDP2, Accelerate
from planner.emit.engines.base import Document, Engine
from planner.emit.engines.language import TRL, Axolotl, LlamaFactory
from planner.emit.engines.sentence_transformers import SentenceTransformers
from planner.emit.engines.trainer import DeepSpeed, Trainer

_ALL = (Accelerate, Trainer, DeepSpeed, FSDP2, TRL, SentenceTransformers, LlamaFactory, Axolotl)
ENGINES: dict[str, Engine] = {engine.name: engine() for engine in _ALL}
"""Name to engine, in the order of the help."""

__all__ = ["ENGINES", "Document", "Engine"]
