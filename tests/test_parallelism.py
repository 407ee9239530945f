"""Several cards: what each holds, what they say to each other, and which combinations there are."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner import plan
from planner.communication import all_reduce_seconds, collective_seconds, exposed_seconds
from planner.config import TrainingConfig
from planner.errors import InputError
from planner.hardware import find_card, nccl_bytes
from planner.levers import conflict
from planner.levers.checkpointing import checkpointing_layers
from planner.memory.model import agrees
from planner.models import resolve_model
from planner.recording.record import Op
from planner.recording.sharding import Sharding
from planner.request import make_request
from planner.simulation import Simulator
from planner.space import effective_batch_size
from planner.workload import Workload

GIB = 2**30


# -- against torch's own -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def _two_of_three():
    """A process group of three whose collectives move nothing: this process allocates what a real one would."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    yield
    dist.destroy_process_group()


class _Live(TorchDispatchMode):
    """Peak of the bytes of all storages seen, looked at after each operator; resized ones as they are."""

    def __init__(self, skipped):
        super().__init__()
        self._skipped = {t.untyped_storage()._cdata for t in skipped}
        self._live, self.phase, self.peaks = {}, "forward", {}

    def see(self, tensor):
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        key = storage._cdata
        if key not in self._skipped and key not in self._live:
            self._live[key] = weakref.ref(storage, lambda _: self._live.pop(key, None))

    @property
    def nbytes(self):
        return sum(s.nbytes() for s in (ref() for ref in list(self._live.values())) if s is not None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves((out, args, kwargs)):
            if isinstance(value, torch.Tensor):
                self.see(value)
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.nbytes)
        return out


def _model(checkpointing):
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256}
    model = BertForSequenceClassification(BertConfig(**sizes, vocab_size=1001, num_labels=3)).train()
    for layer in model.bert.encoder.layer[: 4 if checkpointing else 0]:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = lambda f, *a: torch.utils.checkpoint.checkpoint(f, *a, use_reentrant=False)
    return model


def _watched(model, live):
    ids = torch.randint(0, 1000, (2, 32))
    with live:
        loss = model(input_ids=ids).logits.float().sum()
        live.phase = "backward"
        loss.backward()
    return live.peaks, live.nbytes


