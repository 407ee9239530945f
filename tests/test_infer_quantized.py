"""An emitted infer.py stores the layers that the simulator counts, and no others; what it says stays near. On a CPU."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from emitted import SIZES, VOCABULARY, minilm
from inference_scripts import infer, load_infer, make_inference_plan

pytestmark = pytest.mark.usefixtures("one_thread")
QUANTIZATIONS = ("int8", "nf4", "int8-weight-only", "int8-dynamic")
LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}


def bert() -> Any:
    """With a new head, and a pooler that is one."""
    import transformers as hf

    return hf.BertForSequenceClassification(hf.BertConfig(vocab_size=VOCABULARY, **SIZES))


def llama() -> Any:
    """With output embeddings."""
    import transformers as hf

    return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **LLAMA))


def t5() -> Any:
    """With output embeddings that are the input's, and layers that stay in fp32."""
    import transformers as hf

    return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=VOCABULARY, **T5))


MODELS: dict[str, Callable[[], Any]] = {"sequence-classification": bert, "causal-lm": llama, "seq2seq-lm": t5}


def is_quantized(module: Any) -> bool:
    """Whether a layer is bitsandbytes', torch.ao's, or has a weight of torchao's."""
    weight = getattr(module, "weight", None)
    libraries = [type(part).__module__ for part in (module, weight)]
    return any(name.startswith(("bitsandbytes.nn.modules", "torch.ao.", "torchao.")) for name in libraries) and (
        type(module).__name__ in ("Linear", "Linear4bit", "Linear8bitLt")
    )


@pytest.mark.parametrize("task", MODELS)
def test_the_layers_that_the_simulator_counts(tmp_path: Path, task: str) -> None:
    """Heads, output embeddings and what transformers keeps in fp32 stay whole, whichever library stores the others."""
    import torch

    from planner.inference.quantized import places

    model = MODELS[task]()
    model.save_pretrained(tmp_path)
    names = {id(module): name for name, module in model.named_modules()}
    arguments = argparse.Namespace(model=str(tmp_path), seed=0, baseline=False)
    for quantization in QUANTIZATIONS:
        script = load_infer(make_inference_plan(task, str(tmp_path), quantization=quantization), tmp_path)
        loaded = script.load_model(arguments, torch.device("cpu"))
        expected = {names[id(layer)] for _, _, layer in places(model, quantization)}
        assert expected == {name for name, part in loaded.named_modules() if is_quantized(part)}, quantization
        assert 10 < len(expected)


@pytest.fixture(scope="module")
def whole(rows: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Vectors of real texts from MiniLM's weights as they are."""
    return infer(make_inference_plan("embedding", str(minilm())), tmp_path_factory.mktemp("whole"), rows[:6]).column(
        "embedding"
    )


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_quantized_weights_answer_alike(tmp_path: Path, rows: Any, whole: list[Any], quantization: str) -> None:
    """Real quantized weights: vectors near to the whole ones, and not the same."""
    run = infer(make_inference_plan("embedding", str(minilm()), quantization=quantization), tmp_path, rows[:6])
    for vector, near in zip(whole, run.column("embedding"), strict=True):
        likeness = sum(a * b for a, b in zip(vector, near, strict=True))
        assert 0.9 < likeness < 0.999999


def test_the_baseline_is_not_quantized(tmp_path: Path, rows: Any, whole: list[Any]) -> None:
    """--baseline: the whole weights' vectors."""
    plan = make_inference_plan("embedding", str(minilm()), quantization="int8-dynamic")
    run = infer(plan, tmp_path, rows[:6], "--baseline")
    assert [pytest.approx(vector, abs=1e-6) for vector in whole] == run.column("embedding")
