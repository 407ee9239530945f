"""What running a model is made of: the model as infer.py loads it, and a batch of texts on its way through it.

The simulator records these passes and a trial times them. infer.py runs them under ``inference_mode``; here it is
``no_grad``, under which torch takes operators apart before a recorder sees them: the kernels are the same.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from planner.config import InferenceConfig
from planner.inference.quantized import quantize
from planner.inference.workload import InferenceWorkload
from planner.parts import losses
from planner.recording.record import ACTIVATIONS, INPUTS
from planner.step import MakeBatch, Watcher
from planner.tasks import Answer

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def weight_dtype(precision: str) -> torch.dtype:
    """The type of the weights and of the arithmetic."""
    return _DTYPES.get(precision, torch.float32)


def build_model(
    workload: InferenceWorkload, config: InferenceConfig, *, device: str = "meta", **changes: Any
) -> nn.Module:
    """The model as infer.py has it, ready to answer; on a device other than meta with random weights.

    ``changes`` replace values of the model's configuration (for example the number of layers).
    """
    dtype = weight_dtype(config.precision)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = workload.build_model(attention=config.attention, dtype=dtype, device=device, **changes)
        model = quantize(model, config.quantization, dtype)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def run_batch(model: nn.Module, make_batch: MakeBatch, watcher: Watcher, answer: Answer) -> None:
    """A batch of texts from its arrival to its answers in host memory."""
    watcher.phase("inputs", category=INPUTS)
    batch = make_batch()
    watcher.phase("forward", category=ACTIVATIONS)
    outputs: Any = model(**batch)
    if answer == "vector":
        found = losses.mean_pool(outputs.last_hidden_state, batch["attention_mask"])
    else:
        found = outputs.logits.float()
    del outputs
    host = to_host(found)
    watcher.phase("end")
    del host, found, batch


def to_host(found: Tensor) -> Tensor:
    """Answers on their way to the output file."""
    if found.is_meta:
        from planner.recording import transfers  # noqa: F401  # defines the operator

        host: Tensor = torch.ops.vramplan.to_host(found)
        return host
    return found.cpu()
