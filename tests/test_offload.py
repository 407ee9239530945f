"""Offloading: the emitted script and the simulator do the same, allocation by allocation, and change no result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from emitted import load_script, small
from test_emit import bare_statements
from test_levers import BERT, GPT2, configuration, context, tiny
from torch import Tensor, nn

from planner import levers
from planner.config import TrainingConfig
from planner.emit import render_training_files
from planner.errors import InputError
from planner.hardware import find_card
from planner.host_memory import TO_CARD, TO_HOST, copied_bytes, pinned_bytes
from planner.levers import LEVERS
from planner.levers.checkpointing import checkpointing_layers
from planner.levers.host_optimizer import HostAdamW, HostAdamWOfLayers
from planner.levers.offload import OffloadLever, clash
from planner.levers.optimizer import make_optimizer
from planner.memory.model import MemoryModel, Variant, fit_step
from planner.parts.losses import cross_entropy
from planner.recording.kernels import Target
from planner.recording.record import OUTSIDE_LAYERS, Op, Recording
from planner.recording.recorder import Recorder
from planner.recording.source import make_source
from planner.recording.transfers import gradients_to_host, keep_layers_on_host, layer_weights
from planner.request import make_request
from planner.search import evaluate, search
from planner.simulation import Simulator, cublas_workspace_bytes
from planner.space import has_last_resort, make_space
from planner.step import build_model, run_micro_batch
from planner.timing import Operators, achievable
from planner.unfitting import nothing_fits
from planner.workload import Workload

GIB, MIB = 2**30, 2**20
TARGET = Target(compute_capability=(8, 6))
CLASSIFIER = Workload(spec=BERT, task="sequence-classification")
LANGUAGE = Workload(spec=GPT2, task="causal-lm")  # its output layer is tied to its embeddings
SHAPE = (4, 32)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def built(workload: Workload, config: TrainingConfig, device: str) -> nn.Module:
    """The model with every lever but the offload's applied; with weights where it has data."""
    torch.manual_seed(0)
    model = workload.build_model(attention="eager", dtype=torch.float32, device=device)
    for lever in LEVERS:
        if lever.field != "offload":
            model = lever.change_model(model, config)
    return model


def batch_of(workload: Workload, device: str, seed: int = 0) -> dict[str, Tensor]:
    """Inputs and labels at SHAPE."""
    batch = workload.make_batch(*SHAPE, device=device)
    if device == "cpu":
        torch.manual_seed(seed)
        batch["input_ids"] = torch.randint(0, 500, SHAPE)
    return batch


def one_pass(run: Callable[..., Any], batch: dict[str, Tensor], phase: Callable[..., None]) -> None:
    """Forward and backward."""
    inputs = dict(batch)
    labels = inputs.pop("labels")
    phase("forward")
    loss = cross_entropy(run(**inputs).logits, labels, items=labels.numel())
    phase("backward", backward=True)
    loss.backward()
    phase("end")


def recorded(run: Callable[..., Any], workload: Workload, device: str, known: Sequence[Tensor] = ()) -> Recording:
    """One pass under the recorder, on real tensors or on ones without data; ``known`` are there before."""
    batch = batch_of(workload, device)
    recorder = Recorder(TARGET, device=device)
    recorder.adopt((tensor, OUTSIDE_LAYERS) for tensor in known)
    with recorder:
        one_pass(run, batch, recorder.phase)
    return recorder.recording()


def without_host_blocks(recording: Recording) -> list[int]:
    """Signed bytes of every allocation and free but those of the copies in host memory."""
    on_host = {recording.events[op.position - 1] for op in recording.ops if op.name == TO_HOST}
    return [(1 if e > 0 else -1) * recording.sizes[abs(e)] for e in recording.events if abs(e) not in on_host]


def script(tmp_path: Path, **config: Any) -> ModuleType:
    """The functions of an emitted script."""
    return load_script(small("sequence-classification", Path("any"), **config), tmp_path)


