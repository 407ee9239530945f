"""Remembered operator calls give what the operator would give."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from planner.config import TrainingConfig
from planner.models import resolve_model
from planner.recording import calls
from planner.recording.kernels import Target
from planner.recording.source import make_source
from planner.workload import Workload

aten = torch.ops.aten
AMPERE, TURING = Target(compute_capability=(8, 0)), Target(compute_capability=(7, 5))


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_KNOWN", {})


def zeros(*shape: int, **options: Any) -> Tensor:
    """A tensor without data."""
    return torch.zeros(*shape, device="meta", **options)


def layout(out: Any) -> list[tuple[Any, ...]]:
    """Everything that a result is, without data."""
    parts = out if isinstance(out, tuple) else (out,)
    return [(p.shape, p.stride(), p.dtype, p.device, p.untyped_storage().nbytes(), p.storage_offset()) for p in parts]


@pytest.mark.parametrize(
    ("func", "args", "kwargs"),
    [
        (aten.mm.default, (zeros(3, 4), zeros(5, 4).t()), {}),
        (aten.add.Tensor, (zeros(4, 3).t(), zeros(3, 4)), {"alpha": 2}),
        (aten.bmm.default, (zeros(2, 3, 4, dtype=torch.bfloat16), zeros(2, 4, 5, dtype=torch.bfloat16)), {}),
        (aten.native_layer_norm.default, (zeros(2, 3, 8), [8], zeros(8), zeros(8), 1e-5), {}),
        (aten.sum.dim_IntList, (zeros(3, 4), [0], True), {}),
        (aten.empty_like.default, (zeros(4, 3).t(),), {"dtype": torch.float16}),
        (aten._to_copy.default, (zeros(4, 3).t(),), {"dtype": torch.bfloat16}),
    ],
    ids=lambda value: str(value) if callable(value) else "",
)
def test_a_remembered_result_has_the_operators_layout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Shape, strides, type and storage, first and later; every time a tensor of its own."""
    expected = layout(func(*args, **kwargs))
    results = [calls.run(func, args, kwargs, AMPERE)[0] for _ in range(3)]
    assert [expected] * 3 == [layout(result) for result in results]
    first = [r[0] if isinstance(r, tuple) else r for r in results]
    assert 3 == len({tensor.untyped_storage()._cdata for tensor in first})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((aten.add.Scalar, (zeros(3, dtype=torch.int64), 1)), (aten.add.Scalar, (zeros(3, dtype=torch.int64), 1.0))),
        ((aten.mm.default, (zeros(3, 3), zeros(3, 3))), (aten.mm.default, (zeros(3, 3), zeros(3, 3).t()))),
        ((aten.relu.default, (zeros(3, 4),)), (aten.relu.default, (zeros(4, 3).t(),))),
        ((aten.relu.default, (zeros(3),)), (aten.relu.default, (zeros(3, dtype=torch.bfloat16),))),
        ((aten.sum.dim_IntList, (zeros(3, 3), [0])), (aten.sum.dim_IntList, (zeros(3, 3), [1]))),
    ],
)
def test_other_arguments_are_another_call(first: tuple[Any, Any], second: tuple[Any, Any]) -> None:
    """Types of numbers, layouts and types of tensors, and options all count."""
    for func, args in (first, second):
        assert layout(func(*args)) == layout(calls.run(func, args, {}, AMPERE)[0])
    assert 2 == len(calls._KNOWN)


def test_workspaces_are_the_cards() -> None:
    """A call on another target is another call."""
    q = zeros(2, 4, 64, 80, dtype=torch.float16)
    args = (q, q, q, q, None, q, zeros(2, 4, 64), zeros(1), zeros(1), 0.0, [True, True, True, False])
    func = aten._scaled_dot_product_efficient_attention_backward.default
    wide, narrow = (calls.run(func, args, {}, target)[1].scratch for target in (AMPERE, TURING))
    assert sum(s.nbytes for s in wide) < sum(s.nbytes for s in narrow)


def test_in_place_operators_run_every_time() -> None:
    """Their result is their operand."""
    for _ in range(2):
        x = zeros(3)
        assert calls.run(aten.add_.Tensor, (x, zeros(3)), {}, AMPERE)[0] is x


@pytest.mark.parametrize("precision", ["fp32", "bf16-amp"])
def test_a_step_is_recorded_alike_with_and_without_memory(precision: str) -> None:
    """Sizes, events, costs: nothing depends on what was recorded before."""
    spec = resolve_model("bert-base-uncased")
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    workload = Workload(spec=dataclasses.replace(spec, config={**spec.config, **small}), task="sequence-classification")
    config = TrainingConfig.model_validate(
        {
            "micro_batch_size": 3,
            "seq_len": 40,
            "max_tokens_per_micro_batch": 120,
            "gradient_accumulation_steps": 1,
            "effective_batch_size": 3,
            "precision": precision,
            "checkpointing": "every-2",
        }
    )
    source = make_source(workload, config, AMPERE)
    fresh = source.record((3, 40))
    source.record((2, 64))
    known = len(calls._KNOWN)
    assert fresh == source.record((3, 40))
    assert known == len(calls._KNOWN) > 20
