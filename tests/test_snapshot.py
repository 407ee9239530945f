"""The simulated run as a PyTorch memory snapshot: its numbers are the plan's, its stacks name modules."""

from __future__ import annotations

import dataclasses
import json
import pickle
import pickletools
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.cuda import _memory_viz

from planner import Plan, plan, save_snapshot
from planner.allocator_settings import DEFAULT_ALLOCATOR, parse_allocator
from planner.cli import run
from planner.config import LoraSettings, TrainingConfig
from planner.errors import InputError
from planner.hardware import find_card
from planner.memory.program import Program
from planner.memory.snapshot import BASE_ADDRESS, Source, snapshot, write
from planner.models import resolve_model
from planner.recording.record import Origin
from planner.simulation import Simulator
from planner.snapshots import snapshot_of
from planner.whole_run import whole_run
from planner.workload import Workload

GIB, MIB = 2**30, 2**20
FIXED = "expandable_segments:False"
SPEC = resolve_model("bert-base-uncased")
SIZES = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128, "vocab_size": 1000}
# Five layers: a plan records four of them and repeats one.
TINY = dataclasses.replace(SPEC, config={**SPEC.config, **SIZES, "num_hidden_layers": 5})
SHAPE: dict[str, Any] = {
    "micro_batch_size": 8,
    "seq_len": 128,
    "max_tokens_per_micro_batch": 1024,
    "gradient_accumulation_steps": 2,
    "effective_batch_size": 16,
    "precision": "fp32",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one-micro-batch": {"gradient_accumulation_steps": 1, "effective_batch_size": 8},
    "checkpointed": {"precision": "bf16-amp", "checkpointing": "full", "optimizer": "adamw_foreach"},
    "offloaded": {"precision": "bf16-amp", "checkpointing": "full", "offload": "parameters"},
    "lora": {"method": "lora", "lora": LoraSettings(), "precision": "bf16-amp", "checkpointing": "every-2"},
}


def simulator(allocator: str = DEFAULT_ALLOCATOR, **options: Any) -> Simulator:
    """Of a five-layer BERT."""
    workload = Workload(spec=TINY, task="sequence-classification")
    values = {"ceiling_bytes": 4 * GIB, "allocator": parse_allocator(allocator), **options}
    return Simulator(workload, find_card("RTX 3090"), **values)


def config(name: str = "plain") -> TrainingConfig:
    """One of CONFIGS."""
    return TrainingConfig.model_validate(SHAPE | CONFIGS[name])


@pytest.fixture(scope="module")
def checkpointed() -> dict[str, Any]:
    """A snapshot with recomputation."""
    return snapshot_of(simulator(), config("checkpointed"), DEFAULT_ALLOCATOR)


def running(trace: list[dict[str, Any]], more: set[str], less: set[str]) -> list[int]:
    """Bytes after each entry: what some actions add and others take away."""
    return list(accumulate(e["size"] * ((e["action"] in more) - (e["action"] in less)) for e in trace))


def live_bytes(trace: list[dict[str, Any]]) -> list[int]:
    """Allocated bytes after each entry."""
    return running(trace, {"alloc"}, {"free_completed"})


def held_bytes(trace: list[dict[str, Any]]) -> list[int]:
    """Reserved bytes after each entry."""
    return running(trace, {"segment_alloc", "segment_map"}, {"segment_free", "segment_unmap"})


def stacks(content: dict[str, Any], **wanted: str) -> list[list[tuple[str, str]]]:
    """Different stacks of allocations, each frame as (filename, name); some whose frames have these names."""
    found = {
        tuple((frame["filename"], frame["name"]) for frame in entry["frames"])
        for entry in content["device_traces"][0]
        if entry["action"] == "alloc"
    }
    return [list(stack) for stack in found if set(wanted.values()) <= {name for _, name in stack}]


@pytest.mark.parametrize("allocator", [DEFAULT_ALLOCATOR, FIXED])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_peaks_are_the_plans(name: str, allocator: str) -> None:
    """The trace adds up to what the plan says of the phases that it shows, to the byte, though recorded apart."""
    simulated = simulator(allocator)
    content = snapshot_of(simulated, config(name), allocator)
    trace = content["device_traces"][0]
    phases = whole_run(simulated, config(name), epoch=False).phases
    shown = [phases[phase] for phase in ("load", "first_step", "steady_step", "evaluate")]
    assert max(phase["peak_allocated_bytes"] for phase in shown) == max(live_bytes(trace))
    assert max(phase["peak_reserved_bytes"] for phase in shown) == max(held_bytes(trace))


