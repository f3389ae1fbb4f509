"""WiSE-FT merges: ends bitwise, the middle by hand, LoRA, tied weights, folders, refusals."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from alphatoken.errors import ConfigError, InputError
from alphatoken_lab.methods.merge import interpolate, merge_models, merge_states
from tests.both_programs import main
from tests.integration import tiny_training
from tests.integration.small_world import make_tokenizer


def model(seed: int, *, tied: bool = False) -> LlamaForCausalLM:
    words = {"vocab_size": len(make_tokenizer()), "tie_word_embeddings": tied}
    return tiny_training.model(seed, layers=2, **words).eval()


def saved(one: Any, folder: Path, **options: Any) -> Path:
    one.save_pretrained(folder, **options)
    make_tokenizer().save_pretrained(folder)
    return folder


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


# --- the formula --------------------------------------------------------------------------------


def test_ends_are_the_models_bitwise_and_the_middle_is_the_formula() -> None:
    before, after = model(0).state_dict(), model(1).state_dict()
    assert same(merge_states(before, after, 0.0), dict(before))
    assert same(merge_states(before, after, 1.0), dict(after))
    middle = merge_states(before, after, 0.25)
    for name, weight in middle.items():
        assert torch.equal(weight, (1 - 0.25) * before[name] + 0.25 * after[name])
        assert not torch.equal(weight, before[name]) or torch.equal(before[name], after[name])


def test_by_hand() -> None:
    """Proves: WiSE-FT (exact), against numbers by hand."""
    before, after = torch.tensor([1.0, 2.0, -4.0]), torch.tensor([5.0, 2.0, 0.0])
    assert interpolate(before, after, 0.25).tolist() == [2.0, 2.0, -3.0]
    ends = torch.tensor([-0.0, 1.0]), torch.tensor([1.0, float("inf")])
    assert torch.signbit(interpolate(*ends, 0.0)).tolist() == [True, False]
    assert interpolate(*ends, 0.0).tolist() == [0.0, 1.0]
    steps = torch.tensor([3]), torch.tensor([7])
    assert interpolate(*steps, 0.5).tolist() == [7]  # no weight: the trained model's


def test_arithmetic_is_float32_whatever_is_stored() -> None:
    before = torch.tensor([1.0, 256.0], dtype=torch.bfloat16)
    after = torch.tensor([1.0078125, 258.0], dtype=torch.bfloat16)
    found = interpolate(before, after, 0.3)
    assert found.dtype == torch.bfloat16
    exact = (0.7 * before.double() + 0.3 * after.double()).to(torch.bfloat16)
    assert torch.equal(found, exact)
    long = interpolate(before.double(), after.double(), 0.3)
    assert torch.equal(long, 0.7 * before.double() + 0.3 * after.double())


def test_tied_weights_are_merged_once_and_stay_tied() -> None:
    before, after = model(0, tied=True), model(1, tied=True)
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    wanted = 0.5 * before.state_dict()[embedding] + 0.5 * after.state_dict()[embedding]
    merged = merge_states(before.state_dict(), after.state_dict(), 0.5)
    assert merged[embedding] is merged[head]
    merge_models(before, after, 0.5)
    assert after.lm_head.weight is after.model.embed_tokens.weight
    assert torch.equal(after.lm_head.weight, wanted)
    with pytest.raises(InputError, match="were not before"):
        merge_states(model(0).state_dict(), after.state_dict(), 0.5)


# --- LoRA ---------------------------------------------------------------------------------------


def adapted(base: LlamaForCausalLM) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    config = LoraConfig(r=3, lora_alpha=7, target_modules=["q_proj", "down_proj"])
    found = get_peft_model(copy.deepcopy(base), config)
    for name, weight in found.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight)
    return found


def test_a_lora_merge_scales_the_delta() -> None:
    base = model(0).double()
    lora = adapted(base)
    delta = {
        f"model.layers.{i}.{part}.weight": 7
        / 3
        * lora.get_submodule(f"base_model.model.model.layers.{i}.{part}").lora_B["default"].weight
        @ lora.get_submodule(f"base_model.model.model.layers.{i}.{part}").lora_A["default"].weight
        for i in range(2)
        for part in ("self_attn.q_proj", "mlp.down_proj")
    }
    before = {name: weight.clone() for name, weight in base.state_dict().items()}
    delta = {name: part.detach() for name, part in delta.items()}
    merged = merge_models(base, lora.merge_and_unload(), 0.3).state_dict()
    for name, weight in before.items():
        wanted = weight + 0.3 * delta.get(name, torch.zeros_like(weight))
        torch.testing.assert_close(merged[name], wanted, rtol=1e-12, atol=1e-12)


def test_the_command_merges_an_adapter(tmp_path: Path) -> None:
    base = model(0)
    folder, out = saved(base, tmp_path / "base"), tmp_path / "out"
    lora = adapted(base)
    lora.save_pretrained(tmp_path / "lora")
    words = ["merge", "--before", str(folder), "--adapter", str(tmp_path / "lora")]
    assert main([*words, "--alpha", "0", "1", "--output_dir", str(out)]) == 0
    ends = [load_file(out / name / "model.safetensors") for name in ("alpha-0", "alpha-1")]
    assert same(ends[0], load_file(folder / "model.safetensors"))
    whole = lora.merge_and_unload().state_dict()
    for name, weight in ends[1].items():
        torch.testing.assert_close(weight, whole[name], rtol=1e-6, atol=1e-7)
    assert not torch.equal(ends[1]["model.layers.0.mlp.down_proj.weight"],
                           ends[0]["model.layers.0.mlp.down_proj.weight"])  # fmt: skip


# --- folders ------------------------------------------------------------------------------------


def merged(before: Path, after: Path, out: Path, *alphas: float) -> int:
    words = ["merge", "--before", str(before), "--after", str(after), "--output_dir", str(out)]
    return main([*words, "--alpha", *map(str, alphas)])


def test_folders_merge_and_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = saved(model(0), tmp_path / "before")
    after = saved(model(1), tmp_path / "after", max_shard_size="8KB")
    assert (after / "model.safetensors.index.json").is_file()
    assert merged(before, after, tmp_path / "out", 0.5) == 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    wanted = merge_states(model(0).state_dict(), model(1).state_dict(), 0.5)
    assert same(loaded.state_dict(), wanted)
    note = json.loads((tmp_path / "out" / "merge.json").read_text())
    assert note == {"before": str(before), "after": str(after), "alpha": 0.5}
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    capsys.readouterr()
    assert merged(before, after, tmp_path / "out", 0.5) == 2
    assert "the output folder exists" in capsys.readouterr().err


def test_a_merged_model_is_stored_as_the_trained_one(tmp_path: Path) -> None:
    folders = [saved(model(i).bfloat16(), tmp_path / f"model-{i}") for i in range(2)]
    assert merged(*folders, tmp_path / "out", 0.3, 1.0) == 0
    ends = [load_file(folder / "model.safetensors") for folder in folders]
    found, last = (
        load_file(tmp_path / "out" / f"alpha-{alpha}" / "model.safetensors") for alpha in ("0.3", 1)
    )
    assert same(last, ends[1])
    for name, weight in found.items():
        exact = (1 - 0.3) * ends[0][name].float() + 0.3 * ends[1][name].float()
        assert torch.equal(weight, exact.bfloat16())


def test_tied_folders_hold_the_weight_once(tmp_path: Path) -> None:
    before = saved(model(0, tied=True), tmp_path / "before")
    after = saved(model(1, tied=True), tmp_path / "after")
    whole = load_file(after / "model.safetensors")
    assert "lm_head.weight" not in whole
    copied = {**whole, "lm_head.weight": whole["model.embed_tokens.weight"].clone()}
    save_file(copied, after / "model.safetensors", metadata={"format": "pt"})
    assert merged(before, after, tmp_path / "out", 0.5) == 0
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    wanted = merge_states(model(0).state_dict(), model(1).state_dict(), 0.5)
    assert torch.equal(loaded.lm_head.weight, wanted["model.embed_tokens.weight"])


@pytest.mark.parametrize("tied", [False, True])
def test_two_vocabularies_are_refused_with_both_sizes_and_the_remedy_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tied: bool
) -> None:
    before = saved(model(0, tied=tied), tmp_path / "before")
    larger, size = model(1, tied=tied), len(make_tokenizer())
    larger.resize_token_embeddings(size + 3, mean_resizing=False)
    after, out = saved(larger, tmp_path / "after"), tmp_path / "out"
    assert merged(before, after, out, 0.25, 0.5) == 2
    message = capsys.readouterr().err
    assert f"{size} rows before training, {size + 3} after it" in message
    assert f"model.resize_token_embeddings({size + 3}) of the model before training" in message
    assert not out.exists()
    whole: Any = AutoModelForCausalLM.from_pretrained(before)
    whole.resize_token_embeddings(size + 3, mean_resizing=False)
    assert merged(saved(whole, tmp_path / "resized"), after, out, 0.25, 0.5) == 0
    found = load_file(out / "alpha-0.25" / "model.safetensors")
    name = "model.embed_tokens.weight"
    ends = [one.state_dict()[name] for one in (whole, larger)]
    assert torch.equal(found[name], 0.75 * ends[0] + 0.25 * ends[1])


def test_a_refused_sweep_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [saved(model(i), tmp_path / f"model-{i}") for i in range(2)]
    out = tmp_path / "out"
    wider = copy.deepcopy(model(1).config)
    wider.intermediate_size = 32
    saved(LlamaForCausalLM(wider), tmp_path / "wider")
    adapted(model(0)).save_pretrained(tmp_path / "lora")
    for after, message in (
        (tmp_path / "wider", "have different shapes. Got: model.layers.0.mlp"),
        (tmp_path / "lora", f"--before BASE --adapter {tmp_path / 'lora'}"),
    ):
        assert merged(folders[0], after, out, 0.9, 0.5) == 2
        assert message in capsys.readouterr().err
        assert not out.exists()
    from alphatoken_lab.commands import merge

    work = merge._merge

    def refuse(options: Any, folder: Path, alpha: float) -> None:
        if alpha == 0.5:
            raise ConfigError("refused in the middle")
        work(options, folder, alpha)

    monkeypatch.setattr(merge, "_merge", refuse)
    assert merged(*folders, out, 1, 0.5) == 2
    assert not out.exists()
    monkeypatch.undo()
    assert merged(*folders, out, 1, 0.5) == 0


def test_refusals_name_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = model(0).state_dict(), model(1).state_dict()
    for alpha in (-0.1, 1.5, float("nan")):
        with pytest.raises(ConfigError, match="alpha"):
            merge_states(before, after, alpha)
    less = {k: v for k, v in after.items() if k != "model.norm.weight"}
    with pytest.raises(InputError, match=r"1 only before training \(model.norm.weight\)"):
        merge_states(before, less, 0.5)
    other = {**after, "model.norm.weight": torch.ones(3)}
    with pytest.raises(InputError, match="different shapes.*model.norm.weight"):
        merge_states(before, other, 0.5)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    folder = saved(model(0), tmp_path / "model")
    for after_folder, message in ((tmp_path / "empty", "the folder has no weights"),
                                  (tmp_path / "nowhere", "nowhere")):  # fmt: skip
        assert merged(folder, after_folder, tmp_path / "out", 0.5) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