# -- activations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workload", [CLASSIFIER, LANGUAGE], ids=["bert", "gpt2"])
@pytest.mark.parametrize("checkpointing", ["none", "full", "every-2"])
def test_the_script_saves_on_the_host_as_the_simulator_does(
    tmp_path: Path, workload: Workload, checkpointing: str
) -> None:
    """The same storages are copied, once each, at the same moments, and the same blocks come back."""
    config = configuration(offload="activations", checkpointing=checkpointing)
    emitted = script(tmp_path, offload="activations", checkpointing=checkpointing)
    theirs = recorded(emitted.HostActivations(built(workload, config, "cpu")), workload, "cpu")
    ours = recorded(OffloadLever().change_model(built(workload, config, "cpu"), config), workload, "cpu")
    assert signed(theirs) == signed(ours)
    assert any(op.name == TO_HOST for op in ours.ops)


def signed(recording: Recording) -> list[int]:
    """Bytes of every allocation (+) and free (-), in order."""
    return [(1 if event > 0 else -1) * recording.sizes[abs(event)] for event in recording.events]


def test_tensors_without_data_are_saved_as_real_ones_are() -> None:
    """Allocation by allocation, but for the copies in host memory, which the card doesn't hold."""
    recordings = []
    for device in ("cpu", "meta"):
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(), nn.Linear(64, 32)).to(
            device
        )
        OffloadLever().change_model(model, configuration(offload="activations"))
        recorder, x = Recorder(TARGET, device=device), torch.ones(4, 8, 32, device=device)
        with recorder:
            loss = model(x).sum()
            recorder.phase("backward", backward=True)
            loss.backward()
            recorder.phase("end")
        recordings.append(recorder.recording())
    real, ours = recordings
    assert [size for size in without_host_blocks(real) if size] == [size for size in signed(ours) if size]
    assert 5 == sum(op.name == TO_HOST for op in ours.ops) == sum(op.name == TO_CARD for op in ours.ops)


class _Shared(nn.Module):
    """One projection whose result is saved in three views, and a weight that is saved twice."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.project(x).split(16, dim=-1)
        return (a * b) @ c.transpose(-1, -2)


def copies_of(model: nn.Module, x: Tensor) -> list[int]:
    """Bytes of each copy to the host in one forward pass."""
    recorder = Recorder(TARGET)
    OffloadLever().change_model(model, configuration(offload="activations"))
    with recorder:
        out = model(x)
    return [max(op.moved_bytes) for op in recorder.recording().ops if op.name == TO_HOST and out is not None]


def test_a_storage_is_copied_once_and_weights_never() -> None:
    """Of one projection [4, 8, 48]: its input, its whole result once, and the product; not its weight."""
    x = torch.ones(4, 8, 16, device="meta")
    assert [4 * 4 * 8 * 16, 4 * 4 * 8 * 48, 4 * 4 * 8 * 16] == copies_of(_Shared().to("meta"), x)


def test_a_storage_that_was_changed_is_copied_again() -> None:
    """What was saved before an in-place change is not what is saved after it."""

    class Changed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            first = y.detach() * x
            y.add_(1)
            return first + y.detach() * x

    model, x = Changed(), torch.full((3, 16), 5.0, requires_grad=True)
    OffloadLever().change_model(model, configuration(offload="activations"))
    model(x).sum().backward()
    assert torch.equal(torch.full((3, 16), 10.0 + 11.0), x.grad)


def test_statistics_and_indices_stay_on_the_card() -> None:
    """Rows of fewer than 16 elements, and whole numbers, are not worth a copy."""
    x = torch.ones(4, 8, 15, device="meta", requires_grad=True)
    assert [] == copies_of(nn.Tanh(), x)
    assert [] == copies_of(nn.Embedding(10, 4).to("meta"), torch.ones(4, 32, dtype=torch.int64, device="meta"))


def test_a_copy_goes_with_the_graph() -> None:
    """Nothing holds a host copy when the backward pass is over, nor when it never runs."""
    model, config = built(CLASSIFIER, configuration(), "cpu"), configuration(offload="activations")
    OffloadLever().change_model(model, config)
    for backward in (True, False):
        recorder = Recorder(TARGET, device="cpu")
        batch = batch_of(CLASSIFIER, "cpu")
        labels = batch.pop("labels")
        with recorder:
            loss = cross_entropy(model(**batch).logits, labels, items=4)
            if backward:
                loss.backward()
            del loss
        recording = recorder.recording()
        on_host = [recording.events[op.position - 1] for op in recording.ops if op.name == TO_HOST]
        assert on_host
        assert {-block for block in on_host} <= set(recording.events)


# -- parameters ------------------------------------------------------------------------------------------------------


def layers_on_host(module: ModuleType, workload: Workload, config: TrainingConfig) -> tuple[nn.Module, Any]:
    """A real model with its layers offloaded by the emitted script, and the script's optimizer."""
    model = built(workload, config, "cpu")
    module.keep_layers_on_host(model, torch.device("cpu"))
    return model, module.HostAdamW(list(model.parameters()), lr=1e-3)


