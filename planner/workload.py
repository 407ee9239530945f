"""What is trained: a model, a padded batch as the task's collator makes it, and the task's loss."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from planner.errors import InputError, Problem
from planner.models import ModelSpec, separate_output_layer
from planner.recording.record import OUTSIDE_LAYERS
from planner.tasks import TASK_FACTS, LossKind, TaskFacts

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    LossOfLogits = Callable[[Tensor, Tensor, float], Tensor]

TRAINABLE_TASKS = tuple(TASK_FACTS)
"""Tasks that this version simulates and writes a script for."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model on a task."""

    spec: ModelSpec
    """The model."""
    task: str
    """One of TRAINABLE_TASKS."""
    num_labels: int = 2
    """Classes of a task that has them."""
    target_seq_len: int | None = None
    """Tokens of the target sequence (seq2seq-lm only)."""

    @property
    def facts(self) -> TaskFacts:
        """What is true of the task."""
        return TASK_FACTS[self.task]

    @property
    def outputs(self) -> int:
        """Outputs of the task's own head; 0 where it has none."""
        return (self.facts.num_labels or self.num_labels) if self.facts.new_head else 0

    @property
    def architecture(self) -> str:
        """The transformers class that the task needs."""
        from transformers.models.auto import modeling_auto

        names: dict[str, str] = getattr(modeling_auto, self.facts.mapping)
        name = names.get(self.spec.model_type)
        if name is None:
            accepted = [
                task
                for task, facts in TASK_FACTS.items()
                if self.spec.model_type in getattr(modeling_auto, facts.mapping)
            ]
            raise InputError(
                [
                    Problem(
                        argument="task",
                        message=f"got {self.task!r} for {self.spec.model_id}; accepted for {self.spec.model_type}: "
                        f"{', '.join(accepted) or 'none'}; choose one of these",
                    )
                ]
            )
        return name if isinstance(name, str) else name[0]

    def build_model(self, *, attention: str, dtype: torch.dtype, device: str = "meta", **changes: Any) -> nn.Module:
        """A model with the task's head, in training mode.

        ``changes`` replace values of the model's configuration (for example the number of layers).
        """
        import torch

        config = self.hf_config(**changes)
        from planner.recording import flash_attention

        # the flash_attn package can't be asked for without it: recording has its own
        recorded_flash = attention == "flash2" and device == "meta"
        real = flash_attention.NAME if attention == "flash2" else attention
        config._attn_implementation = "eager" if recorded_flash else real
        cls = cast(Any, model_class(self.spec.model_type, self.architecture))
        with torch.device(device):
            model: nn.Module = cls._from_config(config, dtype=dtype)
        if recorded_flash:
            flash_attention.use(model)
        model.tie_weights()  # type: ignore[operator]  # left out where initialisation is switched off
        if not self.facts.joined and getattr(model, "pooler", None) is not None:
            model.pooler = None  # type: ignore[assignment]  # as in the script: vectors are means of tokens' states
        model.train()
        return model

    def hf_config(self, **changes: Any) -> Any:
        """The transformers configuration for this task, without a generation cache."""
        from copy import deepcopy

        if not changes:
            return deepcopy(self._plain_config)
        return self._make_config(**changes)

    @cached_property
    def _plain_config(self) -> Any:
        return self._make_config()

    def _make_config(self, **changes: Any) -> Any:
        from transformers import AutoConfig

        values = {key: value for key, value in self.spec.config.items() if not key.startswith("_")}
        values |= {"use_cache": False, **changes}
        values.pop("model_type", None)
        if separate_output_layer(self.spec):  # from_pretrained keeps the checkpoint's own output layer
            values["tie_word_embeddings"] = False
        if self.outputs:
            for stale in ("id2label", "label2id"):
                values.pop(stale, None)
            values["num_labels"] = self.outputs
        config = AutoConfig.for_model(self.spec.model_type, **values)
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = 0  # a padded batch of sequence classification needs one
        return config

    def make_batch(
        self, micro_batch_size: int, seq_len: int, *, device: str = "meta", seed: int = 0
    ) -> dict[str, Tensor]:
        """What the emitted script's collator moves to the device: int64 tensors of [b, s], labels last.

        Numbers to learn are fp32, [b, outputs]. Texts that are encoded apart have a row each, and no labels.
        With data, tokens and labels are random, and the last sequence ends with a token of padding: a batch of
        sequences of different lengths has a mask that is not all ones, which transformers doesn't leave out.
        """
        import torch

        content = _Ones() if device == "meta" else _Random(self, device, seed)
        rows, target_len = micro_batch_size * self.sequences_per_input, self.target_seq_len or seq_len
        batch = {
            "input_ids": content.tokens(rows, seq_len),
            "attention_mask": torch.ones(rows, seq_len, dtype=torch.int64, device=device),
        }
        if self._marks_texts:
            batch["token_type_ids"] = torch.zeros(rows, seq_len, dtype=torch.int64, device=device)
        if self.facts.loss in ("binary-cross-entropy", "squared-error"):
            batch["labels"] = content.numbers(rows, self.outputs)
        elif self.facts.labels == "class":
            batch["labels"] = content.labels(rows)
        elif self.facts.labels == "tokens":  # the collator shifts the target itself: the model gets no labels
            batch["decoder_input_ids"] = content.tokens(rows, target_len)
            batch["labels"] = content.labels(rows, target_len)
        elif self.facts.joined:
            batch["labels"] = content.labels(rows, seq_len)
        if device != "meta" and seq_len > 1:
            batch["attention_mask"][-1, -1] = 0
        return batch

    @property
    def _marks_texts(self) -> bool:
        """Whether the tokenizer says of each token which of a sample's two texts it belongs to (BERT's kind)."""
        pairs = self.facts.joined and self.facts.text_columns[0] == 2
        return pairs and getattr(self._plain_config, "type_vocab_size", 0) > 1

    @property
    def vector_size(self) -> int:
        """Features of a token's last state."""
        text = self._plain_config.get_text_config()
        return int(getattr(text, "word_embed_proj_dim", None) or text.hidden_size)  # OPT's states are projected

    @property
    def sequences_per_input(self) -> int:
        """Rows of a batch that one sample takes."""
        return self.facts.sequences_per_sample

    def tokens_per_sequence(self, seq_len: int) -> int:
        """Tokens that one sample of a micro-batch counts for."""
        return self.facts.sequences_per_sample * seq_len + (self.target_seq_len or 0)


