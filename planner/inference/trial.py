"""One trial of running a model: the batches that infer.py runs, on a device and with random weights, timed."""

from __future__ import annotations

import copy
import gc
import tempfile
import time
from collections.abc import Callable
from functools import partial
from statistics import median_low
from typing import Any

import torch
from torch import Tensor, nn
from transformers import StoppingCriteria

from planner.config import InferenceConfig
from planner.inference.generation import generation_settings, special_tokens
from planner.inference.passes import build_model, run_batch
from planner.inference.quantized import held_tensors
from planner.inference.timing import typical_shape
from planner.inference.workload import InferenceWorkload
from planner.levers.checkpointing import checkpointing_layers
from planner.measure.course import Course, Passes, Unwatched, Watched, arrive
from planner.measure.protocol import TrialSpec
from planner.parts.placing import look_up_on_host, places_of
from planner.recording.record import ACTIVATIONS, INPUTS, OUTSIDE_LAYERS
from planner.step import Watcher
from planner.workload import device_tensors, model_class, token_table

Batch = dict[str, Tensor]
_WARM_UP_TOKENS = 3
"""Written by a generating task's first batch: a prompt's pass, the first token's, and one like all others."""


class InferenceCourse(Course):
    """A batch of the longest texts that is watched, more that are timed, and batches of a typical length."""

    def __init__(self, spec: TrialSpec, *others: Any) -> None:
        super().__init__(spec, *others)
        assert isinstance(spec.config, InferenceConfig) and isinstance(spec.workload, InferenceWorkload)
        self.config, self.workload = spec.config, spec.workload

    def run(self) -> None:
        """All of it; what waited on disk is deleted."""
        with tempfile.TemporaryDirectory(prefix="vramplan-") as self._folder:
            super().run()

    def _import_libraries(self) -> None:
        model_class(self.workload.spec.model_type, self.workload.architecture)
        if self.config.quantization in ("int8", "nf4"):
            import bitsandbytes  # noqa: F401
        if self.config.offload != "none":
            import accelerate  # noqa: F401

    def _load(self) -> None:
        self.model = load(self.workload, self.config, self.backend.device, self._folder)
        gc.collect()
        if self.config.quantization != "int8-dynamic":
            # _from_config makes an output layer of its own before it ties it to the embedding, and weights are
            # quantized all at once: from_pretrained does neither. infer.py quantizes to int8-dynamic as is done here
            self.backend.forget_building()
        layers = checkpointing_layers(self.model)
        tensors = [*device_tensors(self.model, layers)]
        if self.config.quantization != "none":
            tensors = [(tensor, OUTSIDE_LAYERS) for tensor in held_tensors(self.model)]
        self.backend.adopt(tensors)
        self._batch = self._host_batch(self.config.micro_batch_size, self.config.seq_len)

    def _host_batch(self, rows: int, seq_len: int) -> Batch:
        return self.workload.make_batch(rows, seq_len, device="cpu", seed=self.spec.seed)

    # -- batches -------------------------------------------------------------------------------------------------

    def _run(self, watcher: Watcher, batch: Batch, clock: _Clock | None = None, new_tokens: int | None = None) -> None:
        """One batch, from its arrival to its answers in host memory."""
        arrival = partial(arrive, batch, self.backend.device)
        answer = self.workload.facts.answer
        assert answer is not None
        if self.workload.facts.generates:
            clock = clock or _Clock(self.backend.synchronize, self._tell)
            self._generate(watcher, arrival, clock, new_tokens or self.config.max_new_tokens)
        else:
            run_batch(self.model, arrival, watcher, answer)

    def _generate(self, watcher: Watcher, arrival: Callable[[], Batch], clock: _Clock, new_tokens: int) -> None:
        """``generate`` as infer.py calls it; no text ends before its last token, whatever random weights write."""
        model: Any = self.model
        watcher.phase("inputs", category=INPUTS)
        inputs: dict[str, Any] = arrival()
        watcher.phase("forward", category=ACTIVATIONS)
        if self.config.prefix_tokens:
            inputs |= self._beginnings(len(inputs["input_ids"]))
        never = int(model.config.get_text_config(decoder=True).vocab_size)
        special = special_tokens(model.config) | {"eos_token_id": never}
        settings = generation_settings(self.config, new_tokens, special)
        clock.start()
        written = model.generate(**inputs, generation_config=settings, stopping_criteria=[clock]).cpu()
        watcher.phase("end")
        del written, inputs

    def _beginnings(self, rows: int) -> dict[str, Any]:
        """The cache that a batch whose prompts share their beginning goes on from: a copy of what is kept."""
        from transformers.generation.utils import ALL_CACHE_NAMES

        found = copy.deepcopy(self._kept)
        found.batch_repeat_interleave(rows)
        return {ALL_CACHE_NAMES[0]: found}

    def _compute_beginning(self) -> None:
        """The shared beginning's keys and values, computed once as infer.py does."""
        from transformers import DynamicCache
        from transformers.generation.utils import ALL_CACHE_NAMES

        model: Any = self.model
        self._kept = DynamicCache(config=model.config)
        ids = self._batch["input_ids"][:1, : self.config.prefix_tokens].to(self.backend.device)
        for part in ids.split(self.config.prefill_chunk_tokens or ids.shape[1], dim=1):
            model.base_model(part, use_cache=True, **{ALL_CACHE_NAMES[0]: self._kept})

    # -- warm-up and timing --------------------------------------------------------------------------------------

    @torch.no_grad()
    def _warm_up(self) -> None:
        watcher = Watched(self.backend.recorder)
        generates = self.workload.facts.generates
        for name in ("first_batch", "batch"):
            with self.backend.phase(name), self.backend.recording():
                self._tell(name)
                watcher.begin(name)
                if self.config.prefix_tokens and name == "first_batch":
                    self._compute_beginning()
                short = generates and name == "first_batch"
                tokens = min(_WARM_UP_TOKENS, self.config.max_new_tokens) if short else None
                self._run(watcher, self._batch, new_tokens=tokens)
        self._found["steps_executed"] = 2
        self._count_retries()

    @torch.inference_mode()
    def _time(self) -> None:
        self.backend.synchronize()
        gc.collect()
        generates, clocks = self.workload.facts.generates, list[_Clock]()
        # a generated batch has as many timed passes as it has tokens
        passes = Passes(self.backend, self.spec.timed_s, **({"least": 1} if generates else {}))
        with self.backend.phase("batch"):
            while passes.wanted:
                self._tell("timed")
                clocks.append(_Clock(self.backend.synchronize, self._tell))
                passes.time(partial(self._run, Unwatched(), self._batch, clocks[-1]))
                self._found["steps_executed"] += 1
        # the lower of two in the middle: a batch that there was, whose reading and writing add up to it
        step_ms = median_low(passes.ms)
        rows, config = self.config.micro_batch_size, self.config
        tokens = rows * (config.max_new_tokens if generates else config.seq_len)
        self._found |= {"micro_batch_ms": passes.ms, "step_ms": step_ms, "tokens_per_s": 1000 * tokens / step_ms}
        if generates:
            first, *others = clocks[passes.ms.index(step_ms)].ms
            self._found |= {"prefill_ms": first, "token_ms": tuple(others)}
        self._look_for_thrashing(passes.ms)

    @torch.inference_mode()
    def _time_typical(self) -> None:
        seq_len = self.spec.typical_seq_len
        if seq_len is None:
            return
        config = self.config
        rows, _ = typical_shape(config, seq_len)
        if (rows, seq_len) == (config.micro_batch_size, config.seq_len):
            self._found["typical_micro_batch_ms"] = self._found["micro_batch_ms"]
            return
        batch = self._host_batch(rows, seq_len)
        generates = self.workload.facts.generates
        passes = Passes(self.backend, self.spec.timed_s / 2, **({"least": 1} if generates else {}))
        with self.backend.phase("typical"):
            with torch.inference_mode(mode=False):
                self._watch_typical(batch)
            while passes.wanted:
                self._tell("typical")
                passes.time(partial(self._run, Unwatched(), batch))
        self._found["typical_micro_batch_ms"] = passes.ms
        self._look_for_thrashing(passes.ms)

    @torch.no_grad()
    def _watch_typical(self, batch: Batch) -> None:
        """The shape's warm-up, seen by the recorder."""
        watcher = Watched(self.backend.recorder)
        with self.backend.recording():
            watcher.begin("typical")
            self._tell("typical")
            self._run(watcher, batch)