@pytest.mark.parametrize(("half", "checkpointing"), [(False, False), (True, False), (True, True)])
@pytest.mark.usefixtures("_two_of_three")
def test_allocates_what_fully_shard_does(half, checkpointing):
    """Peaks of the forward and the backward pass and what is left, of real tensors: within 64 bytes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dtype = torch.bfloat16 if half else None
    model = _model(checkpointing)
    options = {"mesh": init_device_mesh("cpu", (3,))}
    if half:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in checkpointing_layers(model):
        fully_shard(layer, reshard_after_forward=True, **options)
    fully_shard(model, **options)
    live = _Live(())
    for p in model.parameters():
        live.see(p)
    expected, left = _watched(model, live)

    ours = _model(checkpointing)
    sharding = Sharding.of(ours, 3, dtype)
    live = _Live(ours.parameters())
    for shard in sharding.shards.values():
        live.see(shard)
    sharding.watch(ours, checkpointing_layers(ours), lambda _: None)
    peaks, held = _watched(ours, live)
    assert expected == pytest.approx(peaks, abs=64)
    assert left == held


def _sent_at_once(_, bucket):
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


@pytest.mark.usefixtures("_two_of_three")
def test_ddp_has_a_second_copy_of_gradients_only_before_the_last_micro_batch():
    """Real DistributedDataParallel: gradients of passes under no_sync lie beside the buckets, then they are views."""
    linear = torch.nn.Linear(64, 64)
    wrapped = torch.nn.parallel.DistributedDataParallel(linear, gradient_as_bucket_view=True)
    wrapped.register_comm_hook(None, _sent_at_once)  # the fake group's own reduction gives nothing back
    own = linear.weight.nbytes
    with wrapped.no_sync():
        wrapped(torch.ones(1, 64)).sum().backward()
    assert own == linear.weight.grad.untyped_storage().nbytes()
    wrapped(torch.ones(1, 64)).sum().backward()
    assert own < linear.weight.grad.untyped_storage().nbytes()


# -- predicted -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def simulator():
    """BERT-base on a card with NVLink."""
    workload = Workload(spec=resolve_model("bert-base-uncased"), task="sequence-classification")
    return Simulator(workload, find_card("A100 SXM4 40GB"), ceiling_bytes=39 * GIB, seq_len=128, gpus=4)


def config(**changes):
    """Two micro-batches of 4 x 128 in bf16 autocast."""
    fields = {"micro_batch_size": 4, "seq_len": 128, "max_tokens_per_micro_batch": 512, "precision": "bf16-amp"}
    gpus = changes.get("gpus", 1)
    passes = changes.get("gradient_accumulation_steps", 2)
    fields |= {"gradient_accumulation_steps": passes, "effective_batch_size": 4 * passes * gpus}
    return TrainingConfig(**{**fields, **changes})


def test_ddp_adds_buckets_as_large_as_the_gradients(simulator):
    """Beside what one card needs with accumulation; without, each gradient is gone when it is in its bucket."""
    alone, parameters = simulator.memory(config()), simulator.facts.parameters
    shared = simulator.memory(config(gpus=2, parallelism="ddp"))
    at_once = simulator.memory(config(gpus=2, parallelism="ddp", gradient_accumulation_steps=1))
    expected = 4 * parameters
    assert expected == pytest.approx(shared.breakdown["gradients"] - alone.breakdown["gradients"], rel=1e-4)
    assert shared.peak_allocated_bytes - alone.peak_allocated_bytes >= expected
    assert at_once.peak_allocated_bytes < shared.peak_allocated_bytes - 0.9 * expected


def test_fsdp2_keeps_a_share_of_weights_and_state(simulator):
    """Four cards: a quarter of weights and of two moments, each rounded up to whole rows."""
    memory = simulator.memory(config(gpus=4, parallelism="fsdp2"))
    parameters = simulator.facts.parameters
    assert parameters == pytest.approx(memory.breakdown["parameters"], rel=0.01)
    assert 2 * parameters == pytest.approx(memory.breakdown["optimizer"], rel=0.01)
    assert memory.peak_allocated_bytes < simulator.memory(config(gpus=2, parallelism="fsdp2")).peak_allocated_bytes


def test_a_deep_model_is_replayed_as_it_would_be_recorded(simulator):
    """Four layers repeated to twelve, at a shape that was not recorded: the sizes of the whole model's recording."""
    from planner.recording.kernels import Target
    from planner.recording.source import make_source

    chosen = config(gpus=4, parallelism="fsdp2")
    target = Target(compute_capability=simulator.card.compute_capability, kind="cuda")
    whole = make_source(simulator.workload, chosen, target).record((4, 128))
    replayed = simulator.model(chosen).step((4, 128))
    assert simulator.model(chosen).is_polynomial((4, 128))
    assert agrees(replayed, whole, (4, 128))
    assert len(whole.gradients) == len(replayed.template.gradients) == 13  # twelve layers and the rest


def test_speed_counts_all_cards(simulator):
    """Two cards are faster than one and slower than two of them; over PCIe slower than over NVLink."""
    alone = simulator.time(config()).tokens_per_s
    for parallelism in ("ddp", "fsdp2"):
        both = simulator.time(config(gpus=2, parallelism=parallelism)).tokens_per_s
        assert alone < both
        if parallelism == "ddp":
            assert both < 2 * alone


def test_times_of_rings():
    """An all-reduce of 100 bytes among 4 at 10 bytes/s: 2 x 3/4 x 100 / 10 = 15 s; nothing hides the last bucket."""
    assert all_reduce_seconds(100, gpus=4, bytes_per_s=10.0, backward_s=0.0) == pytest.approx(15.0)
    large = 4 * 25 * 2**20
    hidden = all_reduce_seconds(large, gpus=2, bytes_per_s=25 * 2**20, backward_s=1e9)
    assert hidden == pytest.approx(1.0)


