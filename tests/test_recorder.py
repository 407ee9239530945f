"""The recorder on real CPU tensors, held against what torch's own profiler sees without any mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from planner.errors import RecordingError
from planner.recording.kernels import Target
from planner.recording.record import (
    ACTIVATIONS,
    GRADIENTS,
    INPUTS,
    OUTSIDE_LAYERS,
    PARAMETERS,
    TEMPORARIES,
    WORKSPACE,
    Recording,
)
from planner.recording.recorder import Recorder

TARGET = Target(compute_capability=(8, 6))
Step = Callable[[Callable[[], None]], None]
"""A step that calls its argument when its backward pass begins."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def profiled(step: Step) -> tuple[list[int], list[str]]:
    """Bytes allocated (+) and freed (-) in order, and the operators, of a run without any mode."""
    step(lambda: None)  # what is made once is made now
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        step(lambda: None)
    events = sorted(enumerate(run.profiler.kineto_results.events()), key=lambda pair: (pair[1].start_ns(), pair[0]))
    memory = [event.nbytes() for _, event in events if event.name() == "[memory]" and event.nbytes()]
    return memory, [event.name() for _, event in events if event.name().startswith("aten::")]


def recorded(step: Step, *, device: str = "cpu", **watched: list[nn.Module] | list[Tensor]) -> Recording:
    """The same run under the recorder."""
    recorder = Recorder(TARGET, device=device)
    handles = [
        *recorder.watch_gradients(watched.get("gradients", [])),  # type: ignore[arg-type]
        *recorder.watch_layers(watched.get("layers", [])),  # type: ignore[arg-type]
    ]
    with recorder:
        recorder.phase("forward", category=ACTIVATIONS)
        step(lambda: recorder.phase("backward", backward=True))
        recorder.phase("end")
    for handle in handles:
        handle.remove()
    return recorder.recording()


def signed_bytes(recording: Recording) -> list[int]:
    """As the profiler has it: without blocks that only a CUDA kernel needs."""
    own = {block for block, _, _ in recording.gates}
    own |= {block for block, category in enumerate(recording.categories) if category == WORKSPACE}
    return [(1 if e > 0 else -1) * recording.sizes[abs(e)] for e in recording.events if abs(e) not in own]


def sizes_of(recording: Recording, category: int) -> list[int]:
    """Bytes of the blocks of a category."""
    return [size for size, own in zip(recording.sizes, recording.categories, strict=True) if own == category and size]


# -- against the profiler --------------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    """A small network."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def mlp_step(net: nn.Module) -> Step:
    """Its forward pass, loss and backward pass."""
    features, labels = torch.randn(5, 8), torch.tensor([0, 1, 2, 3, 0])

    def step(backward: Callable[[], None]) -> None:
        for parameter in net.parameters():
            parameter.grad = None
        loss = F.cross_entropy(net(features), labels)
        backward()
        loss.backward()

    return step


def test_allocations_and_frees_are_the_profilers() -> None:
    """Forward, loss and backward of a small network: the same bytes, in the same order, as a run without the mode."""
    net = mlp()
    memory, _ = profiled(mlp_step(net))
    recording = recorded(mlp_step(net), gradients=list(net.parameters()))
    assert len(memory) > 30
    assert memory == signed_bytes(recording)


def graph_of_two_uses(shape: tuple[int, int] = (3, 7)) -> Step:
    """The gradient of ``b`` comes from three places, each a tensor that only the engine holds."""
    a = torch.ones(shape, requires_grad=True)
    factors = [torch.full(shape, float(i)) for i in range(3)]

    def step(backward: Callable[[], None]) -> None:
        a.grad = None
        b = a * factors[0]
        loss = (b * factors[1]).sum() + (b * factors[2]).sum() + (b * factors[0]).sum()
        backward()
        loss.backward()

    return step


def graph_of_shared_gradients() -> Step:
    """``b + d`` hands one and the same gradient to both: adding into ``b``'s would change ``d``'s.

    The two gradients of ``a`` then are its own: they are added in place.
    """
    a = torch.ones(3, 7, requires_grad=True)
    factor = torch.full((3, 7), 2.0)

    def step(backward: Callable[[], None]) -> None:
        a.grad = None
        b, d = a * factor, a.tanh()
        product = b * factor
        loss = ((b + d) * factor + product).sum()
        backward()
        loss.backward()

    return step


