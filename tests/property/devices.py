"""Where numbers are computed: one result is expected on every device that is here.

A test takes ``@on_devices`` and puts what it draws on ``device``: ``Setup(..., device=device)`` for
architectures, ``replace(case, device=device)`` for contractions. Without a GPU that is the CPU.
"""

from __future__ import annotations

import pytest
import torch

DEVICES = ("cpu", *(("cuda",) if torch.cuda.is_available() else ()))
on_devices = pytest.mark.parametrize("device", DEVICES)
