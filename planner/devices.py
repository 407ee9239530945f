"""Which device a request's trials run on, if any.

A device is looked at by a process of its own, so that the planner itself holds nothing on it.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from dataclasses import replace

import psutil

from planner import cache
from planner.errors import InputError, Problem, TrialError
from planner.hardware import find_card
from planner.measure.protocol import DeviceFacts
from planner.plans import Reason
from planner.request import PlanRequest
from planner.units import format_bytes, shown

Probe = Callable[[str], DeviceFacts]
"""Looks at a device; raises TrialError in one line."""


def find_device(request: PlanRequest, probe: Probe) -> tuple[DeviceFacts | None, Reason]:
    """The device that trials run on, None where every step is simulated; and why.

    ``auto`` is the CUDA device where there is one that the request is about. Raises InputError where the request
    names a device that isn't there or isn't what else it names, TrialError where a device can't be looked at.
    """
    if request.device == "none" or request.gpus > 1:  # contradictions.py has refused a device that was named
        several = f"{request.gpus} cards are simulated: trials run on one card alone"
        why = several if request.gpus > 1 else "as asked for: every step is simulated"
        return None, Reason(field="device", value="none", reason=why)
    if request.device == "cpu":
        facts = _look_at_cpu(probe)
        return facts, Reason(field="device", value="cpu", reason=_about(facts, "as asked for"))
    if not has_cuda_driver():
        if request.device == "auto":
            return None, Reason(field="device", value="none", reason="no CUDA device here: every step is simulated")
        message = f"got {shown(request.device)}, and no CUDA driver is here; accepted here: cpu, none, auto"
        raise InputError([Problem(argument="device", message=message)])
    try:
        facts = probe("cuda" if request.device == "auto" else request.device)
    except TrialError as error:
        if request.device != "auto":
            raise
        return None, Reason(field="device", value="none", reason=f"every step is simulated: {error}")
    other = _about_another_card(request, facts)
    if not other:
        said = "the CUDA device that is here" if request.device == "auto" else "as asked for"
        return facts, Reason(field="device", value=facts.device, reason=_about(facts, said))
    if request.device == "auto":
        return None, Reason(field="device", value="none", reason=f"{other}: every step is simulated")
    message = f"got {shown(request.device)}: {other}; leave one of them out, or simulate with device none"
    raise InputError([Problem(argument="device", message=message)])


def has_cuda_driver() -> bool:
    """Whether NVIDIA's driver library can be loaded; torch, which takes seconds to import, isn't asked."""
    try:
        ctypes.CDLL("nvcuda.dll" if platform.system() == "Windows" else "libcuda.so.1")
    except OSError:
        return False
    return True


def _look_at_cpu(probe: Probe) -> DeviceFacts:
    """Rates and context are remembered; what is free is looked at each time."""
    key = {"device": "cpu", "processor": platform.processor(), "node": platform.node(), "cpus": psutil.cpu_count()}
    facts = cache.remembered("devices", key, lambda: probe("cpu"))
    return replace(facts, free_bytes=min(facts.total_bytes, psutil.virtual_memory().available))


def _about(facts: DeviceFacts, said: str) -> str:
    return "; ".join((f"{said}: {facts.name}, {format_bytes(facts.free_bytes)} free", *facts.notes))


def _about_another_card(request: PlanRequest, facts: DeviceFacts) -> str:
    """Why the request is not about the device that is here, a clause; empty where it is."""
    if request.gpu is not None:
        named = find_card(request.gpu, vram_bytes=request.vram_bytes)
        here = _catalogued_name(facts)
        if named.name != here:
            return f"the request is about {named.name}, and the device here is {facts.name}"
    if request.vram_bytes > _label_bytes(facts):
        return f"the request is about {format_bytes(request.vram_bytes)}, and {facts.name} has less"
    return ""


def _catalogued_name(facts: DeviceFacts) -> str:
    try:
        return find_card(facts.name, vram_bytes=facts.total_bytes).name
    except InputError:
        return facts.name


def _label_bytes(facts: DeviceFacts) -> int:
    """Memory on the label: what the catalogue says, since a card reports less."""
    try:
        return max(facts.total_bytes, find_card(facts.name, vram_bytes=facts.total_bytes).label_bytes)
    except InputError:
        return facts.total_bytes
