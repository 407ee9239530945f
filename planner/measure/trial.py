"""One trial in this process: build, warm up, time, check. What it finds is a Measurement, whatever happens."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from planner.config import InferenceConfig, TrainingConfig
from planner.levers.checkpointing import checkpointing_layers
from planner.levers.host_optimizer import HostAdamWOfLayers
from planner.levers.optimizer import make_optimizer
from planner.levers.precision import autocast_dtype, has_masters
from planner.measure.backends import Backend, backend_of
from planner.measure.checks import Evidence
from planner.measure.course import Course, Ended, Passes, Tell, Unwatched, arrive
from planner.measure.protocol import (
    ERROR,
    NAN_LOSS,
    NO_GRADIENT,
    OK,
    OOM,
    Measurement,
    TrialSpec,
)
from planner.recording.record import TEMPORARIES
from planner.step import Compared, build_model, contrast, first_pass, run_micro_batch
from planner.units import format_bytes
from planner.workload import Workload, device_tensors, model_class

Batch = tuple[dict[str, Tensor], int]
"""Tensors in host memory, and what the effective batch's mean loss is over."""

MAX_GRAD_NORM = 1.0
"""As in the emitted script."""
MAX_WARM_UPS = 12
"""Updates until two were made: fp16's loss scale starts too high for some models, and halves with each skipped one."""


def run_trial(spec: TrialSpec, *, tell: Tell = lambda _: None, started: float | None = None) -> Measurement:
    """Measure a configuration on a device; ``started`` (time.time()) is when its process began.

    Exceptions of the model's code and of the device are the measurement's status. The process should end afterwards:
    what the trial made of libraries' and devices' state stays.
    """
    started = started or time.time()
    found: dict[str, Any] = {}
    backend, status, reason = None, OK, ""
    try:
        backend = backend_of(spec.device)
        _kind(spec)(spec, backend, tell, found, started).run()
    except Ended as end:
        status, reason = end.status, str(end)
    except Exception as error:
        status, reason = (backend.status_of(error) if backend else ERROR), one_line(error)
        error.__traceback__ = None  # its frames hold the model
    if backend is not None:
        found |= _memory(backend)
        steady = backend.peaks.get("steady_step") or backend.peaks.get("batch")
        if found.get("typical_micro_batch_ms") and steady:  # of the same shape: run once
            backend.peaks.setdefault("typical", dict(steady))
        if status == OK:
            status, reason = _over_the_ceiling(spec, found)
    found["wall_s"] = time.time() - started
    return Measurement(status=status, reason=reason, versions=_versions(), **found)


def one_line(error: BaseException) -> str:
    """An exception's type and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _memory(backend: Backend) -> dict[str, Any]:
    backend.finish()
    return {
        "phases": backend.peaks,
        "peak_allocated_bytes": backend.peak_allocated_bytes,
        "peak_reserved_bytes": backend.peak_reserved_bytes,
        "context_bytes": backend.context_bytes,
        "process_bytes": backend.process_bytes(),
    }


def _over_the_ceiling(spec: TrialSpec, found: dict[str, Any]) -> tuple[str, str]:
    """The CPU's memory has no cap that counts exactly what is resident."""
    if spec.ceiling_bytes is None or spec.device != "cpu" or found["process_bytes"] <= spec.ceiling_bytes:
        return OK, ""
    held, ceiling = format_bytes(found["process_bytes"]), format_bytes(spec.ceiling_bytes)
    return OOM, f"its process held {held}, the ceiling is {ceiling}"


def _versions() -> dict[str, str]:
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}


def _kind(spec: TrialSpec) -> type[Course]:
    if isinstance(spec.config, InferenceConfig):
        from planner.inference.trial import InferenceCourse

        return InferenceCourse
    return _TrainingCourse