def test_gathers_hide_behind_compute_and_the_first_does_not():
    """Two gathers of 4 s beside 100 s of compute add the first one's 4 s and the reduction's; beside 1 s, the rest."""
    names = ("vramplan.all_gather", "aten.mm", "vramplan.all_gather", "aten.mm", "vramplan.reduce_scatter")
    ops = [Op(name, 0, (), "elementwise", 0, index > 2) for index, name in enumerate(names)]
    moved = np.array([80, 0, 80, 0, 120], dtype=np.int64)  # of the reduction: the whole and a half
    collectives = collective_seconds(ops, moved, gpus=2, bytes_per_s=10.0)
    assert collectives.tolist() == pytest.approx([4.0, 0.0, 4.0, 0.0, 4.0])
    slow, fast = np.array([0, 100.0, 0, 100.0, 0]), np.array([0, 1.0, 0, 1.0, 0])
    assert exposed_seconds(ops, slow, collectives) == pytest.approx(8.0)
    assert exposed_seconds(ops, fast, collectives) == pytest.approx((8 - 1) + (4 - 1))


def test_nccl_holds_more_over_nvlink():
    """688 MiB was measured among four A100; PCIe has few channels."""
    assert nccl_bytes(find_card("A100 SXM4 40GB"))[0] == 688 * 2**20
    assert nccl_bytes(find_card("RTX 3090"))[0] == 96 * 2**20


# -- what goes together --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimizer": "adamw_8bit"}, "no shards"),
        ({"quantization": "nf4", "method": "qlora"}, "nf4"),
        ({"precision": "bf16-master"}, "twice"),
        ({"precision": "fp16-amp"}, "fp16"),
        ({"loss": "fused-linear"}, "output layer"),
        ({"offload": "optimizer"}, "every process"),
    ],
)
def test_says_why_fsdp2_does_not_go_with_a_value(changes, said):
    """The reason names the value; the same is fine on one card."""
    assert said in (conflict(config(gpus=2, parallelism="fsdp2", **changes)) or "")
    assert conflict(config(**changes)) is None


@pytest.mark.parametrize(
    ("arguments", "argument", "said"),
    [
        ({"gpus": 3, "batch_size": 32}, "batch_size", "30 or 33"),
        ({"gpus": 2, "device": "cpu"}, "device", "simulated"),
        ({"parallelism": "ddp"}, "parallelism", "--gpus 2"),
        ({"gpus": 2, "offload": "optimizer"}, "offload", "2 cards"),
    ],
)
def test_refuses_what_several_cards_cannot_do(arguments, argument, said):
    """With the remedy, under the argument to change."""
    with pytest.raises(InputError) as caught:
        make_request(model="bert-base-uncased", vram="8GB", **arguments)
    assert [argument] == [problem.argument for problem in caught.value.problems]
    assert said in caught.value.problems[0].message


def test_the_usual_batch_is_a_multiple_of_the_cards():
    """32 among six cards is 36; tokens give as many sequences to each card as they hold."""
    six = make_request(model="bert-base-uncased", vram="8GB", gpus=6)
    size, why = effective_batch_size(six, 128)
    assert size == 36
    assert "6 cards" in why
    tokens = make_request(model="bert-base-uncased", vram="8GB", gpus=3, batch_tokens=1000)
    assert effective_batch_size(tokens, 100)[0] == 9


def test_a_plan_for_two_cards_says_how_they_share():
    """plan.json has both fields, the table of levers the other value, trials.csv the columns."""
    found = plan(model="bert-base-uncased", vram="8GB", gpus=2, precision="bf16-amp", seq_len=128)
    document = found.to_json()
    chosen = document["config"]
    assert chosen["gpus"] == 2
    assert chosen["parallelism"] in ("ddp", "fsdp2")
    each = chosen["micro_batch_size"] * chosen["gradient_accumulation_steps"]
    assert 32 == chosen["effective_batch_size"] == 2 * each
    assert {"gpus", "parallelism", "device"} <= {reason["field"] for reason in document["reasons"]}
    assert "parallelism" in {row["lever"] for row in document["levers"]}
    assert {"gpus", "parallelism"} <= set(found.trials.columns)


def test_shards_fit_where_copies_do_not():
    """BERT-base in full on 2 GB cards: with ddp named nothing fits that fsdp2 finds."""
    found = plan(model="bert-base-uncased", vram="2GB", gpu="RTX 3060", gpus=4, seq_len=512)
    assert found.config.parallelism == "fsdp2"
    why = next(reason.reason for reason in found.reasons if reason.field == "parallelism")
    assert "ddp does not fit, by at least" in why