@pytest.mark.parametrize("workload", [CLASSIFIER, LANGUAGE], ids=["bert", "gpt2"])
def test_the_script_fetches_weights_as_the_simulator_does(tmp_path: Path, workload: Workload) -> None:
    """Each layer's weights come when it runs and when it is computed again; gradients go as they appear."""
    config = configuration(offload="parameters", checkpointing="full")
    emitted = script(tmp_path, offload="parameters", checkpointing="full")
    model, optimizer = layers_on_host(emitted, workload, config)
    theirs = recorded(model, workload, "cpu", known=optimizer.grads)
    simulated = OffloadLever().change_model(built(workload, config, "cpu"), config)
    handles = list(gradients_to_host(iter(list(simulated.parameters()))))
    ours = recorded(simulated, workload, "cpu")
    assert len(handles) == len(list(simulated.parameters()))
    assert signed(theirs)[len(optimizer.grads) :] == without_host_blocks(ours)
    weights = layer_weights(simulated, checkpointing_layers(simulated))
    assert 2 * sum(map(len, weights)) == sum(op.name == TO_CARD for op in ours.ops)
    assert len(handles) == sum(op.name == TO_HOST for op in ours.ops)


@pytest.mark.parametrize("workload", [CLASSIFIER, LANGUAGE], ids=["bert", "gpt2"])
def test_offloaded_parameters_get_the_gradients_of_plain_ones(tmp_path: Path, workload: Workload) -> None:
    """Over two micro-batches, bit for bit; nothing is left on the card, and tied weights count once."""
    config = configuration(offload="parameters", checkpointing="full")
    model, optimizer = layers_on_host(script(tmp_path, offload="parameters", checkpointing="full"), workload, config)
    plain = built(workload, config, "cpu")
    for seed in (1, 2):
        for run in (model, plain):
            one_pass(run, batch_of(workload, "cpu", seed), lambda *_, **__: None)
    gradients = [master.grad for master in optimizer.collect()]
    assert all(p.grad is None for p in model.parameters())
    for (name, p), grad in zip(plain.named_parameters(), gradients, strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, grad), name


def test_an_update_reaches_the_weights_that_layers_fetch(tmp_path: Path) -> None:
    """The step is AdamW's, and the next forward pass runs on its result."""
    config = configuration(offload="parameters", checkpointing="full")
    model, optimizer = layers_on_host(script(tmp_path, offload="parameters", checkpointing="full"), CLASSIFIER, config)
    plain = built(CLASSIFIER, config, "cpu")
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)
    for seed in (1, 2):
        for run in (model, plain):
            one_pass(run, batch_of(CLASSIFIER, "cpu", seed), lambda *_, **__: None)
        optimizer.collect()
        for step in (optimizer, adamw):
            step.step()
            step.zero_grad(set_to_none=True)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_an_evaluation_fetches_weights_too(tmp_path: Path) -> None:
    """Without gradients nothing is checkpointed, and each layer's weights come once."""
    config = configuration(offload="parameters", checkpointing="full")
    model, _ = layers_on_host(script(tmp_path, offload="parameters", checkpointing="full"), CLASSIFIER, config)
    plain, batch = built(CLASSIFIER, config, "cpu"), batch_of(CLASSIFIER, "cpu")
    del batch["labels"]
    source = make_source(CLASSIFIER, config, TARGET)
    fetched = [op for op in source.record_evaluation(SHAPE).ops if op.name == TO_CARD]
    assert sum(map(len, layer_weights(plain, checkpointing_layers(plain)))) == len(fetched)
    with torch.no_grad():
        assert torch.equal(plain.eval()(**batch).logits, model.eval()(**batch).logits)