class _Ones:
    """Tensors without data."""

    def tokens(self, *shape: int) -> Tensor:
        import torch

        return torch.ones(shape, dtype=torch.int64, device="meta")

    labels = tokens

    def numbers(self, *shape: int) -> Tensor:
        import torch

        return torch.ones(shape, dtype=torch.float32, device="meta")


class _Random:
    """Token ids and labels that a model takes."""

    def __init__(self, workload: Workload, device: str, seed: int) -> None:
        import torch

        config = workload.hf_config()
        self._classes = workload.outputs
        self._vocabulary = int(config.get_text_config().vocab_size)
        padding = config.pad_token_id
        self._padding = padding if isinstance(padding, int) and 0 <= padding < self._vocabulary else 0
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def tokens(self, *shape: int) -> Tensor:
        ids = self._integers(self._vocabulary, shape)
        if shape[-1] > 1:
            ids[-1, -1] = self._padding
        return ids

    def labels(self, *shape: int) -> Tensor:
        labels = self._integers(self._classes or self._vocabulary, shape)
        if len(shape) > 1 and shape[-1] > 1:
            labels[-1, -1] = -100  # no part of the loss
        return labels

    def numbers(self, *shape: int) -> Tensor:
        return self._integers(2, shape).float()

    def _integers(self, end: int, shape: tuple[int, ...]) -> Tensor:
        import torch

        return torch.randint(end, shape, generator=self._generator, device=self._device)


def loss_function(kind: LossKind) -> LossOfLogits:
    """The emitted script's loss for a task's logits and labels; the last argument is the effective batch's items."""
    from planner.parts import losses

    functions: dict[str, LossOfLogits] = {
        "cross-entropy": losses.cross_entropy,
        "binary-cross-entropy": losses.binary_cross_entropy,
        "squared-error": losses.squared_error,
    }
    return functions[kind]


def model_class(model_type: str, name: str) -> type[nn.Module]:
    """A transformers class by name, importing only its own modeling module."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    folder = model_type_to_module_name(model_type)
    package = importlib.import_module(f"transformers.models.{folder}")
    return cast("type[nn.Module]", getattr(package, name))


def device_tensors(model: nn.Module, layers: Sequence[nn.Module]) -> Iterator[tuple[Tensor, int]]:
    """Parameters and buffers in the order in which ``model.to(device)`` moves them (children first).

    Each comes with the index of the layer of ``layers`` that holds it, or OUTSIDE_LAYERS.
    """
    indices = {id(module): index for index, module in enumerate(layers)}

    def walk(module: nn.Module, layer: int) -> Iterator[tuple[Tensor, int]]:
        layer = indices.get(id(module), layer)
        for child in module.children():
            yield from walk(child, layer)
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                yield tensor, layer

    return walk(model, OUTSIDE_LAYERS)


def token_table(model: Any) -> nn.Module | None:
    """The table of token embeddings, where no other part of the model has its weights (an output layer may).

    None as well where transformers knows of no such table.
    """
    try:
        table: nn.Module | None = model.get_input_embeddings()
    except NotImplementedError:
        return None
    weight = getattr(table, "weight", None)
    owners = [part for part in model.modules() if any(p is weight for p in part.parameters(recurse=False))]
    return table if len(owners) == 1 else None
