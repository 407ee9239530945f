"""What an emitted infer.py writes is what the model writes of each prompt alone, however its cache is kept. fp32."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from emitted import VOCABULARY
from hypothesis import given
from hypothesis import strategies as st
from inference_scripts import infer, make_inference_plan

from planner.parts.prefixes import PrefixCache, shared_prefixes

pytestmark = pytest.mark.usefixtures("one_thread")
SYSTEM = "Return the value of the object that the handler was given, and raise no error. "
END = 3
"""The token that ends a text."""
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
CHAT += "{% if add_generation_prompt %}assistant:{% endif %}"


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Callable[[str], Path]:
    """Folders of two-layer models that write, with weights so large that what they write depends on the prompt."""
    import transformers as hf

    size = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": END, "initializer_range": 0.4}
    llama = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama |= {"num_key_value_heads": 2, "max_position_embeddings": 128, **size}
    t5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    makers = {
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**llama)),
        "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**llama, sliding_window=8)),
        "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=128, **size)),
        "t5": lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(vocab_size=VOCABULARY, eos_token_id=END, initializer_factor=3.0, **t5)
        ),
    }

    def make(name: str) -> Path:
        folder = root / name
        if not folder.exists():
            hf.set_seed(0)
            makers[name]().save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        return folder

    root = tmp_path_factory.mktemp("writers")
    return make


@cache
def model_and_words(folder: Path) -> tuple[Any, Any]:
    """What transformers loads from a folder."""
    import transformers as hf

    both = hf.AutoConfig.from_pretrained(folder).is_encoder_decoder
    kind = hf.AutoModelForSeq2SeqLM if both else hf.AutoModelForCausalLM
    return kind.from_pretrained(folder), hf.AutoTokenizer.from_pretrained(folder)


@cache
def ids_alone(folder: Path, text: str, seq_len: int = 48, new: int = 8, fp8: bool = False) -> list[int]:
    """The tokens that the model writes of one prompt, by transformers alone; ``fp8``: with its quantized cache."""
    import torch

    model, words = model_and_words(folder)
    both = model.config.is_encoder_decoder
    ids = words(text, verbose=False)["input_ids"]
    ids = torch.tensor([ids[:seq_len] if both else ids[-seq_len:]])
    how: dict[str, Any] = {"max_new_tokens": new, "do_sample": False}
    how |= {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}} if fp8 else {}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **how)[0].tolist()
    return list(found[1:] if both else found[ids.shape[1] :])


def written_alone(folder: Path, text: str, **how: Any) -> str:
    """The same as text."""
    return str(model_and_words(folder)[1].decode(ids_alone(folder, text, **how), skip_special_tokens=True))


def copied(folder: Path, to: Path) -> Path:
    """A folder of its own with the same files."""
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def plan_for(model: Path, task: str = "causal-lm", **config: Any) -> dict[str, Any]:
    """Four requests together, prompts of at most 48 tokens, eight new ones."""
    sizes = {"seq_len": 48, "max_tokens_per_micro_batch": 224, "micro_batch_size": 4}
    return make_inference_plan(task, str(model), **(sizes | config))


@pytest.fixture(scope="module")
def prompts(rows: Any) -> list[dict[str, str]]:
    """Prompts of many lengths, most of which begin with the same tokens."""
    return [{"prompt": (SYSTEM if i % 4 else "") + row["text"][: 10 + 7 * i]} for i, row in enumerate(rows[:14])]


CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"kv_cache": "static"},
    "chunks": {"prefill_chunk_tokens": 5},
    "prefix": {"prefix_tokens": 16, "prefix_cache_bytes": 100_000},
    "prefix-chunks": {"prefix_tokens": 16, "prefix_cache_bytes": 100_000, "prefill_chunk_tokens": 5},
    "no-room": {"prefix_tokens": 16, "prefix_cache_bytes": 10},
}


@pytest.mark.parametrize("kept", CACHES)
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_the_same_text_with_every_cache(tmp_path: Path, writers: Any, prompts: Any, model: str, kept: str) -> None:
    """Batches, padding, chunks of the prompt and shared beginnings change nothing of what is written."""
    run = infer(plan_for(writers(model), **CACHES[kept]), tmp_path, prompts)
    assert [written_alone(writers(model), row["prompt"]) for row in prompts] == run.column("text")
    assert 10 < len(set(run.column("text")))


def test_a_window_is_not_gone_on_from_behind_padding(tmp_path: Path, writers: Any, prompts: Any) -> None:
    """A model with a sliding window computes every prompt whole: the same text, also where a prefix is planned."""
    plan = plan_for(writers("mistral"), **CACHES["prefix"])
    run = infer(plan, tmp_path, prompts)
    assert [written_alone(writers("mistral"), row["prompt"]) for row in prompts] == run.column("text")


def test_shared_beginnings_are_computed_once(tmp_path: Path, writers: Any, prompts: Any) -> None:
    """One pass for the beginning that prompts share; those of the batches have the other tokens alone."""
    passes: list[int] = []

    def watch(script: Any) -> None:
        load = script.load_model

        def watched(*arguments: Any) -> Any:
            model = load(*arguments)
            model.base_model.register_forward_pre_hook(
                lambda _, args, kwargs: passes.append((args[0] if args else kwargs["input_ids"]).shape[1]),
                with_kwargs=True,
            )
            return model

        script.load_model = watched

    words = model_and_words(writers("llama"))[1]
    whole = [row for row in prompts if len(words(row["prompt"], verbose=False)["input_ids"]) < 48]
    infer(plan_for(writers("llama"), **CACHES["prefix"]), tmp_path, whole, change=watch)
    assert 1 == passes.count(16)
    assert max(passes) < 48


def test_the_end_and_what_follows_it_are_left_out(tmp_path: Path, writers: Any, prompts: Any) -> None:
    """A text ends before any of the tokens that the checkpoint says end it; --max-new-tokens allows more or fewer."""
    folder, prompt = copied(writers("gpt2"), tmp_path / "model"), prompts[0]["prompt"]
    long = ids_alone(folder, prompt, new=20)
    end = [i for i, token in enumerate(long) if token not in long[:i]][-1]
    assert 0 < end
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, long[end]]}))
    run = infer(plan_for(folder), tmp_path, prompts, "--max-new-tokens", "20")
    assert (end, written_alone(folder, prompt, new=end)) == (run.answers[0]["tokens"], run.answers[0]["text"])
    assert all(count <= 20 for count in run.column("tokens"))


def test_a_quantized_cache_writes(tmp_path: Path, writers: Any, prompts: Any) -> None:
    """Keys and values of a byte each, as transformers writes with them; --baseline writes as the model does in fp32.

    A layer's keys have one scale, which in a batch is that of all its texts: so they are alone here.
    """
    folder = writers("llama")
    plan = plan_for(folder, kv_cache="quantized", micro_batch_size=1, max_sequences=1, max_tokens_per_micro_batch=56)
    run = infer(plan, tmp_path, prompts)
    assert [written_alone(folder, row["prompt"], fp8=True) for row in prompts] == run.column("text")
    exact = infer(plan, tmp_path, prompts, "--baseline", output="exact.jsonl").column("text")
    assert [written_alone(folder, row["prompt"]) for row in prompts] == exact
    together = infer(plan_for(folder, kv_cache="quantized"), tmp_path, prompts, output="together.jsonl")
    assert len(prompts) == len(together.column("text"))


def test_messages_go_through_the_chat_template(tmp_path: Path, writers: Any) -> None:
    """A row of messages is written out by the tokenizer's template; a prompt beside it is used as it is."""
    folder = copied(writers("llama"), tmp_path / "chat")
    (folder / "chat_template.jinja").write_text(CHAT)
    rows = [
        {"messages": [{"role": "user", "content": "Which value?"}]},
        {"prompt": "user: Which value? assistant:"},
        {"messages": "no list", "prompt": "Which value?"},
    ]
    run = infer(plan_for(folder), tmp_path, rows)
    assert run.answers[0]["text"] == run.answers[1]["text"] == written_alone(folder, rows[1]["prompt"])
    assert written_alone(folder, "Which value?") == run.answers[2]["text"]
    only = infer(plan_for(folder), tmp_path, rows[:1], output="only.jsonl")
    assert only.answers == run.answers[:1]
    without = infer(plan_for(writers("llama")), tmp_path, rows, output="without.jsonl")
    assert "chat template" in without.answers[0]["error"] or "chat_template" in without.answers[0]["error"]


