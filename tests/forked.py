"""The server that tests fork processes from, once it has imported what these run.

A process of tests has one such server, whoever asks for it: its modules stand in one list. What is
not installed is left out.
"""

from __future__ import annotations

import multiprocessing

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        "alphatoken.cli.training_rows", "alphatoken.train.sft", "alphatoken.train.dpo",
        "alphatoken_lab.paper.figures", "alphatoken_lab.runner.cell",
        "alphatoken_lab.measure.pair_watch", "deepspeed", "matplotlib", "peft",
        "tests.integration.distributed.trainers", "tests.integration.killed_run",
        "transformers.models.llama.modeling_llama", "trl.scripts.utils",
    ]
)  # fmt: skip
