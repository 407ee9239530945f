"""A trial's process that goes wrong in a chosen way: what the planner has to live through.

    python benchmarks/faulty_trial.py FAULT [--serve | --probe DEVICE]

Takes the place of ``python -m planner.measure``: the same protocol, and under ``--serve`` the real server. What goes
wrong is real: signals, a broken pointer, memory that isn't given, a model whose layers break. FAULT ``by-seed`` takes
the fault from the request: the one of that index in FAULTS.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

from planner.measure.__main__ import answer, private_stdout
from planner.measure.protocol import Measurement, TrialSpec
from planner.measure.server import die_with_parent, serve

FLOOD_BYTES = 50_000_000
GOOD = Measurement(status="ok", peak_reserved_bytes=1, peak_allocated_bytes=1, step_ms=1.0, tokens_per_s=1.0)
LONG_S = 3600


def say(out: TextIO, message: object) -> None:
    """A line of JSON."""
    out.write(json.dumps(message) + "\n")
    out.flush()


def raw(out: TextIO, text: str) -> None:
    """Whatever."""
    out.write(text)
    out.flush()


# -- how a process ends ------------------------------------------------------------------------------------------------


def end_by(number: int) -> Callable[[TextIO], None]:
    """A signal, sent by nobody in particular."""
    return lambda out: os.kill(os.getpid(), number)


def bad_pointer(out: TextIO) -> None:
    """A segmentation fault in C."""
    ctypes.string_at(0)


def lost_page(out: TextIO) -> None:
    """SIGBUS: a mapped file that got shorter."""
    with tempfile.TemporaryFile() as file:
        file.truncate(1 << 16)
        mapped = mmap.mmap(file.fileno(), 1 << 16)
        file.truncate(0)
        mapped[1 << 15]


def exits(code: int, words: str = "") -> Callable[[TextIO], None]:
    """An end without an answer."""

    def end(out: TextIO) -> None:
        sys.stderr.write(words)
        sys.stderr.flush()
        os._exit(code)

    return end


def exception(out: TextIO) -> None:
    """A mistake in the trial's own code."""
    raise LookupError("no such key")


def no_memory_in_c(out: TextIO) -> None:
    """C++ is refused memory, throws std::bad_alloc, and nobody catches it: torch does the same in its threads."""
    library = ctypes.CDLL("libstdc++.so.6")
    resource.setrlimit(resource.RLIMIT_DATA, (1 << 28, 1 << 28))
    allocate = library["_Znwm"]  # operator new(unsigned long)
    allocate.argtypes, allocate.restype = [ctypes.c_size_t], ctypes.c_void_p
    allocate(1 << 40)


def much_memory(out: TextIO) -> None:
    """Touch memory until the kernel has no more: only in a control group with a small limit."""
    held = []
    while True:
        held.append(b"x" * (1 << 24))


# -- how a process does not end ----------------------------------------------------------------------------------------


def silent(out: TextIO) -> None:
    """A hang."""
    time.sleep(LONG_S)


def busy(out: TextIO) -> None:
    """No end, with progress."""
    while True:
        say(out, {"phase": "timed"})
        time.sleep(0.05)


def stopped(out: TextIO) -> None:
    """Stopped, as by Ctrl-Z: it can't even be terminated politely."""
    os.kill(os.getpid(), signal.SIGSTOP)


def deaf(out: TextIO) -> None:
    """A hang of a process that ignores what asks it to end."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(LONG_S)


def closed_output(out: TextIO) -> None:
    """Nothing can be heard any more, and it goes on."""
    out.close()
    time.sleep(LONG_S)


# -- what it says ------------------------------------------------------------------------------------------------------


def says(text: str) -> Callable[[TextIO], None]:
    """One answer, then a proper end."""
    return lambda out: raw(out, text)


def endless_garbage(out: TextIO) -> None:
    """Lines without sense, and no end."""
    while True:
        raw(out, "la la la\n")
        time.sleep(0.001)


def huge_garbage(out: TextIO) -> None:
    """A line of 50 MB."""
    for _ in range(50):
        raw(out, "x" * (FLOOD_BYTES // 50))


def flood(out: TextIO) -> None:
    """50 MB on standard error, and then the reason."""
    for _ in range(50):
        os.write(2, b"warning: this\n" * (FLOOD_BYTES // 50 // 14))
    os.write(2, b"RuntimeError: the last word\n")
    os._exit(1)


def printing_library(out: TextIO) -> None:
    """A library that prints in C, past Python: it must not get among the answers."""
    os.write(1, b'{"status": "oom"}\n')
    raw(out, GOOD.to_json() + "\n")


# -- what it leaves behind ---------------------------------------------------------------------------------------------


def grandchild(*, new_session: bool) -> Callable[[TextIO], None]:
    """A good answer, and a process of its own that goes on and holds the output open."""

    def leave(out: TextIO) -> None:
        command = [sys.executable, "-c", f"import time; time.sleep({LONG_S})"]
        subprocess.Popen(command, start_new_session=new_session, stdout=out.fileno(), pass_fds=[out.fileno()])
        raw(out, GOOD.to_json() + "\n")

    return leave


def no_end(out: TextIO) -> None:
    """A good answer, and then no end: a library's exit handler that waits."""
    raw(out, GOOD.to_json() + "\n")
    time.sleep(LONG_S)


