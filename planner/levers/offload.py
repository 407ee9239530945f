"""Offload: what lives in host memory instead of on the card."""

from __future__ import annotations

from planner.levers.base import Choice, Context, Lever

HOST_BYTES_PER_PARAMETER = 16
"""Pinned fp32 copies of weight and gradient, and Adam's two states: 4 bytes each."""


def conflict(offload: str, optimizer: str) -> str | None:
    """Why an optimizer can't be offloaded, or None: the emitted script's host optimizer is AdamW."""
    if offload == "optimizer" and optimizer not in ("adamw_fused", "adamw_foreach"):
        return f"{optimizer} has no host version: offload goes with adamw_fused and adamw_foreach"
    return None


class OffloadLever(Lever):
    """none, or the optimizer: its state and its step on the host, weights and gradients crossing PCIe once a step."""

    field = "offload"
    lowers_memory = (("optimizer", "none"),)

    def choices(self, context: Context) -> list[Choice]:
        """Worth a look with full fine-tuning only: adapters have next to no state."""
        full = context.method == "full"
        return [
            Choice(value="none", reason="nothing crosses PCIe"),
            Choice(
                value="optimizer",
                swept=full,
                reason="8 bytes a parameter move to host memory; the step runs on the CPU"
                if full
                else "adapters have too little state for it to matter",
            ),
        ]