def test_what_the_system_says(tmp_path: Path, writers: Any) -> None:
    """Column system: the chat template's first message; before the prompt where the tokenizer has no template."""
    folder = copied(writers("llama"), tmp_path / "chat")
    (folder / "chat_template.jinja").write_text(CHAT)
    rows = [{"prompt": "Which value?", "system": SYSTEM}, {"prompt": "Which value?", "system": None}]
    run = infer(plan_for(folder), tmp_path, rows)
    chat = f"system: {SYSTEM} user: Which value? assistant:"
    assert [written_alone(folder, chat), written_alone(folder, "Which value?")] == run.column("text")
    without = infer(plan_for(writers("llama")), tmp_path, rows, output="without.jsonl")
    assert written_alone(writers("llama"), f"{SYSTEM}Which value?") == without.answers[0]["text"]


def test_encoder_decoders_write(tmp_path: Path, writers: Any, rows: Any) -> None:
    """seq2seq-lm: what the model writes of each text alone."""
    run = infer(plan_for(writers("t5"), "seq2seq-lm"), tmp_path, rows[:9])
    assert [written_alone(writers("t5"), row["text"]) for row in rows[:9]] == run.column("text")


# ----- perplexity -----


def test_perplexity_of_texts(tmp_path: Path, writers: Any, rows: Any) -> None:
    """The mean loss of a text's tokens as the model itself computes it, over passes of few logits."""
    import torch

    def few(script: Any) -> None:
        script.LOGITS_IN_A_PASS = 4 * 7 * VOCABULARY

    run = infer(plan_for(writers("llama")), tmp_path, rows[:9], "--perplexity", change=few)
    model, words = model_and_words(writers("llama"))
    for row, answer in zip(rows, run.answers, strict=False):
        ids = words(row["text"], return_tensors="pt", verbose=False)["input_ids"]
        losses = []
        for part in ids.split(48, dim=1):
            with torch.no_grad():
                count = part.shape[1] - 1
                losses += [model(part, labels=part).loss.item() * count] if count else []
        counted = sum(part.shape[1] - 1 for part in ids.split(48, dim=1))
        assert (counted, pytest.approx(sum(losses) / counted, rel=1e-5)) == (answer["tokens"], answer["loss"])


