"""Run by a fresh environment, outside the tree: what was installed is whole, and works.

Uses what is there: without torch only the command line's help is looked at, without an extra its
part is left out. The last line names the parts that were seen.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
from importlib.metadata import files, version
from importlib.util import find_spec
from pathlib import Path

import alphatoken
from alphatoken.cli import main

parts = ["import", "help"]
place = Path(alphatoken.__file__).resolve().parent
assert "site-packages" in place.parts, place
assert version("alphatoken") == alphatoken.__version__
assert (place / "py.typed").is_file()
assert any(str(path) == "alphatoken/py.typed" for path in files("alphatoken") or ())


def said(*words: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        assert main(list(words)) == 0, words
    return out.getvalue()


assert "alphatoken score" in said("--help")
for command in ("show", "score", "fisher", "sft", "dpo", "diagnose"):
    assert "--" in said(command, "--help"), command
assert "laptop-sft" in said("sft", "--help")

if find_spec("torch") and find_spec("transformers"):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from alphatoken import Scorer, ScorerConfig, masked_sft_loss, select_top

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=32, num_hidden_layers=2, num_key_value_heads=1, **sizes)
    model = LlamaForCausalLM(config)
    ids = torch.randint(0, 32, (2, 8))
    batch = {"input_ids": ids, "labels": ids}
    scorer = Scorer(model, validation=batch, config=ScorerConfig(layers=2))
    values = scorer.score(batch)
    assert "14 tokens in 2 rows" in repr(values)
    keep = select_top(values.total, values.mask, ratio=0.5)
    masked_sft_loss(model(**batch).logits, ids, keep).backward()
    assert scorer.verify(batch, tokens=2).passed
    parts.append("scorer")

if find_spec("jinja2"):
    from alphatoken.score.page import render_page

    assert "<html" in render_page("smoke", "seen", ())
    parts.append("report")
if find_spec("trl") and "scorer" in parts:
    from alphatoken.train import AlphaSFTConfig

    assert AlphaSFTConfig("out").keep_ratio == 0.5
    parts.append("train")

if find_spec("alphatoken_lab"):
    import alphatoken_lab

    assert version("alphatoken-lab") == alphatoken_lab.__version__
    with contextlib.redirect_stdout(io.StringIO()) as listed:
        assert importlib.import_module("alphatoken_lab.commands").main(["policies"]) == 0
    assert {"standard", "stm"} <= {line.split(" ")[0] for line in listed.getvalue().split("\n")}
    parts.append("lab")

print(json.dumps({"python": sys.version.split()[0], "seen": parts, "place": str(place)}))