class _TrainingCourse(Course):
    """Two optimizer steps that are checked, and more that are timed."""

    def __init__(self, spec: TrialSpec, *others: Any) -> None:
        super().__init__(spec, *others)
        assert isinstance(spec.config, TrainingConfig)
        self.config, self.workload = spec.config, spec.workload
        self._losses: list[Tensor] = []
        contrastive = self.workload.facts.loss == "contrastive"
        self._compares = contrastive and self.config.gradient_accumulation_steps > 1
        self._compared: Compared | None = None
        self.optimizer: torch.optim.Optimizer

    # -- before the steps ----------------------------------------------------------------------------------------

    def _import_libraries(self) -> None:
        import_libraries(self.workload, self.config)

    def _load(self) -> None:
        self.model = build_model(self.workload, self.config, device=str(self.backend.device))
        self.backend.adopt(device_tensors(self.model, checkpointing_layers(self.model)))
        self._trained = [p for p in self.model.parameters() if p.requires_grad]
        if not self._trained:
            raise Ended(NO_GRADIENT, "no parameter is trained")
        masters = has_masters(self.config.precision, self.config.method)
        config = self.config
        self.optimizer = make_optimizer(config.optimizer, self._trained, masters=masters, offload=config.offload)
        scaling = config.precision == "fp16-amp"
        self._scaler = torch.amp.GradScaler(self.backend.device.type) if scaling else None
        self._batch = self._host_batch(config.micro_batch_size, config.seq_len)

    def _host_batch(self, micro_batch_size: int, seq_len: int) -> Batch:
        batch = self.workload.make_batch(micro_batch_size, seq_len, device="cpu", seed=self.spec.seed)
        if "labels" not in batch:
            return batch, 1
        items = int((batch["labels"] != -100).sum()) * self.config.gradient_accumulation_steps
        return batch, max(1, items)

    # -- the step ------------------------------------------------------------------------------------------------

    def _compare(self, watcher: Any) -> None:
        """What a step begins with where its loss compares all its samples."""
        rows = self.config.micro_batch_size * self.workload.facts.sequences_per_sample
        shape = (self.config.gradient_accumulation_steps, rows, self.workload.vector_size)
        self._compared = contrast(shape, self.backend.device, watcher)

    def _micro_batch(self, watcher: Any, batch: Batch | None = None) -> None:
        tensors, items = batch or self._batch
        arguments = self.model, partial(arrive, tensors, self.backend.device), watcher, self._autocasting
        run_micro_batch(
            *arguments,
            loss=self.workload.facts.loss,
            backward=self._backward,
            items=items,
            cached=first_pass(*arguments, self._compared) if self._compared is not None else None,
        )

    @property
    def _autocasting(self) -> Callable[[], AbstractContextManager[Any]] | None:
        low = autocast_dtype(self.config.precision)
        if low is None:
            return None
        keep = self.config.offload != "parameters"
        return partial(torch.autocast, self.backend.device.type, dtype=low, cache_enabled=keep)

    def _backward(self, loss: Tensor) -> None:
        if not loss.requires_grad:
            raise Ended(NO_GRADIENT, "the loss depends on no trained parameter")
        self._losses.append(loss.detach())
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()

    def _gradient_of(self, parameter: Tensor) -> Tensor | None:
        """Where the last backward pass left it."""
        host = self.optimizer
        if not isinstance(host, HostAdamWOfLayers):
            return parameter.grad
        self.backend.synchronize()
        index = next(index for index, weight in enumerate(host.weights) if weight is parameter)
        return host.grads[index] if parameter in host.arrived else None

    def _update(self) -> bool:
        """Clip, step, gradients to None, as the emitted script; whether the weights were updated."""
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        clipped = self.optimizer.collect() if isinstance(self.optimizer, HostAdamWOfLayers) else self._trained
        norm = torch.nn.utils.clip_grad_norm_(clipped, MAX_GRAD_NORM)
        finite = bool(norm.isfinite())
        if self._scaler is not None:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        elif finite:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return finite

    def _end_step(self) -> bool:
        """The update, and the loss that must be a number."""
        if self._compared is not None:
            self._losses.append(self._compared.loss / self.config.gradient_accumulation_steps)
            self._compared = None
        updated = self._update()
        loss = self._found["loss"] = self._losses[-1].item() * self.config.gradient_accumulation_steps
        self._losses.clear()
        self._found["steps_executed"] = self._found.get("steps_executed", 0) + updated
        if not math.isfinite(loss):
            self._found["loss"] = None  # JSON has no number for it
            raise Ended(NAN_LOSS, f"the loss was {loss}")
        return updated

    # -- warm-up and checks --------------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        evidence = Evidence(self.model, self._trained, self.config, self.backend.recorder)
        micro_batches = min(2, self.config.gradient_accumulation_steps)
        with evidence.watching():
            for name in ("first_step", "steady_step"):
                with self.backend.phase(name):
                    self._warm_step(name, evidence, micro_batches)
        self._count_retries()
        self._found["recomputed_layers"] = len(evidence.recomputed)
        self._found["without_gradient"] = evidence.without_gradient
        if problem := evidence.problem:
            raise Ended(*problem)

    def _warm_step(self, name: str, evidence: Evidence, micro_batches: int) -> None:
        for _ in range(MAX_WARM_UPS):
            with self.backend.recording():
                evidence.begin(name)
                if self._compares:
                    self._compare(evidence)
            for _ in range(micro_batches):
                self._tell(name)
                with self.backend.recording():
                    evidence.begin(name)
                    self._micro_batch(evidence)
                evidence.look_at_gradients(self._gradient_of)
            with self.backend.recording(update=True):
                evidence.phase("update", category=TEMPORARIES)
                updated = self._end_step()
            if updated:
                return
        raise Ended(NAN_LOSS, f"no finite gradients in {MAX_WARM_UPS} steps")

    # -- timing --------------------------------------------------------------------------------------------------

    def _time(self) -> None:
        self.backend.synchronize()
        gc.collect()
        config, passes = self.config, Passes(self.backend, self.spec.timed_s)
        updates, beginnings = Passes(self.backend, 0.0), Passes(self.backend, 0.0)
        with self.backend.phase("steady_step"):
            while passes.wanted:
                if self._compares:
                    beginnings.time(partial(self._compare, Unwatched()))
                for _ in range(min(3, config.gradient_accumulation_steps)):  # the first makes gradients, others add
                    self._tell("timed")
                    passes.time(partial(self._micro_batch, Unwatched()))
                updates.time(self._end_step)
        self._found |= {"micro_batch_ms": passes.ms, "update_ms": updates.ms}
        step_ms = config.gradient_accumulation_steps * median(passes.ms) + median(updates.ms)
        step_ms += median(beginnings.ms or (0.0,))
        tokens = config.micro_batch_size * config.gradient_accumulation_steps
        tokens *= self.workload.tokens_per_sequence(config.seq_len)
        self._found |= {"step_ms": step_ms, "tokens_per_s": 1000 * tokens / step_ms}
        self._look_for_thrashing(passes.ms, updates.ms)

    def _time_typical(self) -> None:
        seq_len = self.spec.typical_seq_len
        if seq_len is None:
            return
        tokens = seq_len * self.workload.facts.sequences_per_sample
        rows = max(1, min(self.config.effective_batch_size, self.config.max_tokens_per_micro_batch // tokens))
        if (rows, seq_len) == (self.config.micro_batch_size, self.config.seq_len):
            self._found["typical_micro_batch_ms"] = self._found["micro_batch_ms"]
            return
        batch = self._host_batch(rows, seq_len)
        passes = Passes(self.backend, self.spec.timed_s / 2)
        with self.backend.phase("typical"):
            watcher = Evidence(self.model, (), self.config, self.backend.recorder)
            with self.backend.recording():  # this pass is also the shape's warm-up
                watcher.begin("typical")
                if self._compares:
                    self._compare(watcher)
                self._micro_batch(watcher, batch)
            self._end_step()
            while passes.wanted:
                self._tell("typical")
                if self._compares:
                    self._compare(Unwatched())
                passes.time(partial(self._micro_batch, Unwatched(), batch))
                self._end_step()
        self._found["typical_micro_batch_ms"] = passes.ms
        self._look_for_thrashing(passes.ms)


def import_libraries(workload: Workload, config: TrainingConfig) -> None:
    """What the configuration needs; a process's memory before the model is counted with it."""
    model_class(workload.spec.model_type, workload.architecture)
    if config.method != "full":
        import peft  # noqa: F401
    if config.quantization != "none" or "8bit" in config.optimizer:
        import bitsandbytes  # noqa: F401
    if autocast_dtype(config.precision) is not None:
        import accelerate  # noqa: F401