def test_perplexity_of_targets(tmp_path: Path, writers: Any, rows: Any) -> None:
    """seq2seq-lm: of the target's tokens, which the data has in a column of its own."""
    import torch

    data = [{"text": row["text"], "summary": row["label"]} for row in rows[:6]]
    run = infer(plan_for(writers("t5"), "seq2seq-lm"), tmp_path, data, "--perplexity")
    model, words = model_and_words(writers("t5"))
    for row, answer in zip(data, run.answers, strict=True):
        inputs = words(row["text"], truncation=True, max_length=48, return_tensors="pt")
        labels = words(text_target=row["summary"], return_tensors="pt")["input_ids"]
        with torch.no_grad():
            assert pytest.approx(model(**inputs, labels=labels).loss.item(), rel=1e-5) == answer["loss"]


# ----- which beginnings are kept -----

PUTS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 12), st.booleans()), max_size=60)


@given(PUTS)
def test_the_least_recently_used_go(events: list[tuple[int, int, bool]]) -> None:
    """Never more than the limit; what is kept is the longest run of the last used ones that has room."""
    kept, used = PrefixCache(20), dict[int, int]()
    for key, size, put in events:
        if put:
            kept.put((key,), str(key), size)
            used.pop(key, None)
            used[key] = size
            while sum(used.values()) > 20:
                used.pop(next(iter(used)))
        elif kept.get((key,)) is not None:
            used[key] = used.pop(key)
        assert {(key,): (str(key), size) for key, size in used.items()} == dict(kept.kept)
        assert sum(used.values()) == kept.held_bytes <= 20


def test_one_that_is_too_large_takes_no_other_s_place() -> None:
    """A prefix beyond the whole limit isn't kept, and nothing goes for it."""
    kept = PrefixCache(10)
    kept.put((1,), "small", 4)
    kept.put((2,), "large", 11)
    assert (None, "small") == (kept.get((2,)), kept.get((1,)))


@given(st.lists(st.lists(st.integers(0, 1), min_size=0, max_size=8), max_size=8), st.integers(1, 8))
def test_shared_beginnings(prompts: list[list[int]], tokens: int) -> None:
    """A shared beginning begins its prompt and another one, leaves a token of it, and is no longer than asked for."""
    found = shared_prefixes(prompts, tokens)
    for i, (prompt, prefix) in enumerate(zip(prompts, found, strict=True)):
        assert list(prefix) == prompt[: len(prefix)]
        assert len(prefix) <= tokens and (not prefix or len(prefix) < len(prompt))
        if prefix:
            assert any(prefix == tuple(other[: len(prefix)]) for j, other in enumerate(prompts) if j != i)


def test_prompts_of_one_conversation_share_it() -> None:
    """All that begin alike share what all of them have, up to the tokens asked for; a prompt alone shares nothing."""
    same = list(range(10))
    assert [tuple(same[:8])] * 2 + [()] == shared_prefixes([[*same, 1], [*same, 2], [7, 7, 7, 7, 7]], 8)
    assert json.dumps([same, same]) == json.dumps([list(x) for x in shared_prefixes([[*same, 1], [*same, 2]], 16)])
