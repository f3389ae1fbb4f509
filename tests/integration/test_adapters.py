"""Models with a LoRA adapter: its own tokenizer and template, its added tokens, its base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from alphatoken.errors import ModelError
from alphatoken.model.loading import load_causal_model
from alphatoken.score import read_values
from alphatoken.score.options import ModelOptions
from tests.both_programs import main
from tests.integration.small_world import make_model, make_tokenizer
from tests.rows import jsonl

pytest.importorskip("peft", reason="peft is not installed: pip install alphatoken[lora]")
# peft still asks transformers by the old name.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer:UserWarning"),
]

TWICE = make_tokenizer().chat_template.replace("<assistant> ", "<assistant> <assistant> ")
"""A template that is not the base's."""
ROWS = [{"prompt": f"add {n} and two", "response": f"the sum is {n + 2}"} for n in range(8)]
NEW = "<step>"


def saved(folder: Path, *, added: bool, head: bool = True) -> tuple[Path, Path]:
    """A base without a template, and an adapter on it that brings one, and perhaps a token."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    tokenizer, base = make_tokenizer(), make_model(make_tokenizer())
    base.save_pretrained(folder / "base")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder / "base")
    whole = []
    if added:
        tokenizer.add_tokens([NEW])
        base.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        whole = ["embed_tokens"]
    config = LoraConfig(
        r=2,
        target_modules=["q_proj", "up_proj"],
        modules_to_save=whole,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(base, config)
    adapted.base_model.model.config._name_or_path = str(folder / "base")
    adapted.peft_config["default"].base_model_name_or_path = str(folder / "base")
    adapted.save_pretrained(folder / "lora", save_embedding_layers=added and head)
    tokenizer.chat_template = TWICE
    tokenizer.save_pretrained(folder / "lora")
    return folder / "base", folder / "lora"


def test_every_command_reads_with_the_adapter_s_tokenizer(tmp_path: Path) -> None:
    base, lora = saved(tmp_path, added=False)
    named = (
        ModelOptions(model_name_or_path=str(base), adapter=str(lora)),
        ModelOptions(model_name_or_path=str(lora)),
    )
    weights = []
    for options in named:
        assert options.tokenizer().chat_template == TWICE
        found = options.model().named_parameters()
        weights.append({name: p.detach() for name, p in found})
    assert any("lora_A" in name for name in weights[0])
    assert all(torch.equal(weights[1][name], weight) for name, weight in weights[0].items())
    assert ModelOptions(model_name_or_path=str(base)).tokenizer().chat_template is None


def test_values_and_merged_folders_are_of_the_adapter_s_template(tmp_path: Path) -> None:
    base, lora = saved(tmp_path, added=False)
    data, out = str(jsonl(tmp_path / "rows.jsonl", ROWS)), tmp_path / "values"
    words = ["score", "--model_name_or_path", str(base), "--adapter", str(lora), "--quiet",
             "--train_file", data, "--validation_rows", "2", "--output_dir", str(out),
             "--no_report"]  # fmt: skip
    assert main(words) == 0
    first = next(read_values(out / "values"))
    assert "<assistant> <assistant>" in make_tokenizer().decode(first.ids)
    merged = tmp_path / "merged"
    words = ["merge", "--before", str(base), "--adapter", str(lora), "--alpha", "0.5"]
    assert main([*words, "--output_dir", str(merged)]) == 0
    options = ModelOptions(model_name_or_path=str(merged))
    assert options.tokenizer().chat_template == TWICE


def test_rows_that_an_adapter_adds_to_the_embedding_are_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, lora = saved(tmp_path, added=True)
    model: Any = load_causal_model(base, adapter=lora, device="cpu")
    size = len(make_tokenizer())
    assert model.get_input_embeddings().weight.shape[0] == size + 1
    assert model.get_output_embeddings().weight.shape[0] == size + 1
    words = ["merge", "--before", str(base), "--adapter", str(lora)]
    assert main([*words, "--alpha", "0.5", "--output_dir", str(tmp_path / "half")]) == 2
    assert f"{size} rows before training, {size + 1} after it" in capsys.readouterr().err
    assert main([*words, "--alpha", "1", "--output_dir", str(tmp_path / "whole")]) == 0
    merged: Any = load_causal_model(tmp_path / "whole", device="cpu")
    ids = torch.tensor([[1, size]])
    torch.testing.assert_close(merged(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)


def test_an_embedding_without_its_head_is_refused(tmp_path: Path) -> None:
    base, lora = saved(tmp_path, added=True, head=False)
    with pytest.raises(ModelError, match="does not hold both"):
        load_causal_model(base, adapter=lora, device="cpu")


def test_a_mistyped_folder_is_named_by_what_it_should_be(tmp_path: Path) -> None:
    base, _ = saved(tmp_path, added=False)
    with pytest.raises(ModelError, match=r"no such adapter folder.*\./lroa"):
        load_causal_model(base, adapter="./lroa")
    with pytest.raises(ModelError, match="no such model folder, and no tokenizer.*modle"):
        ModelOptions(model_name_or_path="modle").tokenizer()
