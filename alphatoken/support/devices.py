"""What an accelerator asks for and a processor does not: large pieces of work, and no waits."""

from __future__ import annotations

from torch import Tensor


def on_host(tensor: Tensor) -> bool:
    """Whether the program reads numbers of this tensor without waiting for a device.

    Where it does, work is cut into blocks that fit the processor's caches, and what turns out to be
    zero is left out. An accelerator is given whole products instead, because it idles between small
    pieces, and while the program waits to learn which of them are zero.
    """
    return tensor.device.type == "cpu"
