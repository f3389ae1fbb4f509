"""The whole job on a world small enough to train from nothing: ``python -m alphatoken.demo``.

A tiny decoder is trained on generated text; instruction data with spoiled responses is generated;
the Fisher is fitted and every token valued through the command line; and the spoiled tokens are
searched by value. No network.
"""

from __future__ import annotations

from alphatoken.demo.run import Result, run_demo

__all__ = ["Result", "run_demo"]