def late_crash(out: TextIO) -> None:
    """A good answer, and a segmentation fault while tidying up."""
    raw(out, GOOD.to_json() + "\n")
    bad_pointer(out)


FAULTS: dict[str, Callable[[TextIO], None]] = {
    "kill -9": end_by(signal.SIGKILL),
    "kill -15": end_by(signal.SIGTERM),
    "Ctrl-C in the trial": end_by(signal.SIGINT),
    "hang-up": end_by(signal.SIGHUP),
    "segmentation fault": bad_pointer,
    "bus error": lost_page,
    "abort": end_by(signal.SIGABRT),
    "exit code 3": exits(3, "something went wrong\n"),
    "exit code 0, no answer": exits(0),
    "exception in the trial's code": exception,
    "std::bad_alloc under a limit": no_memory_in_c,
    "hang": silent,
    "hang, deaf to signals": deaf,
    "stopped (SIGSTOP)": stopped,
    "no end, with progress": busy,
    "bad JSON": says("{'status': ok}\n"),
    "half a line": says(GOOD.to_json()[:40]),
    "answer of a wrong type": says('{"status": "ok", "step_ms": "fast", "peak_reserved_bytes": 1}\n'),
    "answer with an unknown status": says('{"status": "fine"}\n'),
    "answer that is a list": says("[1, 2]\n"),
    "ok without figures": says('{"status": "ok"}\n'),
    "JSON nested 100,000 deep": says("[" * 100_000 + "\n"),
    "endless garbage": endless_garbage,
    "50 MB of garbage in one line": huge_garbage,
    "50 MB on standard error": flood,
    "a library that prints": printing_library,
    "grandchild left behind": grandchild(new_session=False),
    "grandchild in a session of its own": grandchild(new_session=True),
    "answer, then no end": no_end,
    "answer, then a segmentation fault": late_crash,
}
ALONE: dict[str, Callable[[TextIO], None]] = {
    "output closed": closed_output,
    "out of memory in a control group": much_memory,
}
"""Faults of a process that has its output, or its limits, for itself."""


# -- a real trial whose model or machine breaks ------------------------------------------------------------------------


def in_models(hook: Callable[..., object]) -> Callable[[], None]:
    """Have a hook called after each layer of a transformers model; torch's own layers are left alone."""

    def install() -> None:
        from torch.nn.modules.module import register_module_forward_hook

        def only_models(module: object, inputs: object, output: object) -> object:
            return hook(module, output) if type(module).__module__.startswith("transformers.models") else None

        register_module_forward_hook(only_models)

    return install


def nan_output(module: Any, output: Any) -> object:
    """The layer overflows."""
    import torch

    return output * float("nan") if isinstance(output, torch.Tensor) else None


def freeze(module: Any, output: object) -> None:
    """The parameters of some layers are no longer trained."""
    for parameter in module.parameters() if type(module).__name__.endswith("SelfOutput") else ():
        parameter.requires_grad_(False)


def keep_activations() -> None:
    """A release of the library whose layers no longer look at their flag."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    GradientCheckpointingLayer.gradient_checkpointing = property(lambda layer: False, lambda layer, value: None)


def raises(make: Callable[[], BaseException]) -> Callable[[object, object], None]:
    """The layer's kernel fails."""

    def fail(module: Any, output: object) -> None:
        raise make()

    return fail