def graph_of_expanded_gradients() -> Step:
    """``sum`` hands an expanded scalar to ``b``, which nothing can be added into."""
    a = torch.ones(3, 7, requires_grad=True)
    factor = torch.full((3, 7), 2.0)

    def step(backward: Callable[[], None]) -> None:
        a.grad = None
        b = a * factor
        product = b * factor
        loss = b.sum() + product.sum()
        backward()
        loss.backward()

    return step


def graph_with_a_hook_that_keeps() -> Step:
    """A hook keeps the first gradient that arrives."""
    a = torch.ones(3, 7, requires_grad=True)
    factor = torch.full((3, 7), 2.0)
    kept: list[Tensor] = []

    def step(backward: Callable[[], None]) -> None:
        a.grad = None
        kept.clear()
        b = a * factor
        product = b * factor
        view = b.view_as(b)
        view.register_hook(kept.append)
        loss = product.sum() + (view * factor).sum()
        backward()
        loss.backward()

    return step


@pytest.mark.parametrize(
    ("graph", "in_place", "apart"),
    [
        (graph_of_two_uses, 2, 0),
        (graph_of_shared_gradients, 1, 1),
        (graph_of_expanded_gradients, 0, 1),
        (graph_with_a_hook_that_keeps, 0, 1),
    ],
)
def test_the_input_buffer_adds_as_without_the_mode(graph: Callable[[], Step], in_place: int, apart: int) -> None:
    """Autograd adds into a gradient that only it holds and makes a new tensor otherwise; the profiler agrees."""
    memory, operators = profiled(graph())
    recording = recorded(graph())
    backward = [op.name for op in recording.ops if op.in_backward]
    assert (in_place, apart) == (backward.count("aten.add_"), backward.count("aten.add"))
    assert in_place == operators.count("aten::add_")
    assert memory == signed_bytes(recording)


def test_recording_changes_no_result() -> None:
    """Gradients are those of a run without the mode, in-place additions included."""
    results = []
    for run in (lambda step: step(lambda: None), recorded):
        net = mlp()
        features = torch.linspace(-1, 1, 40).view(5, 8)

        def step(backward: Callable[[], None], net: nn.Module = net, features: Tensor = features) -> None:
            hidden = net[0](features)
            loss = (net[2](net[1](hidden)) * hidden + hidden).square().sum()
            backward()
            loss.backward()

        run(step)
        results.append([p.grad.clone() for p in net[:3].parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


# -- what a block is -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.view(12),
        lambda x: x.transpose(0, 1),
        lambda x: x[1:],
        lambda x: x.expand(2, 3, 4),
        lambda x: x.detach(),
        lambda x: x.split(1),
        lambda x: x.unbind(),
        lambda x: x.reshape(2, 6),
        lambda x: x.contiguous(),
        lambda x: x.add_(x),
    ],
)
def test_views_and_in_place_operators_make_no_block(view: Callable[[Tensor], object]) -> None:
    """They share their input's storage."""
    x = torch.ones(3, 4)
    recorder = Recorder(TARGET, device="cpu")
    recorder.adopt([(x, OUTSIDE_LAYERS)])
    with recorder:
        made = view(x)
    assert [1] == recorder.recording().events
    del made


def test_a_view_keeps_its_base_alive() -> None:
    """The block goes when the last tensor that shares the storage goes, not before."""
    recorder = Recorder(TARGET, device="cpu")
    with recorder:
        base = torch.ones(4, 4)
        part = base[0]
        del base
        other = torch.ones(2)
        del part
    assert [1, 2, -1] == recorder.recording().events
    del other


def test_only_the_recorders_device_counts() -> None:
    """A tensor in host memory takes nothing on the card."""
    recorder = Recorder(TARGET)
    with recorder:
        host, card = torch.ones(3), torch.ones(5, device="meta")
    assert ([1], [0, 20]) == (recorder.recording().events, recorder.recording().sizes)
    del host, card