def test_weights_outside_of_layers_stay_on_the_card() -> None:
    """Embeddings, also where the output layer is tied to them, final norm and head are in no layer's list."""
    model = LANGUAGE.build_model(attention="eager", dtype=torch.float32)
    names = {id(p): name for name, p in model.named_parameters()}
    moved = {names[id(p)] for weights in layer_weights(model, checkpointing_layers(model)) for p in weights}
    assert {"transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f.weight", "transformer.ln_f.bias"} == {
        name for name in names.values() if name not in moved
    }


def test_an_embedding_that_a_layer_shares_stays_on_the_card() -> None:
    """A parameter that a module outside of the layers has as well is there all the time."""
    model = LANGUAGE.build_model(attention="eager", dtype=torch.float32)
    layer: Any = checkpointing_layers(model)[0]
    layer.shared = model.get_submodule("transformer.wpe")
    assert not any(p is layer.shared.weight for p in layer_weights(model, [layer])[0])


# -- what the simulator makes of it ----------------------------------------------------------------------------------


def simulator(workload: Workload = CLASSIFIER, **options: Any) -> Simulator:
    """Of a four-layer BERT."""
    return Simulator(workload, find_card("RTX 3090"), **{"ceiling_bytes": 8 * GIB, **options})


@pytest.mark.parametrize("precision", ["fp32", "bf16-amp"])
@pytest.mark.parametrize(
    ("offload", "checkpointing"), [("activations", "none"), ("activations", "full"), ("parameters", "full")]
)
def test_deep_models_from_shallow_recordings_are_those_recorded_in_full(
    offload: str, checkpointing: str, precision: str
) -> None:
    """Nine layers: peak, breakdown and every transfer are the full recording's."""
    workload = dataclasses.replace(CLASSIFIER, spec=tiny("gpt2", n_embd=64, n_layer=9, n_head=2))
    config = configuration(offload=offload, checkpointing=checkpointing, precision=precision)
    sim, shape = simulator(workload), (config.micro_batch_size, config.seq_len)
    source = make_source(workload, config, TARGET)
    full = fit_step(source.record, Variant.of(shape).shapes())
    ours = sim.model(config)
    reference = MemoryModel(lambda _: full, ours.update, cublas_workspace_bytes=cublas_workspace_bytes((8, 6)))
    for accumulate in (False, True):
        assert reference.peak(shape, accumulate=accumulate) == ours.peak(shape, accumulate=accumulate)
    for operator in (TO_HOST, TO_CARD):
        assert copied_bytes(full, shape, operator) == copied_bytes(ours.step(shape), shape, operator)


def test_offloaded_layers_leave_one_layers_weights_on_the_card() -> None:
    """Weights on the card are those outside of the layers; gradients and state are not there at all."""
    sim = simulator()
    config = configuration(offload="parameters", checkpointing="full")
    parts = sim.memory(config).breakdown
    assert (0, 0) == (parts["gradients"], parts["optimizer"])
    assert parts["parameters"] < sim.memory(configuration(checkpointing="full")).breakdown["parameters"] / 2