class _Clock(StoppingCriteria):  # type: ignore[misc,unused-ignore]  # transformers is untyped
    """Notes when each token of a batch was there. Nothing is stopped: what ends a text is its length."""

    def __init__(self, synchronize: Callable[[], None], tell: Callable[[str], None]) -> None:
        self._synchronize, self._tell = synchronize, tell
        self._times: list[float] = []

    def start(self) -> None:
        """The batch is there."""
        self._synchronize()
        self._times = [time.perf_counter()]

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self._synchronize()
        self._times.append(time.perf_counter())
        self._tell("token")
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    @property
    def ms(self) -> list[float]:
        """Milliseconds of each token, the prompt's passes with the first."""
        return [1000 * (end - start) for start, end in zip(self._times, self._times[1:], strict=False)]


def load(workload: InferenceWorkload, config: InferenceConfig, device: torch.device, folder: str) -> nn.Module:
    """The model with random weights where infer.py has them; what waits on disk goes to ``folder``.

    Random weights are made on a card where they fit, which takes a hundredth of the time.
    """
    if config.offload != "none":
        return _dispatched(build_model(workload, config, device="cpu"), config, device, folder)
    if device.type == "cpu":
        return build_model(workload, config, device="cpu")
    try:
        model = build_model(workload, config, device=str(device))
    except torch.OutOfMemoryError:  # whole weights beside quantized ones, which from_pretrained never has
        gc.collect()
        model = build_model(workload, config, device="cpu").to(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return model


def _dispatched(model: nn.Module, config: InferenceConfig, device: torch.device, folder: str) -> nn.Module:
    """The first layers on the device and the others in host memory or on disk, by accelerate's hooks."""
    from accelerate import dispatch_model

    here = device.index or 0 if device.type == "cuda" else "cpu"
    elsewhere = "disk" if config.offload == "disk" else "cpu"
    table = None if config.embedding_on_card else token_table(model)
    layers = list(checkpointing_layers(model))
    places = places_of(model, layers, config.layers_on_card or 0, here, elsewhere, table)
    made: nn.Module = dispatch_model(model, places, main_device=here, offload_dir=folder, force_hooks=True)
    if table is not None:
        look_up_on_host(table)
    return made