def test_frees_after_the_end_are_not_written() -> None:
    """What is alive when the recording is taken stays so."""
    recorder = Recorder(TARGET, device="cpu")
    with recorder:
        x = torch.ones(3)
    recording = recorder.recording()
    del x
    assert [1] == recording.events


def test_adopted_tensors_come_once_in_their_order() -> None:
    """Tied weights are one block; the category is the caller's."""
    one, two = torch.ones(3), torch.ones(5)
    recorder = Recorder(TARGET, device="cpu")
    recorder.adopt([(two, 0), (one, 1), (two.view(5), 2)], INPUTS)
    recording = recorder.recording()
    assert ([0, 20, 12], [1, 2]) == (recording.sizes, recording.events)
    assert [INPUTS, INPUTS] == recording.categories[1:]
    assert [0, 1] == recording.layers
    assert 2 == recorder.block(one)


# -- categories and gradients ----------------------------------------------------------------------------------------


def test_activations_are_what_the_backward_pass_finds() -> None:
    """Of ``tanh(x * x)`` the product is gone before the backward pass, and tanh's result is kept for it."""
    x = torch.ones(5, requires_grad=True)

    def step(backward: Callable[[], None]) -> None:
        loss = (x * x).tanh().sum()
        backward()
        loss.backward()

    recording = recorded(step, gradients=[x])
    product, tanh, loss = 1, 2, 3
    assert TEMPORARIES == recording.categories[product]
    assert [ACTIVATIONS] * 2 == [recording.categories[tanh], recording.categories[loss]]
    assert {TEMPORARIES, GRADIENTS} == set(recording.categories[4:])


def test_gradients_are_named_with_the_moment_they_are_there() -> None:
    """Every parameter's gradient is one block of its size, made before the index that it is named with."""
    net = mlp()
    recording = recorded(mlp_step(net), gradients=list(net.parameters()))
    sizes = sorted(recording.sizes[block] for _, block in recording.gradients)
    assert sorted(4 * p.numel() for p in net.parameters()) == sizes
    assert sorted(sizes) == sorted(sizes_of(recording, GRADIENTS))
    for index, block in recording.gradients:
        assert recording.phases["backward"] <= recording.events.index(block) < index
        assert -block not in recording.events


def test_blocks_made_within_a_category_get_it() -> None:
    """``categorised`` holds inside the block and no longer."""
    recorder = Recorder(TARGET, device="cpu")
    with recorder:
        recorder.phase("first", category=TEMPORARIES)
        with recorder.categorised(PARAMETERS):
            one = torch.ones(1)
        two = torch.ones(1)
    assert [PARAMETERS, TEMPORARIES] == recorder.recording().categories[1:]
    del one, two


# -- layers ----------------------------------------------------------------------------------------------------------


class Layered(nn.Module):
    """Three equal layers between an input and an output projection; recomputed when ``contexts`` is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3))
        self.contexts: Callable[[int], object] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Through all layers."""
        x = self.first(x)
        for index, layer in enumerate(self.layers):
            if self.contexts is None:
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=False, context_fn=partial(self.contexts, index))
        return self.last(x)


def layered_recording(*, recompute: bool) -> Recording:
    """Of the layered network, on tensors without data."""
    net, x = Layered().to("meta"), torch.ones(5, 4, device="meta")
    recorder = Recorder(TARGET)

    @contextmanager
    def nothing() -> Iterator[None]:
        yield

    if recompute:
        net.contexts = lambda index: (nothing(), recorder.in_layer(index))
    recorder.watch_layers(list(net.layers))
    with recorder:
        recorder.phase("forward")
        loss = net(x).sum()
        recorder.phase("backward", backward=True)
        loss.backward()
        recorder.phase("end")
    return recorder.recording()


def runs(tags: list[int]) -> list[int]:
    """Tags without repetitions that follow each other."""
    return [tag for index, tag in enumerate(tags) if index == 0 or tags[index - 1] != tag]


