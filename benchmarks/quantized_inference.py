"""Quantized weights at inference: bytes and peaks as predicted, and as a small causal model has them on this CPU.

    python benchmarks/quantized_inference.py --out quantized.csv

A Llama of 26 M random parameters is written to a folder and loaded by transformers with each quantization; it reads a
prompt and then writes tokens one at a time, with a growing cache. Weights are what its layers hold. Peaks are what
torch's CPU allocator reports of itself to the profiler: bitsandbytes' operators allocate within, where no dispatch mode
sees it. The prediction comes from the stand-ins on tensors without data. Of ``int8-dynamic`` the packed weights are in
fbgemm's memory: there the growth of the resident set is compared, and peaks are compared without them.
"""

from __future__ import annotations

import argparse
import copy
import csv
import ctypes
import gc
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from planner.inference.quantized import DYNAMIC, Int8Inference, held_tensors, outside_bytes, quantize
from planner.measure.backends import live_peaks
from planner.recording import cpu
from planner.recording.kernels import Target
from planner.recording.record import INPUTS
from planner.recording.recorder import Recorder

PROMPT_TOKENS, NEW_TOKENS = 128, 3
CASES = (
    *(("none", name) for name in ("float32", "bfloat16")),
    *(("nf4", name) for name in ("float32", "bfloat16")),
    *(("int8", name) for name in ("float32", "bfloat16", "float16")),
    *(("int8-weight-only", name) for name in ("float32", "bfloat16")),
    ("int8-dynamic", "float32"),
)
"""Quantizations with the type of the other weights."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A pass, as predicted and as it was."""

    model: str
    quantization: str
    dtype: str
    outliers: int
    """Columns of outliers in each norm's output; the prediction takes 7 for granted in every layer's input."""
    shape: str
    """``prefill`` or ``token``, with its tokens."""
    predicted_weight_bytes: int
    recorded_weight_bytes: int
    predicted_peak_bytes: int
    recorded_peak_bytes: int

    @property
    def weight_error(self) -> float:
        """Predicted / recorded - 1."""
        return self.predicted_weight_bytes / self.recorded_weight_bytes - 1

    @property
    def peak_error(self) -> float:
        """Predicted / recorded - 1."""
        return self.predicted_peak_bytes / self.recorded_peak_bytes - 1

    def row(self) -> dict[str, object]:
        """Every figure, errors included."""
        return {**asdict(self), "weight_error": f"{self.weight_error:.6f}", "peak_error": f"{self.peak_error:.6f}"}


HEADER = [*(field.name for field in fields(Comparison)), "weight_error", "peak_error"]


# -- the model -------------------------------------------------------------------------------------------------------