@pytest.mark.parametrize("allocator", [DEFAULT_ALLOCATOR, FIXED])
def test_the_segments_are_what_the_trace_leaves(allocator: str) -> None:
    """Reserved and allocated bytes at the end; blocks fill their segments; live blocks are those not freed."""
    content = snapshot_of(simulator(allocator), config(), allocator)
    trace, segments = content["device_traces"][0], content["segments"]
    assert held_bytes(trace)[-1] == sum(segment["total_size"] for segment in segments)
    assert live_bytes(trace)[-1] == sum(segment["allocated_size"] for segment in segments)
    for segment in segments:
        assert segment["total_size"] == sum(block["size"] for block in segment["blocks"])
        assert segment["address"] == segment["blocks"][0]["address"]
        assert (allocator == DEFAULT_ALLOCATOR) == segment["is_expandable"]
    live: dict[int, int] = {}
    for entry in trace:
        if entry["action"] == "alloc":
            live[entry["addr"]] = entry["size"]
        elif entry["action"] == "free_completed":
            del live[entry["addr"]]
    blocks = [block for segment in segments for block in segment["blocks"] if block["state"] == "active_allocated"]
    assert live == {block["address"]: block["size"] for block in blocks}


class TestNames:
    """Who made a block."""

    ATTENTION = "bert.encoder.layer.3.attention.self"

    def test_a_stack_goes_from_the_operator_outwards(self, checkpointed):
        """Operator, module with its class, the modules around it, the phase and the part of the run."""
        expected = [
            ("operator", "aten::addmm"),
            ("Linear", f"{self.ATTENTION}.query"),
            *(("module", self.ATTENTION.rsplit(".", n)[0] if n else self.ATTENTION) for n in range(6)),
            ("optimizer step 1, micro-batch 1", "forward"),
        ]
        assert expected in stacks(checkpointed)

    def test_every_module_that_computes_is_named(self, checkpointed):
        """All five layers, though a plan records fewer; the embeddings, the pooler and the head."""
        names = {name for stack in stacks(checkpointed, phase="forward") for _, name in stack}
        layers = {f"bert.encoder.layer.{n}.output.dense" for n in range(5)}
        assert layers | {"bert.embeddings.LayerNorm", "bert.pooler.dense", "classifier"} <= names

    def test_the_backward_pass_is_followed_to_the_module_whose_forward_it_undoes(self, checkpointed):
        """The gradient of a layer norm, of a weight."""
        norm = "bert.encoder.layer.3.output.LayerNorm"
        assert stacks(checkpointed, module=norm, operator="aten::native_layer_norm_backward", phase="backward")
        assert stacks(checkpointed, module="classifier", operator="aten::mm", phase="backward")

    def test_recomputation_is_named_like_what_it_repeats(self, checkpointed):
        """A checkpointed layer's products run again within the backward pass."""
        assert stacks(checkpointed, module=f"{self.ATTENTION}.key", operator="aten::addmm", phase="backward")

    def test_what_is_there_before_has_its_own_name(self, checkpointed):
        """A weight; a buffer; the optimizer's state of a weight."""
        weight = [("tensor", "weight"), ("Linear", "classifier"), ("load", "load")]
        assert weight in stacks(checkpointed)
        assert stacks(checkpointed, module="bert.embeddings", tensor="position_ids", phase="load")
        state = stacks(checkpointed, parameter="classifier.weight", operator="aten::zeros_like", phase="first_update")
        assert all(("optimizer step 1, update", "first_update") == stack[-1] for stack in state)
        assert state

    def test_libraries_have_a_name(self, checkpointed):
        """cuBLAS's workspace belongs to no module."""
        expected = [("tensor", "cuBLAS workspace"), ("optimizer step 1, micro-batch 1", "forward")]
        assert expected in stacks(checkpointed)

    def test_the_parts_of_the_run(self, checkpointed):
        """Loading, two steps of two micro-batches, an evaluation, and a step after it."""
        parts = {where for stack in stacks(checkpointed) for where, _ in stack[-1:]}
        steps = {f"optimizer step {n}, micro-batch {m}" for n in (1, 2, 3) for m in (1, 2)}
        updates = {f"optimizer step {n}, update" for n in (1, 2, 3)}
        assert {"load", "evaluate"} | steps | updates == parts