def cuda_out_of_memory() -> BaseException:
    """As torch raises it."""
    import torch

    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 7.79 GiB")


def cuda_error() -> BaseException:
    """As torch raises it."""
    import torch

    return torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def malloc_refuses() -> BaseException:
    """As torch raises it for the CPU."""
    return RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory")


def on_a_card(make: Callable[[], BaseException]) -> Callable[[], None]:
    """An exception that only a card raises, judged as the card's backend does."""

    def install() -> None:
        from planner.measure.backends import CpuBackend, CudaBackend

        card = CudaBackend.__new__(CudaBackend)  # without a card it can't be set up, and it need not be
        CpuBackend.status_of = lambda backend, error: card.status_of(error)
        in_models(raises(make))()

    return install


def dies(module: Any, output: object) -> None:
    """The process is killed in the middle of a forward pass."""
    os.kill(os.getpid(), signal.SIGKILL)


def sleeps(module: Any, output: object) -> None:
    """A kernel that does not come back."""
    time.sleep(LONG_S)


IN_MODELS: dict[str, Callable[[], None]] = {
    "NaN loss": in_models(nan_output),
    "frozen parameters": in_models(freeze),
    "checkpointing inactive": keep_activations,
    "torch.OutOfMemoryError": on_a_card(cuda_out_of_memory),
    "CUDA error": on_a_card(cuda_error),
    "malloc refuses": in_models(raises(malloc_refuses)),
    "MemoryError": in_models(raises(MemoryError)),
    "exception in the model's code": in_models(raises(lambda: ValueError("shapes do not match\nat all"))),
    "kill -9 in a forward pass": in_models(dies),
    "hang in a forward pass": in_models(sleeps),
}


# -- a server that goes wrong ------------------------------------------------------------------------------------------


def faulty_server(fault: str, out: TextIO) -> None:
    """Before it serves, or while it does."""
    if fault == "server: killed at its start":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "server: never ready":
        time.sleep(LONG_S)
    if fault == "server: torch cannot be imported":
        sys.modules["torch"] = None  # what an import that fails leaves
    if fault in ("server: killed in a trial", "server: stopped in a trial", "server: garbles"):
        threading.Thread(target=_later, args=(fault, out), daemon=True).start()


def _later(fault: str, out: TextIO) -> None:
    children = f"/proc/self/task/{os.getpid()}/children"
    while not open(children).read():  # noqa: SIM115, PTH123
        time.sleep(0.01)
    time.sleep(2.0)  # by then, a good trial is over
    if not open(children).read():  # noqa: SIM115, PTH123
        return
    if fault == "server: garbles":
        raw(out, '{"ended": "soon"}\n{"ph')
    else:
        os.kill(os.getpid(), signal.SIGKILL if "killed" in fault else signal.SIGSTOP)


SERVERS = (
    "server: killed at its start",
    "server: torch cannot be imported",
    "server: never ready",
    "server: killed in a trial",
    "server: stopped in a trial",
    "server: garbles",
)


BY_SEED = ("by-seed", *SERVERS)


def break_trial(fault: str) -> Callable[[str, TextIO], int]:
    """What answers requests, with the fault in it."""

    def run(line: str, out: TextIO) -> int:
        name = list(EVERY)[TrialSpec.from_json(line).seed] if fault in BY_SEED else fault
        if name in IN_MODELS:
            IN_MODELS[name]()
            return answer(line, out)
        say(out, {"phase": "start", "pid": os.getpid()})
        if name in EVERY:
            EVERY[name](out)
        else:
            raw(out, GOOD.to_json() + "\n")
        return 0

    return run


EVERY: dict[str, Callable[..., None]] = FAULTS | ALONE | IN_MODELS | {"none": says(GOOD.to_json() + "\n")}


def main() -> int:
    """The process."""
    fault, *options = sys.argv[1:]
    if fault == "slow start" or (fault == "probe: hang" and options[:1] == ["--probe"]):
        time.sleep(LONG_S)
    if fault == "probe: no such device":
        print("cuda:7: CUDA error: invalid device ordinal", file=sys.stderr)
        return 1
    with private_stdout() as out:
        if options == ["--serve"]:
            faulty_server(fault, out)
            return serve(break_trial(fault), out)
        die_with_parent()
        return break_trial(fault)(sys.stdin.readline(), out)


if __name__ == "__main__":
    os._exit(main())