def small_llama() -> Any:
    """26 M parameters, with sizes that are no multiples of fbgemm's blocks."""
    from transformers import LlamaConfig

    return LlamaConfig(
        **{"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "vocab_size": 8192},
        **{"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512},
        pad_token_id=0,
    )


def with_outliers(model: nn.Module, columns: int) -> nn.Module:
    """The model with the first columns of each norm's output large enough for LLM.int8 to set them apart."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data[:columns] = 10.0
    return model


def real_model(folder: Path, quantization: str, dtype: torch.dtype) -> nn.Module:
    """As a script loads it; for torch.ao with weights of its own, as those of a folder stay in its mapped file."""
    from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

    if quantization == DYNAMIC:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
        return quantize(model, quantization, dtype).eval()
    options: dict[str, Any] = {}
    if quantization == "int8":
        options["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)
    elif quantization == "nf4":
        options["quantization_config"] = BitsAndBytesConfig(
            **{"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
            bnb_4bit_compute_dtype=dtype,
        )
    elif quantization == "int8-weight-only":
        from torchao.quantization import Int8WeightOnlyConfig

        options["quantization_config"] = TorchAoConfig(Int8WeightOnlyConfig())
    made: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map={"": "cpu"}, **options)
    return made.eval()


def predicted_model(config: Any, quantization: str, dtype: torch.dtype) -> nn.Module:
    """Without data, said to be on the CPU."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    return cpu.moved(quantize(model, quantization, dtype).eval().requires_grad_(False))


# -- the passes ------------------------------------------------------------------------------------------------------

Phase = Callable[[str], Any]


@torch.no_grad()
def generate(model: Any, ids: Tensor, token: Tensor, phase: Phase) -> None:
    """A prompt, then tokens one at a time; what is written is of no interest, so it is always the same."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    for index in range(1 + NEW_TOKENS):
        with phase(f"token {index}" if index else "prefill"):
            model(input_ids=token if index else ids, cache=cache, logits_to_keep=1)


def inputs() -> tuple[Tensor, Tensor]:
    """A prompt, and a token."""
    return torch.ones(1, PROMPT_TOKENS, dtype=torch.int64), torch.ones(1, 1, dtype=torch.int64)


def predicted(model: nn.Module) -> tuple[int, dict[str, int]]:
    """Bytes of weights, and the peak of each pass."""
    recorder = Recorder(Target(kind="cpu"))

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        recorder.phase(name)
        yield

    held = distinct(held_tensors(model))
    with cpu.CpuSemantics(), recorder:
        recorder.adopt((tensor, -1) for tensor in held)
        recorder.phase("inputs", category=INPUTS)
        ids, token = (tensor.clone() for tensor in inputs())
        generate(model, ids, token, phase)
        recorder.phase("end")
        return sum(map(nbytes, held)), live_peaks(recorder.recording())


def recorded(model: nn.Module) -> tuple[int, dict[str, int]]:
    """The same of a model with data: each pass's allocations, as the CPU allocator reports them."""
    peaks: dict[str, int] = {}
    before = 0

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        nonlocal before
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            yield
        peak, left = followed(profiler)
        peaks[name] = before + peak
        before += left

    ids, token = inputs()
    weights = sum(map(nbytes, distinct(held_tensors(model))))
    generate(model, ids, token, lambda _: nullcontext())  # what is made once
    before = sum(map(nbytes, (*distinct(held_tensors(model)), ids, token)))
    generate(model, ids, token, phase)
    return weights, peaks


def followed(profiler: Any) -> tuple[int, int]:
    """Most bytes at a time, and those that are left, of what was allocated and freed."""
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak, live


def distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    """One tensor for each storage."""
    return list({tensor.untyped_storage()._cdata: tensor for tensor in tensors}.values())


def nbytes(tensor: Tensor) -> int:
    """Of the storage."""
    return tensor.untyped_storage().nbytes()


def resident_growth(make: Callable[[], nn.Module]) -> tuple[int, nn.Module]:
    """By how much a model makes the process's resident set grow, what malloc has in reserve given back.

    It is made once before: packages that only making it imports, and memory that only they keep, don't count.
    """
    make()
    before = _resident()
    model = make()
    return _resident() - before, model


def _resident() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


# -- the comparison --------------------------------------------------------------------------------------------------


def compare(folder: Path, config: Any, quantization: str, dtype_name: str, outliers: int) -> list[Comparison]:
    """Each pass of a case."""
    dtype = getattr(torch, dtype_name)
    ours = predicted_model(config, quantization, dtype)
    if not outliers:
        for module in ours.modules():
            if isinstance(module, Int8Inference):
                module.outlier_columns = 0
    weights, peaks = predicted(ours)
    growth, real = resident_growth(lambda: real_model(folder, quantization, dtype))
    outside = outside_bytes(real)
    real_weights, real_peaks = recorded(real)
    return [
        Comparison(
            **{"model": "llama-26m", "quantization": quantization, "dtype": dtype_name, "outliers": outliers},
            shape=name if name != "prefill" else f"prefill {PROMPT_TOKENS}",
            predicted_weight_bytes=weights,
            recorded_weight_bytes=growth if outside else real_weights,
            predicted_peak_bytes=peaks[name] - outside,
            recorded_peak_bytes=peak,
        )
        for name, peak in real_peaks.items()
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="CSV to write")
    parser.add_argument("--quantization", help="only these, comma-separated")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    wanted = options.quantization.split(",") if options.quantization else [name for name, _ in CASES]
    found: list[Comparison] = []
    from transformers import AutoModelForCausalLM

    for outliers in (0, 7):
        torch.manual_seed(0)
        config = small_llama()
        with tempfile.TemporaryDirectory() as folder:
            with_outliers(AutoModelForCausalLM.from_config(config), outliers).save_pretrained(folder)
            for quantization, dtype in CASES:
                if quantization in wanted and (quantization == "int8" or not outliers):
                    found += compare(Path(folder), config, quantization, dtype, outliers)
    _print(found)
    if options.out:
        with options.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, HEADER)
            writer.writeheader()
            writer.writerows(item.row() for item in found)
    return 0


def _print(found: Sequence[Comparison]) -> None:
    for item in found:
        print(
            f"{item.quantization:17} {item.dtype:9} {item.outliers} {item.shape:12} weights "
            f"{item.predicted_weight_bytes:>12,} {item.recorded_weight_bytes:>12,} {item.weight_error:+.4%}   peak "
            f"{item.predicted_peak_bytes:>12,} {item.recorded_peak_bytes:>12,} {item.peak_error:+.3%}"
        )


if __name__ == "__main__":
    sys.exit(main())