class TestViewers:
    """What reads snapshots reads these."""

    def test_summary_of_the_segments(self, checkpointed):
        """It checks that its sums agree, and says them."""
        total = sum(segment["total_size"] for segment in checkpointed["segments"])
        assert f"total_reserved: {total / MIB:.1f}MiB" in _memory_viz.segsum(checkpointed)

    def test_trace(self, checkpointed):
        """One line for each entry, the segments mapped."""
        text = _memory_viz.trace(checkpointed)
        assert f"{len(checkpointed['device_traces'][0])} entries" in text
        assert "segment_map" in text

    @pytest.mark.parametrize("view", [_memory_viz.memory, _memory_viz.segments])
    def test_flame_graphs(self, view, checkpointed):
        """Modules nest, outermost first, and bytes follow."""
        text = view(checkpointed, format_flamegraph=lambda lines: lines)
        assert ";module:0:bert;module:0:bert.encoder;" in text

    def test_plots(self, checkpointed):
        """The page holds the data; with the freed ones left out it is smaller."""
        whole = _memory_viz.trace_plot(checkpointed)
        assert "Active Memory Timeline" in whole
        assert "Allocator State History" in _memory_viz.segment_plot(checkpointed)
        copied = pickle.loads(pickle.dumps(checkpointed))
        assert len(whole) > len(_memory_viz.trace_plot(copied, filter_freed=True))

    def test_the_page_can_unpickle_it(self, checkpointed, tmp_path):
        """Only what MemoryViz.js (function unpickle) knows: protocol 4 and these instructions."""
        known = {"PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "EMPTY_DICT", "EMPTY_LIST"} | {
            *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "APPEND", "APPENDS", "SETITEM", "SETITEMS"),
            *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE"),
            *("MEMOIZE", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT"),
        }
        write(checkpointed, tmp_path / "run.pickle")
        data = (tmp_path / "run.pickle").read_bytes()
        assert set() == {opcode.name for opcode, _, _ in pickletools.genops(data)} - known
        assert checkpointed == pickle.loads(data)

    def test_addresses_are_exact_in_javascript(self, checkpointed):
        """Below 2**53, whatever the address space of an expandable segment."""
        assert all(entry["addr"] < 2**53 for entry in checkpointed["device_traces"][0])


PROGRAM = Program(
    events=np.array([1, 2, 3, -2, 4]),
    rows=np.array([0, 1, 2, 3, 4]),
    marks=(("load", 0), ("micro_batch", 1)),
    phases=(("load", 0), ("first_step", 1)),
)
ROWS = [Source(Origin("m.a", "Linear", f"aten::op{n}"), "forward") for n in range(5)]


def test_a_run_by_hand() -> None:
    """Segments are asked for before the blocks that need them; a free is two entries; the end is marked."""
    sizes = np.array([0, 30 * MIB, 600, 0, 512])
    content = snapshot(PROGRAM, sizes, ROWS, parse_allocator(FIXED), capacity_bytes=GIB)
    entries = [(e["action"], e["addr"] - BASE_ADDRESS, e["size"]) for e in content["device_traces"][0][:-1]]
    small = 32 * MIB  # segments never touch
    assert [
        ("segment_alloc", 0, 30 * MIB),
        ("alloc", 0, 30 * MIB),
        ("segment_alloc", small, 2 * MIB),
        ("alloc", small, 1024),
        ("free_requested", small, 1024),
        ("free_completed", small, 1024),
        ("alloc", small, 512),
    ] == entries
    assert "snapshot" == content["device_traces"][0][-1]["action"]
    assert ["large", "small"] == [segment["segment_type"] for segment in content["segments"]]
    assert [30 * MIB, 512] == [segment["requested_size"] for segment in content["segments"]]


