"""Where each part of a model is whose layers don't all find room on the card."""

from __future__ import annotations

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module


def places_of(
    model: torch.nn.Module,
    layers: list[torch.nn.Module],
    layers_on_card: int,
    device: int | str,
    elsewhere: int | str,
    table: torch.nn.Module | None = None,
) -> dict[str, int | str]:
    """A device map: the first layers on the device, as all that is in none; others elsewhere, a `table` on the host."""
    index = {id(layer): i for i, layer in enumerate(layers)}
    places: dict[str, int | str] = {}

    def place(path: str, module: torch.nn.Module) -> None:
        if module is table:
            places[path] = "cpu"
        elif id(module) in index:
            places[path] = device if index[id(module)] < layers_on_card else elsewhere
        elif not any(part is table or id(part) in index for part in module.modules()):
            places[path] = device
        else:
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            places.update({f"{path}.{name}".strip("."): device for name, _ in own})
            for name, child in module.named_children():
                place(f"{path}.{name}".strip("."), child)

    place("", model)
    return places


def look_up_on_host(table: torch.nn.Module) -> None:
    """Have the processor look tokens up: their vectors go to the card, where accelerate alone would send the table."""
    remove_hook_from_module(table)
    add_hook_to_module(table, AlignDevicesHook("cpu", io_same_device=True))