@pytest.mark.parametrize("recompute", [False, True])
def test_events_carry_their_layer_down_and_up(recompute: bool) -> None:
    """Forward goes through the layers, backward through them in reverse, recomputed or not."""
    recording = layered_recording(recompute=recompute)
    begin, end = recording.phases["backward"], recording.phases["end"]
    outside = OUTSIDE_LAYERS
    assert [outside, 0, 1, 2, outside] == runs(recording.layers[:begin])
    assert [outside, 2, 1, 0, outside] == runs(recording.layers[begin:end])


def test_equal_layers_have_equal_events() -> None:
    """Each layer allocates the same bytes in the forward pass, and the same in the backward pass."""
    recording = layered_recording(recompute=False)
    begin = recording.phases["backward"]
    for first, last in ((0, begin), (begin, recording.phases["end"])):
        tagged = list(zip(recording.events[first:last], recording.layers[first:last], strict=True))
        made = [[recording.sizes[e] for e, tag in tagged if e > 0 and tag == layer] for layer in range(3)]
        assert made[0]
        assert made[0] == made[1] == made[2]


def test_recomputation_makes_the_layers_blocks_again() -> None:
    """With checkpointing a layer keeps its input alone, and its backward part begins with what forward dropped."""
    plain, again = layered_recording(recompute=False), layered_recording(recompute=True)

    def made(recording: Recording, phase: str, layer: int) -> list[int]:
        first = recording.phases[phase]
        last = min(index for index in recording.phases.values() if index > first)
        pairs = zip(recording.events[first:last], recording.layers[first:last], strict=True)
        return [recording.sizes[event] for event, tag in pairs if event > 0 and tag == layer]

    assert sum(sizes_of(again, ACTIVATIONS)) < sum(sizes_of(plain, ACTIVATIONS))
    for layer in range(3):
        forward = made(plain, "forward", layer)
        # torch's early stop leaves out the last linear layer: its result is not kept for the backward pass
        assert forward[: len(forward) - 1] == made(again, "backward", layer)[: len(forward) - 1]
        assert [op.name for op in again.ops].count("aten.tanh") == 6


# -- numbers that aren't there ---------------------------------------------------------------------------------------


def test_truth_and_norms_can_be_asked_of_tensors_without_data() -> None:
    """A padding mask is not all ones, and a norm is finite: what model code looks for."""
    with Recorder(TARGET):
        mask, norm = torch.ones(3, device="meta").bool(), torch.ones((), device="meta")
        assert not mask.all()
        assert 1.0 == norm.item()


def test_data_dependent_shapes_are_refused() -> None:
    """Reading a whole number out of a tensor means that shapes follow from data."""
    with Recorder(TARGET), pytest.raises(RecordingError, match="data-dependent"):
        torch.ones(3, device="meta", dtype=torch.int64).sum().item()


# -- operators -------------------------------------------------------------------------------------------------------


def test_operators_have_their_flops_bytes_and_place() -> None:
    """A linear layer of [5, 8] -> 16: 2 x 5 x 8 x 16 operations; reads input, weight and bias, writes its result."""
    layer, x = nn.Linear(8, 16, device="meta"), torch.ones(5, 8, device="meta")
    recorder = Recorder(TARGET)
    with recorder:
        out = layer(x)
    (op,) = recorder.recording().ops
    assert ("aten.addmm", 2 * 5 * 8 * 16, "matmul:fp32", False) == (op.name, op.flops, op.kind, op.in_backward)
    assert sorted([16 * 4, 5 * 8 * 4, 8 * 16 * 4, 5 * 16 * 4]) == sorted(op.moved_bytes)
    del out


def test_each_thread_opens_one_cublas_handle() -> None:
    """The first product of the forward pass and the first of the backward pass each bring a workspace, kept."""
    net = mlp().to("meta")
    recorder = Recorder(TARGET)
    with recorder:
        recorder.phase("forward")
        loss = net(torch.ones(5, 8, device="meta")).sum()
        recorder.phase("backward", backward=True)
        loss.backward()
        recorder.phase("end")
    recording = recorder.recording()
    blocks = [block for block, category in enumerate(recording.categories) if category == WORKSPACE]
    assert 2 == len(blocks)
    begin = recording.phases["backward"]
    assert [True, False] == [recording.events.index(block) < begin for block in blocks]
    assert not {-block for block in blocks} & set(recording.events)