def test_a_run_that_does_not_fit_ends_where_it_runs_out() -> None:
    """As a real one would: what it asked for, and what was free."""
    sizes = np.array([0, 30 * MIB, 20 * MIB, 20 * MIB, 512])
    content = snapshot(PROGRAM, sizes, ROWS, parse_allocator(FIXED), capacity_bytes=60 * MIB)
    oom = content["device_traces"][0][-2]
    assert ("oom", 20 * MIB, 10 * MIB) == (oom["action"], oom["size"], oom["device_free"])
    assert "raise OutOfMemoryError # 20.0MiB requested, 10.0MiB free" in _memory_viz.trace(content)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """A plan, read from its folder."""
    folder = tmp_path_factory.mktemp("planned")
    model = folder / "config.json"
    model.write_text(json.dumps(TINY.config), encoding="utf-8")
    restricted = {"precision": "fp32", "checkpointing": "none", "optimizer": "adamw_fused", "offload": "none"}
    made = plan(model=model, vram="1GB", seq_len=64, batch_size=4, method="full", **restricted)
    return Plan.load(made.save(folder / "plan"))


class TestSettings:
    """The allocator's settings reach everything that is predicted."""

    def test_they_decide_what_is_reserved(self):
        """Segments of 60 MiB hold more than those of 20; a simulator without settings has PyTorch's defaults."""
        coarse, fixed = (simulator(text).memory(config()) for text in ("large_segment_size_mb:60", FIXED))
        assert coarse.peak_allocated_bytes == fixed.peak_allocated_bytes
        assert coarse.peak_reserved_bytes > fixed.peak_reserved_bytes
        workload, card = Workload(spec=TINY, task="sequence-classification"), find_card("RTX 3090")
        assert fixed == Simulator(workload, card, ceiling_bytes=4 * GIB).memory(config())

    def test_garbage_is_collected_from_a_share_of_what_the_process_may_have(self):
        """Half of the ceiling without the CUDA context, the limit that train.py sets."""
        simulated = simulator("garbage_collection_threshold:0.5")
        allowed_bytes = 4 * GIB - simulated.budget.context_bytes
        assert allowed_bytes // 2 == simulated.allocator.garbage_collection_bytes

    def test_the_plan_says_what_it_assumes(self, planned):
        """As a choice with its reason, and in the request, which train.py is written from."""
        said = {reason.field: reason.value for reason in planned.reasons}
        assert (DEFAULT_ALLOCATOR, DEFAULT_ALLOCATOR) == (said["allocator"], planned.request.allocator)


class TestFile:
    """Where it is written."""

    def test_a_plan_read_from_its_folder_can_write_it(self, planned, tmp_path):
        """Everything follows from request and configuration; what the plan says of its phases holds."""
        file = save_snapshot(planned, tmp_path / "deep" / "run.pickle")
        trace = pickle.loads(file.read_bytes())["device_traces"][0]
        phases = planned.peak.phases
        shown = [phases[name]["peak_reserved_bytes"] for name in ("load", "first_step", "steady_step", "evaluate")]
        assert max(shown) == max(held_bytes(trace))

    def test_a_write_that_fails_is_one_clear_line(self, planned, tmp_path):
        """What should be its folder is a file."""
        (tmp_path / "folder").write_text("")
        with pytest.raises(InputError, match=r"snapshot: got .*run\.pickle'; accepted: a file that can be written; "):
            save_snapshot(planned, tmp_path / "folder" / "run.pickle")

    def test_a_failed_write_leaves_the_file_that_was_there(self, tmp_path):
        """And nothing beside it."""
        file = tmp_path / "run.pickle"
        file.write_bytes(b"earlier")
        with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
            write({"segments": lambda: 0}, file)
        assert (b"earlier", ["run.pickle"]) == (file.read_bytes(), [path.name for path in tmp_path.iterdir()])

    @pytest.mark.parametrize(("name", "why"), [("", "it is empty"), ("folder", "that is a folder")])
    def test_a_file_that_can_not_be_written_is_a_problem_among_others(self, name, why, tmp_path, monkeypatch, capsys):
        """Before anything is planned; one line each."""
        monkeypatch.chdir(tmp_path)
        Path("folder").mkdir()
        assert 2 == run(["--model", "bert-base-uncased", "--vram", "lots", "--snapshot", name])
        lines = capsys.readouterr().err.splitlines()
        assert ["--vram:", "--snapshot:"] == [line.split()[0] for line in lines]
        assert lines[1].endswith(f"got {name!r}; accepted: a file that can be written; {why}")