def test_saved_tensors_leave_the_card_and_are_counted_on_the_host() -> None:
    """Without checkpointing the activations are gone; the host holds each in a pinned block."""
    sim = simulator()
    plain, offloaded = configuration(), configuration(offload="activations")
    before, after = (sim.memory(config).breakdown["activations"] for config in (plain, offloaded))
    assert after < before / 10
    shape = (offloaded.micro_batch_size, offloaded.seq_len)
    copies = copied_bytes(sim.model(offloaded).step(shape), shape, TO_HOST)
    assert before * 0.9 < sum(copies) <= sum(map(pinned_bytes, copies)) <= sim.host_bytes(offloaded)
    assert sorted(copies) == sorted(copied_bytes(sim.model(offloaded).step(shape), shape, TO_CARD))


@pytest.mark.parametrize(("nbytes", "expected"), [(0, 0), (1, 1), (4096, 4096), (4097, 8192), (6 * MIB, 8 * MIB)])
def test_pinned_memory_is_a_power_of_two(nbytes: int, expected: int) -> None:
    """torch's host allocator rounds up."""
    assert expected == pinned_bytes(nbytes)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_host_memory_is_what_the_script_allocates(tmp_path: Path, precision: str, accumulation: int) -> None:
    """The optimizer's tensors after a step, and the layers' weights, each rounded up where it would be pinned."""
    config = configuration(offload="parameters", checkpointing="full", precision=precision)
    config = config.model_copy(update={"gradient_accumulation_steps": accumulation})
    model = built(CLASSIFIER, config, "cpu")
    model = model.to(torch.bfloat16) if precision == "bf16" else model
    module = script(tmp_path, offload="parameters", checkpointing="full", precision=precision)
    module.keep_layers_on_host(model, torch.device("cpu"))
    optimizer = module.HostAdamW(list(model.parameters()), lr=1e-3)
    one_pass(model, batch_of(CLASSIFIER, "cpu"), lambda *_, **__: None)
    optimizer.collect()
    optimizer.step()
    weights = [p.data for part in layer_weights(model, checkpointing_layers(model)) for p in part]
    pinned = {t.data_ptr(): t.nbytes for t in (*optimizer.grads, *optimizer.on_host, *weights)}
    on_card = [p for p in model.parameters() if not any(p.data_ptr() == w.data_ptr() for w in weights)]
    outside = sum(pinned_bytes(4 * p.numel()) for p in on_card if precision == "fp32")  # masters of their own
    shared = sum(pinned_bytes(4 * p.numel()) for p in on_card if p.data_ptr() in pinned)
    state = sum(t.nbytes for values in optimizer.adamw.state.values() for t in values.values() if t.dim())
    gradients = sum(master.grad.nbytes for master in optimizer.on_host) if precision == "bf16" else 0
    staging = {pinned_bytes(grad.nbytes) for grad in optimizer.grads} if accumulation > 1 else set()
    expected = sum(map(pinned_bytes, pinned.values())) + outside - shared + state + gradients + sum(staging)
    assert expected == simulator().host_bytes(config)


def test_what_crosses_the_bus_takes_its_time() -> None:
    """Offloading costs more the more it moves."""
    sim = simulator(dataclasses.replace(CLASSIFIER, spec=tiny("gpt2", n_embd=256, n_layer=4, n_head=2)))
    choices = [("none", "full"), ("activations", "full"), ("activations", "none"), ("parameters", "full")]
    times = [sim.time(configuration(offload=o, checkpointing=c, micro_batch_size=32)).step_ms for o, c in choices]
    assert times[:3] == sorted(times[:3])
    assert times[3] > times[0]


def test_copies_take_the_bus_and_kernels_the_memory() -> None:
    """A copy of 100 MB takes as long as the bus needs for it, on the stream of the kernels."""
    card, reached = find_card("RTX 3090"), achievable()
    ops = [Op(name, 0, (10**8,), "elementwise", 0, False) for name in (TO_HOST, TO_CARD, "aten.relu")]
    flops, moved = np.zeros(3, dtype=np.int64), np.full(3, 10**8)
    times = Operators.of(ops).kernel_seconds(flops, moved, card, tf32=False, reached=reached)
    over_the_bus = 1e8 / (card.pcie_bytes_per_s * reached.pcie_fraction) + reached.kernel_us * 1e-6
    assert [over_the_bus] * 2 == pytest.approx(times[:2].tolist())
    assert times[2] < over_the_bus / 10


