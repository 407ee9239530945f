"""The training loops behind the published measurements, each as its authors' script has it.

A loop runs a whole short run (load, some iterations) under the recorder. What a script keeps alive, zeroes or
never zeroes decides its peak, so nothing is tidied up here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate.utils import convert_to_fp32
from older_releases import AllTrue
from torch import Tensor, nn

from planner.levers.optimizer import make_optimizer
from planner.memory.polynomials import Shape
from planner.recording.cuda import CudaSemantics
from planner.recording.record import INPUTS, OPTIMIZER, TEMPORARIES, Recording
from planner.recording.recorder import Recorder
from planner.recording.source import StepSource, recording_modes

ITERATION = "iteration_{}"
"""Phase that begins an iteration; the last one is the steady state, and ``end`` ends it."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """What a loop needs: a model, a shape, and the recorder that it announces its phases to."""

    source: StepSource
    shape: Shape
    recorder: Recorder
    semantics: CudaSemantics
    micro_batches: int
    """Micro-batches of an optimizer step that run; of more than two, the later ones are alike."""

    @property
    def model(self) -> Any:
        """The model on the card."""
        return self.source.model

    def tokens(self, *size: int) -> Tensor:
        """An int64 batch, as it arrives on the card."""
        return torch.ones(*(size or self.shape), dtype=torch.int64, device="meta")

    def begin(self, iteration: int) -> None:
        """The next iteration starts."""
        self.recorder.phase(ITERATION.format(iteration))

    def backward(self, loss: Tensor) -> None:
        """``loss.backward()``, which runs on autograd's own thread."""
        self.recorder.phase("backward", category=TEMPORARIES, backward=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.recorder.phase("after_backward")

    @contextmanager
    def updating(self) -> Any:
        """The optimizer's step."""
        with self.recorder.categorised(OPTIMIZER):
            yield


Loop = Callable[[Session], None]


def record(source: StepSource, loop: Loop, shape: Shape, *, micro_batches: int = 1) -> Recording:
    """Run a loop at a shape and write down what it does."""
    source.model.zero_grad(set_to_none=True)
    with ExitStack() as stack:
        recorder, semantics = stack.enter_context(recording_modes(source))
        stack.enter_context(AllTrue())
        loop(Session(source=source, shape=shape, recorder=recorder, semantics=semantics, micro_batches=micro_batches))
        recorder.phase("end")
        recording = recorder.recording()
    source.model.zero_grad(set_to_none=True)
    return recording


def sum_of_logits(session: Session) -> None:
    """The script of transformers' eager-versus-SDPA tables (``benchmark_training``, by fxmarty).

    No mask, no labels, no optimizer; ``outputs`` and ``loss`` of one iteration are there until the next one's. After
    some iterations (one here) it empties the cache and measures the peak of the following ones (two here).
    """
    inputs = {"input_ids": session.tokens()}
    for iteration in range(3):
        session.begin(iteration)
        session.model.zero_grad()
        outputs = session.model(**inputs)
        loss = outputs.logits.sum()
        session.backward(loss)
    del outputs, loss


def never_zeroed(session: Session) -> None:
    """milabench's huggingface benchmark (benchmarks/huggingface/bench/__main__.py, Runner.step and Runner.train).

    Adam in its foreach form, gradients never zeroed, labels at every position; ``outputs`` is alive during the
    backward pass and the optimizer's step, and the last step's loss until the next one's.
    """
    optimizer = torch.optim.Adam(session.source.trainable, foreach=True)

    def step(data: dict[str, Tensor]) -> Tensor:
        with session.semantics.autocasting():
            outputs = session.model(**data)
        loss: Tensor = outputs.loss
        session.backward(loss)
        with session.updating():
            optimizer.step()
        return loss

    for iteration in range(3):
        session.begin(iteration)
        with session.recorder.categorised(INPUTS):
            data = {"input_ids": session.tokens(), "labels": session.tokens()}
        loss = step(data)
    del loss, data


@dataclass(frozen=True, kw_only=True)
class TrainerLoop:
    """transformers' Trainer with a given optimizer.

    Its ``training_step`` returns the loss alone, so outputs are gone before the backward pass; gradients are
    clipped by their norm; ``zero_grads`` says whether ``model.zero_grad()`` drops the gradients (torch 2.0) or
    writes zeros into them (before).
    """

    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]
    zero_grads: bool = False
    labels: Callable[[Session], Tensor] = field(default=lambda session: session.tokens())
    upcasts_outputs: bool = False
    """Whether accelerate wraps the model's forward: under autocast, outputs are then converted to fp32."""

    def __call__(self, session: Session) -> None:
        """Two optimizer steps."""
        optimizer = self.optimizer(session.source.trainable)
        for iteration in range(2):
            session.begin(iteration)
            for _ in range(session.micro_batches):
                self._micro_batch(session)
            torch.nn.utils.clip_grad_norm_(session.source.trainable, 1.0)
            with session.updating():
                optimizer.step()
            session.model.zero_grad(set_to_none=not self.zero_grads)

    def _micro_batch(self, session: Session) -> None:
        with session.recorder.categorised(INPUTS):
            inputs = {"input_ids": session.tokens(), "labels": self.labels(session)}
        session.backward(self._loss(session, inputs))

    def _loss(self, session: Session, inputs: dict[str, Tensor]) -> Tensor:
        with session.semantics.autocasting():
            outputs = session.model(**inputs)
        if self.upcasts_outputs:
            outputs = convert_to_fp32(outputs)
        loss: Tensor = outputs["loss"]
        return loss


class HuggingFaceAdamW(torch.optim.Optimizer):
    """transformers.optimization.AdamW of 4.x (the Trainer's ``adamw_hf``): one parameter after the other."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """The denominator is the only temporary."""
        for parameter in self.param_groups[0]["params"]:
            gradient, state = parameter.grad, self.state[parameter]
            if gradient is None:
                continue
            if not state:
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            state["exp_avg"].mul_(0.9).add_(gradient, alpha=0.1)
            state["exp_avg_sq"].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            denominator = state["exp_avg_sq"].sqrt().add_(1e-6)
            parameter.addcdiv_(state["exp_avg"], denominator, value=-5e-5)


class HuggingFaceAdafactor(torch.optim.Optimizer):
    """transformers.optimization.Adafactor with the Trainer's arguments: no first moment, factored second moments."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Two temporaries of a parameter's size at a time: the squared gradient, then the update."""
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self._update(parameter, parameter.grad)

    def _update(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        state = self.state[parameter]
        factored = gradient.dim() >= 2
        if not state:
            if factored:
                state["row"] = gradient.new_zeros(gradient.shape[:-1])
                state["col"] = gradient.new_zeros(gradient.shape[:-2] + gradient.shape[-1:])
            else:
                state["all"] = torch.zeros_like(gradient)
        update = (gradient**2) + 1e-30
        if factored:
            state["row"].mul_(0.9).add_(update.mean(dim=-1), alpha=0.1)
            state["col"].mul_(0.9).add_(update.mean(dim=-2), alpha=0.1)
            r_factor = (state["row"] / state["row"].mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
            update = torch.mul(r_factor, state["col"].unsqueeze(-2).rsqrt())
            update.mul_(gradient)
        else:
            state["all"].mul_(0.9).add_(update, alpha=0.1)
            update = state["all"].rsqrt().mul_(gradient)
        update.mul_(5e-5)
        parameter.add_(-update)


def optimizer_of(name: str) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    """The planner's own stand-in for an optimizer."""
    return lambda parameters: make_optimizer(name, parameters)
