"""How long a configuration takes: a full batch, texts of the planned lengths, and of what is written each token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from planner.config import InferenceConfig
from planner.hardware import Card
from planner.inference.offload import weight_bytes
from planner.inference.recordings import all_streamed
from planner.inference.streaming_time import StreamingTime, emptied, streaming_time
from planner.inference.timing import mean_over_tokens, pass_seconds, seconds_over
from planner.memory.block_sizes import AllocatorSettings
from planner.memory.model import Int64s
from planner.memory.polynomials import Shape
from planner.recording.record import Op
from planner.timing import InferenceTime, Operators

if TYPE_CHECKING:
    from planner.inference.simulation import InferenceSimulator

GRID = 8
"""Lengths for which a generation's time is found; others are in proportion to the next longer one."""
_EXACT_SIZE = ("static",)
"""Caches whose passes are recorded anew for every length: their speed is told for the longest alone."""


class OnePass(NamedTuple):
    """A pass, and what it computes and moves."""

    ops: Sequence[Op]
    operators: Operators
    amounts: tuple[Int64s, Int64s]
    """FLOPs and moved bytes of each."""


class Times:
    """Times of one configuration."""

    def __init__(self, simulator: InferenceSimulator, config: InferenceConfig) -> None:
        self.simulator, self.config = simulator, config
        self.shape = (config.micro_batch_size, config.seq_len)
        self.batch_seconds = lru_cache(maxsize=1024)(self._seconds_of)

    @property
    def card(self) -> Card:
        """Where it runs."""
        return self.simulator.card

    def all(self) -> InferenceTime:
        """A batch of the longest texts, and the speed over texts of the planned lengths."""
        config, simulator = self.config, self.simulator
        lengths: Sequence[int] = simulator.window
        if config.kv_cache in _EXACT_SIZE:
            lengths = [config.seq_len] * len(lengths)
        total_s = seconds_over(lengths, config, self._near if simulator.generates else self.batch_seconds)
        batch_ms = self.batch_seconds(self.shape) * 1e3
        read = sum(min(n, config.seq_len) for n in lengths)
        return InferenceTime(
            step_ms=batch_ms,
            micro_batch_ms=batch_ms,
            update_ms=0.0,
            tokens_per_s=(config.max_new_tokens * len(lengths) if simulator.generates else read) / total_s,
            sequences_per_s=len(lengths) / total_s,
            **(self._of_tokens() if simulator.generates else {}),
            **self._bounds(),
        )

    def overhead_tokens(self) -> int:
        """What a batch costs beside its tokens, in tokens: of a time a + b * tokens, a / b, at the longest length.

        From a few rows and a full batch. What is written of a row costs the same in every batch: only tokens that are
        read count in b. From a full batch's tokens on it makes no difference: none is ever worth a batch more.
        """
        config, few = self.config, 2  # one sequence is a kind of batch apart
        shapes = [(rows, config.seq_len) for rows in (few, max(2 * few, config.micro_batch_size))]
        first_s, full_s = (self.batch_seconds(shape) for shape in shapes)
        read_s = [self._writing(shape)[0] for shape in shapes] if self.simulator.generates else [first_s, full_s]
        rows = shapes[1][0] - few
        fixed_s, token_s = first_s - (full_s - first_s) * few / rows, (read_s[1] - read_s[0]) / (rows * config.seq_len)
        most = config.max_tokens_per_micro_batch
        return max(1, round(fixed_s / token_s)) if most * token_s > fixed_s else most

    def _near(self, shape: Shape) -> float:
        """A generation's time, by that of as many rows at the next length of a grid."""
        step = max(16, -(-self.config.seq_len // GRID // 16) * 16)
        rows, width = shape
        width = max(width, self.config.prefix_tokens + 1)
        near = min(self.config.seq_len, -(-width // step) * step)
        prefill_s, token_s = self._writing((rows, near))
        return prefill_s * width / near + token_s * (self.config.max_new_tokens - 1)

    def _seconds_of(self, shape: Shape) -> float:
        """A batch of a shape, from its arrival to its answers."""
        if not self.simulator.generates:
            return self._pass(self._batch(shape))
        prefill_s, token_s = self._writing(shape)
        return prefill_s + token_s * (self.config.max_new_tokens - 1)

    def _batch(self, shape: Shape) -> OnePass:
        step = self.simulator.model(self.config).step(shape)
        return OnePass(step.template.ops, Operators.of(step.template.ops), step.ops_at(shape))

    # -- generation --------------------------------------------------------------------------------------------------

    @cached_property
    def _writing(self) -> Callable[[Shape], tuple[float, float]]:
        return lru_cache(maxsize=1024)(self._writing_of)

    def _writing_of(self, shape: Shape) -> tuple[float, float]:
        """Seconds from a batch of prompts to its first token, and of each further one on average."""
        prefill_s = sum(self._pass(one) for one in self.prompt(shape))
        new = self.config.max_new_tokens
        first = self._past(shape)
        return prefill_s, mean_over_tokens(lambda past: self._pass(self.token(shape, past)), first, new - 1, points=3)

    def _past(self, shape: Shape) -> int:
        """Tokens that the second token's pass finds in the cache."""
        return 1 if self.simulator.context_is_read_apart else shape[1]

    def prompt(self, shape: Shape) -> list[OnePass]:
        """The passes that read a batch of prompts."""
        model = self.simulator.generation(self.config)
        passes = model.prompt_passes(shape, self.config.max_new_tokens)
        return [OnePass(one.ops, one.operators, one.amounts_at(point)) for one, point in passes]

    def token(self, shape: Shape, past: int) -> OnePass:
        """The pass of a token that finds ``past`` and one more in the cache."""
        one, point = self.simulator.generation(self.config).token_pass(shape, past + 1, self.config.max_new_tokens)
        return OnePass(one.ops, one.operators, one.amounts_at(point))

    def _of_tokens(self) -> dict[str, Any]:
        prefill_s, token_s = self._writing(self.shape)
        batch, prompt = self.shape
        return {
            "prefill_ms": prefill_s * 1e3,
            "prefill_tokens_per_s": batch * prompt / prefill_s,
            "decode_ms_per_token": token_s * 1e3,
            "decode_tokens_per_s": batch / token_s,
        }

    # -- passes ------------------------------------------------------------------------------------------------------

    def _pass(self, one: OnePass) -> float:
        if self.config.offload == "none":
            return pass_seconds(one.operators, one.amounts, self.config, self.card)
        return self._streaming(one).expected_s

    def _streaming(self, one: OnePass) -> StreamingTime:
        """A pass whose weights come to the card while it runs."""
        return streaming_time(
            one.ops,
            *one.amounts,
            self.card,
            tf32=self.config.precision == "tf32" and "tf32" in self.card.dense_flops_per_s,
            offload=self.config.offload,
            driver_calls=self._driver_calls,
            tensors_in_file=self._tensors_in_file,
        )

    @cached_property
    def _tensors_in_file(self) -> int:
        held = len(weight_bytes(self.simulator.recordings.weights(all_streamed(self.config))))
        return held + (not self.config.embedding_on_card)

    @cached_property
    def _driver_calls(self) -> int:
        """Calls of the driver in a pass: accelerate empties torch's cache after each weight that comes.

        Of a generation's passes as of a batch of one short text: weights are what comes and goes.
        """
        settings = self.simulator.allocator
        if not isinstance(settings, AllocatorSettings):
            return 0
        if self.simulator.generates:
            return emptied(self.simulator.recordings.weights(self.config), settings).driver_calls
        recording = self.simulator.model(self.config).step(self.shape).recording_at(self.shape)
        return emptied(recording, settings).driver_calls

    def _bounds(self) -> dict[str, Any]:
        """Between which times a full batch's lies where weights come to the card while it runs."""
        if self.config.offload == "none":
            return {}
        if self.simulator.generates:
            new = self.config.max_new_tokens
            parts = [(one, 1) for one in self.prompt(self.shape)]
            parts += [(self.token(self.shape, self._past(self.shape) + new - 2), new - 1)] if new > 1 else []
        else:
            parts = [(self._batch(self.shape), 1)]
        times = [(self._streaming(one), count) for one, count in parts]
        return {
            "lower_ms": sum(time.lower_s * count for time, count in times) * 1e3,
            "upper_ms": sum(time.upper_s * count for time, count in times) * 1e3,
        }