# -- which offload goes with what ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"checkpointing": "none"}, "needs checkpointing full"),
        ({"checkpointing": "every-2"}, "needs checkpointing full"),
        ({"optimizer": "sgd"}, "no host version"),
        ({"method": "lora"}, "method full"),
        ({"precision": "fp16-amp"}, "loss scaling"),
    ],
)
def test_offloaded_parameters_need_certain_others(change: dict[str, str], said: str) -> None:
    """A configuration and a request with the wrong ones are refused, with the reason; with the right ones not."""
    fields = {"optimizer": "adamw_fused", "checkpointing": "full", "method": "full", "precision": "fp32"}
    assert clash("parameters", **fields) is None
    assert said in str(clash("parameters", **(fields | change)))
    assert clash("activations", **(fields | change)) is None
    make_request(model="any", vram="8GB", offload="activations,none", **change)
    with pytest.raises(InputError, match=said) as caught:
        make_request(model="any", vram="8GB", offload="parameters", **change)
    assert ["offload"] == [problem.argument for problem in caught.value.problems]


def test_host_memory_is_a_ceiling_too() -> None:
    """What fits the card and not the host doesn't fit; the reason says how much is missing."""
    config = configuration(offload="parameters", checkpointing="full")
    need = simulator().host_bytes(config)
    assert "fits" == evaluate(config, simulator(host_ram_bytes=need)).status
    short = evaluate(config, simulator(host_ram_bytes=need - MIB))
    assert "exceeds" == short.status
    assert "of host memory more than there is" in short.reason


def test_last_resorts_are_tried_when_nothing_else_fits() -> None:
    """They stand in a space of their own, and not where the request names offloads."""
    asked = make_request(model="bert-base-uncased", vram="8GB")
    where = context(effective_batch_size=8)
    assert ["none", "optimizer"] == list(make_space(asked, where, 64).values["offload"])
    assert ["parameters", "activations"] == list(make_space(asked, where, 64, last_resort=True).values["offload"])
    assert has_last_resort(asked, where)
    named = make_request(model="bert-base-uncased", vram="8GB", offload="none,optimizer")
    assert not has_last_resort(named, where)
    adapters = context(method="lora")
    assert ["none"] == list(make_space(asked, adapters, 64).values["offload"])
    assert ["optimizer", "activations"] == list(make_space(asked, adapters, 64, last_resort=True).values["offload"])


def test_a_last_resort_makes_fit_what_nothing_else_does() -> None:
    """On a card that holds the model's layers not even once, full fine-tuning still fits."""
    asked = make_request(model="bert-base-uncased", vram="8GB", precision="fp32")
    workload = dataclasses.replace(CLASSIFIER, spec=tiny("gpt2", n_embd=256, n_layer=12, n_head=2))
    spaces = [make_space(asked, context(effective_batch_size=8), 64, last_resort=last) for last in (False, True)]
    config = configuration(offload="parameters", checkpointing="full", micro_batch_size=8, seq_len=64)
    ceiling = simulator(workload).memory_of_budget(config).total_bytes + 4 * MIB
    sim = simulator(workload, ceiling_bytes=ceiling, host_ram_bytes=GIB)
    ordinary, last = (search(space, sim) for space in spaces)
    assert ordinary.best is None
    assert last.best is not None
    assert "parameters" == last.best.config.offload


def test_exit_3_says_how_much_host_memory_would_do() -> None:
    """When the card could and the host can't, that is one of the remedies."""
    asked = make_request(model="bert-base-uncased", vram="8GB", method="full", precision="fp32")
    workload = dataclasses.replace(CLASSIFIER, spec=tiny("gpt2", n_embd=256, n_layer=12, n_head=2))
    config = configuration(offload="parameters", checkpointing="full", micro_batch_size=8, seq_len=64)
    ceiling = simulator(workload).memory_of_budget(config).total_bytes + 4 * MIB
    sim = simulator(workload, ceiling_bytes=ceiling, host_ram_bytes=MIB)
    space = make_space(asked, context(effective_batch_size=8), 64, last_resort=True)
    result = search(space, sim)
    assert result.best is None
    assert "would fit: --method full --offload parameters --host-ram 1GB" in str(
        nothing_fits(asked, sim, space, result)
    )


# -- for real, in a trial --------------------------------------------------------------------------------------------


def module_text(name: str) -> str:
    """A lever's source."""
    return (Path(levers.__file__).parent / f"{name}.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("ours", "config"),
    [
        ("HostAdamW", {"offload": "optimizer"}),
        ("HostAdamWOfLayers", {"offload": "parameters", "checkpointing": "full"}),
    ],
)
def test_a_trial_steps_in_host_memory_as_the_script_does(ours: str, config: dict[str, Any]) -> None:
    """Statement for statement: the script brings one of two classes of the same name."""
    plan = small("sequence-classification", Path("any"), **config)
    text = render_training_files(plan)["train.py"]
    renamed = module_text("host_optimizer").replace(f"class {ours}(", "class HostAdamW(", 1)
    if ours != "HostAdamW":
        renamed = renamed.replace("class HostAdamW(", "class Other(", 1)
    assert bare_statements(text, "HostAdamW") == bare_statements(renamed, "HostAdamW")


@pytest.mark.parametrize("offload", ["optimizer", "parameters", "activations"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_trial_trains_with_offloads_as_without(offload: str, precision: str) -> None:
    """Two updates of two micro-batches: the same weights, bit for bit; of bf16 weights the host has fp32 ones."""
    trained = []
    for value in ("none", offload):
        masters = precision == "bf16" and offload != "activations"
        config = configuration(
            offload=value, checkpointing="full", precision="bf16-master" if masters and value == "none" else precision
        )
        torch.manual_seed(0)
        model = build_model(CLASSIFIER, config, device="cpu")
        parameters = list(model.parameters())
        optimizer = make_optimizer("adamw_fused", parameters, masters=masters and value == "none", offload=value)
        for seed in (0, 1, 2, 3):
            batch = partial(CLASSIFIER.make_batch, *SHAPE, device="cpu", seed=seed)
            run_micro_batch(model, batch, Recorder(TARGET), None, items=8)
            if seed % 2:
                if isinstance(optimizer, HostAdamWOfLayers):
                    optimizer.collect()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        trained.append([p.detach().clone() for p in parameters])
    untrained = build_model(CLASSIFIER, configuration(precision=precision), device="cpu")
    for ours, theirs, (name, _) in zip(*trained, untrained.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_host_state_is_saved_and_loaded() -> None:
    """fp32 weights and both moments."""
    weights = [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))]
    for kind in (HostAdamW, HostAdamWOfLayers):
        saved, fresh = kind(weights, lr=0.1), kind(weights, lr=0.1)
        for p in weights:
            p.grad = torch.ones_like(p)
            if isinstance(saved, HostAdamWOfLayers):
                saved.take_gradient(torch.ones_like(p), p)
        if isinstance(saved, HostAdamWOfLayers):
            saved.collect()
        saved.step()
        fresh.load_state_dict(saved.state_dict())
        assert all(map(torch.equal, fresh.on_host, saved.on_host))
        assert set(fresh.adamw.state_dict()["state"]) == set(saved.adamw.state_dict()["state"])


def test_only_layers_weights_go_to_the_host() -> None:
    """Embeddings, head and buffers move to the card; a layer's weights are copies, and not where they were."""
    model = LANGUAGE.build_model(attention="eager", dtype=torch.float32, device="cpu")
    layers = checkpointing_layers(model)
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    keep_layers_on_host(model, layers, torch.device("cpu"))
    moved = {name for name, p in model.named_parameters() if p.data_ptr() != before[name]}
    assert {name for name in before if name.startswith("transformer.h.")} == moved
