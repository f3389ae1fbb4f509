"""Folders that people hand over as models: loaded alike everywhere, or refused by what they are."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    LlamaForSequenceClassification,
    LlavaConfig,
    LlavaForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from alphatoken import Scorer, ScorerConfig
from alphatoken.cli import main
from alphatoken.errors import AlphaTokenError, AlphaTokenWarning, ConfigError, ModelError
from alphatoken.model.loading import find_parts, load_causal_model, load_for_training
from alphatoken.score.options import ModelOptions
from alphatoken.train import AlphaDPOTrainer
from tests.integration import tiny_training as tiny

pytestmark = [
    # peft still asks transformers by the old name.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.saved(tmp_path_factory.mktemp("plain"), 12)


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    """A copy of a whole model, to be spoilt."""
    shutil.copytree(plain / "model", tmp_path / "model")
    return tmp_path / "model"


def change(folder: Path, name: str = "config.json", **more: Any) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | more))


def without(folder: Path, *names: str) -> None:
    for path in folder.iterdir():
        if any(name in path.name for name in names):
            path.unlink()


def cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def pointer(folder: Path, name: str) -> None:
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")


def sharded(folder: Path) -> None:
    without(folder, "safetensors")
    tiny.model().save_pretrained(folder, max_shard_size="20KB")
    max(folder.glob("model-*.safetensors")).unlink()


def run(folder: Path) -> None:
    for number in (90, 200, 1000):  # the newest is that of the largest number that has a model
        shutil.copytree(folder, folder / f"checkpoint-{number}")
    (folder / "checkpoint-1000" / "config.json").unlink()
    for path in list(folder.glob("*.*")):
        path.unlink()


def deepspeed(folder: Path) -> None:
    without(folder, "safetensors")
    (folder / "latest").write_text("global_step1")
    (folder / "zero_to_fp32.py").touch()


def fsdp(folder: Path) -> None:
    without(folder, "safetensors")
    (folder / "pytorch_model_fsdp_0").mkdir()
    (folder / "pytorch_model_fsdp_0" / "__0_0.distcp").touch()


def gguf(folder: Path) -> None:
    without(folder, "")
    (folder / "model.gguf").write_bytes(b"GGUF")


def encoder(folder: Path) -> None:
    small = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    T5ForConditionalGeneration(T5Config(vocab_size=40, **small)).save_pretrained(folder)


def classifier(folder: Path) -> None:
    LlamaForSequenceClassification(tiny.model().config).save_pretrained(folder)


def bare(folder: Path) -> None:
    tiny.model().model.save_pretrained(folder)


def renamed(folder: Path) -> None:
    model = tiny.model()
    state = {f"_orig_mod.{name}": weight for name, weight in model.state_dict().items()}
    model.save_pretrained(folder, state_dict=state)


def remote(folder: Path) -> None:
    places = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    change(folder, model_type="own", architectures=["OwnForCausalLM"], auto_map=places)
    (folder / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class Own(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = Own\n"
    )


def quantised(method: str) -> Callable[[Path], None]:
    return lambda folder: change(folder, quantization_config={"quant_method": method, "bits": 4})


def packed(folder: Path) -> None:
    quantised("gptq")(folder)
    state = {"model.layers.0.mlp.up_proj.qweight": torch.zeros(1, dtype=torch.int32)}
    save_file(state, folder / "model.safetensors", {"format": "pt"})


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "no tokenizer": (lambda f: without(f, "token"), "has no tokenizer.*AutoTokenizer.*'{f}'"),
    "no configuration": (lambda f: (f / "config.json").unlink(), r"no config\.json.*cp BASE"),
    "a broken configuration": (lambda f: (f / "config.json").write_text("{"), "is broken"),
    "no weights": (lambda f: without(f, "safetensors"), r"no weights.*download model\.safetensors"),
    "cut weights": (cut, r"model\.safetensors is cut short. Got: .* bytes of \d+"),
    "weights of Git LFS": (lambda f: pointer(f, "model.safetensors"), "Git LFS.*git lfs pull"),
    "a tokenizer of Git LFS": (lambda f: pointer(f, "tokenizer.json"), "Git LFS.*git lfs pull"),
    "a shard too few": (sharded, r"shards of the weights are missing.*no model-000"),
    "GPTQ": (packed, "optimum.*of a quantised model, name the one that it was made from"),
    "GPTQ over plain weights": (quantised("gptq"), "says gptq.*delete quantization_config"),
    "AWQ over plain weights": (quantised("awq"), "says awq.*delete quantization_config"),
    "FP8 over plain weights": (quantised("fp8"), "says fp8.*delete quantization_config"),
    "an unknown type": (lambda f: change(f, model_type="next9"), "of a type.*newer transformers"),
    "code of its own": (remote, "comes with code of its own.*--trust_remote_code"),
    "another shape": (
        lambda f: change(f, hidden_size=16), r"other shapes.*\(\d+, 32\) in the file, \(\d+, 16\)"
    ),
    "more layers": (
        lambda f: change(f, num_hidden_layers=5), r"not in the files. Got: .*: 18 that.*layers\.3"
    ),
    "no head": (bare, "no output head in its files.*causal language model"),
    "names of another wrapper": (renamed, r"not in the files.*the file has _orig_mod"),
    "a run": (run, "a training run.*--model_name_or_path {f}/checkpoint-200"),
    "a checkpoint of DeepSpeed": (deepspeed, "python {f}/zero_to_fp32.py {f}"),
    "a checkpoint of FSDP": (fsdp, "accelerate merge-weights {f}/pytorch_model_fsdp_0 {f}"),
    "GGUF": (gguf, r"GGUF.*gguf_file='model\.gguf'"),
    "an encoder-decoder": (encoder, "encoder-decoder models are not covered"),
    "a classifier": (classifier, "not made to predict the next.*LlamaForSequenceClassification"),
    "a folder of a folder": (
        lambda f: shutil.move(shutil.copytree(f, f.parent / "x"), f / "inner") and without(f, "."),
        "holds no model.*--model_name_or_path {f}/inner",
    ),
    "a model and an adapter": (
        lambda f: (f / "adapter_config.json").write_text("{}"),
        "a model and an adapter.*move adapter_config.json",
    ),
}  # fmt: skip


def opened(folder: Path) -> None:
    """Tokenizer and model, as ``score`` opens them."""
    options = ModelOptions(model_name_or_path=str(folder), device="cpu")
    options.tokenizer()
    options.model()


@pytest.mark.parametrize("kind", BROKEN)
def test_a_folder_is_refused_alike_by_what_it_is(kind: str, folder: Path) -> None:
    spoil, message = BROKEN[kind]
    spoil(folder)
    with pytest.raises(AlphaTokenError) as scored:
        opened(folder)
    with pytest.raises(AlphaTokenError) as trained:
        tiny.sft(folder.parent / "out", model=str(folder), processing_class=None)
    assert re.search(message.replace("{f}", re.escape(str(folder))), str(scored.value))
    assert str(trained.value) == str(scored.value)
    assert scored.value.remedy


def test_the_commands_refuse_a_folder_in_the_same_line(
    folder: Path, plain: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder, num_hidden_layers=5)
    rows = ["--train_file", str(plain / "rows.jsonl"), "--validation_rows", "2"]
    words = ["--model_name_or_path", str(folder), *rows, "--output_dir", str(folder.parent / "o")]
    said = []
    for command in (["score"], ["sft", "--use_cpu", "--report_to", "none"]):
        assert main([*command, *words]) == 2
        (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("alphatoken:")]
        said.append(line)
    assert said[0] == said[1]
    assert "18 that config.json asks for" in said[0]


def test_remedies_work(folder: Path, tmp_path: Path) -> None:
    quantised("fp8")(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    wanted = tiny.model().state_dict()
    assert all(torch.equal(w, wanted[n]) for n, w in load_causal_model(folder).state_dict().items())
    remote(folder)
    options = ModelOptions(model_name_or_path=str(folder), device="cpu", trust_remote_code=True)
    assert type(options.model()).__name__ == "OwnForCausalLM"
    assert type(load_for_training(str(folder), trust_remote_code=True)).__name__ == "OwnForCausalLM"


def test_a_file_is_no_folder(folder: Path) -> None:
    with pytest.raises(ModelError, match=f"this is a file.*{folder}, if"):
        find_parts(folder / "model.safetensors")


def test_weights_of_the_file_that_the_model_has_not_are_named(folder: Path) -> None:
    change(folder, num_hidden_layers=2)
    with pytest.warns(AlphaTokenWarning, match=r"^9 weights in the files of .*model\.layers\.2\."):
        load_causal_model(folder)


def test_a_bare_decoder_whose_head_is_tied_is_whole(folder: Path) -> None:
    torch.manual_seed(0)
    config = tiny.model().config
    config.tie_word_embeddings = True
    model = type(tiny.model())(config)
    without(folder, "safetensors", "config.json")
    model.model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    loaded: Any = load_causal_model(folder)
    assert torch.equal(loaded.lm_head.weight.cpu(), model.model.embed_tokens.weight)


@pytest.mark.slow
@pytest.mark.parametrize("pairs", [False, True])
def test_a_model_by_its_name_trains_to_the_weights_of_trl(
    plain: Path, tmp_path: Path, pairs: bool
) -> None:
    from trl import DPOTrainer, SFTTrainer

    given = {"model": str(plain / "model"), "peft": True, "max_steps": 2}
    make, theirs = (tiny.dpo, DPOTrainer) if pairs else (tiny.sft, SFTTrainer)
    first = make(tmp_path / "a", policy="all", retention="none", **given)
    second = tiny.made(theirs, tmp_path / "b", **given)
    assert tiny.furthest(first, second) == 0.0, "adapters are drawn alike"
    first.train()
    second.train()
    assert tiny.furthest(first, second) == 0.0


# --- end tokens -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dpo", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_tokenizer_without_end_is_refused_and_the_remedy_works(folder: Path, dpo: bool) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for name in ("pad_token", "eos_token"):
        config.pop(name)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    make = tiny.dpo if dpo else tiny.sft
    given = {"model": str(folder), "processing_class": None, "retention": "none"}
    with pytest.raises(ConfigError, match="no padding token and no end token") as error:
        make(folder.parent / "out", **given)
    found = re.search(r'write "eos_token": "(.*?)" into (\S+)', error.value.remedy)
    assert found is not None
    change(folder, Path(found[2]).name, eos_token=found[1])
    assert found[1] == "</s>", "as config.json has it"
    trainer = make(folder.parent / "out", **given)
    assert trainer.processing_class.pad_token == "</s>"


# --- adapters -------------------------------------------------------------------------------------


@pytest.fixture
def adapter(plain: Path, tmp_path: Path) -> Path:
    """An adapter with weights of its own on the plain model."""
    from peft import get_peft_model

    model: Any = get_peft_model(load_for_training(str(plain / "model")), tiny.lora())
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def both(adapter: Path, plain: Path, tmp_path: Path) -> tuple[Any, Any]:
    """A trainer of the adapter's folder by its name, and one that is handed the adapted base."""
    from peft import PeftModel

    base = load_for_training(str(plain / "model"))
    model: Any = PeftModel.from_pretrained(base, str(adapter), is_trainable=True)
    given = {"retention": "none", "max_steps": 2}
    named = tiny.sft(tmp_path / "a", model=str(adapter), processing_class=None, **given)
    return named, tiny.sft(tmp_path / "b", model=model, **given)


def test_an_adapter_s_folder_is_the_adapter_on_its_base(
    adapter: Path, plain: Path, tmp_path: Path
) -> None:
    named, handed = both(adapter, plain, tmp_path)
    assert tiny.furthest(named, handed) == 0.0
    trains = {name for name, p in named.model.named_parameters() if p.requires_grad}
    assert trains
    assert all("lora" in name for name in trains)


@pytest.mark.slow
def test_an_adapter_s_folder_trains_on_as_the_adapter_on_its_base(
    adapter: Path, plain: Path, tmp_path: Path
) -> None:
    named, handed = both(adapter, plain, tmp_path)
    named.train()
    handed.train()
    assert tiny.furthest(named, handed) == 0.0
    own = {n: p.clone() for n, p in tiny.weights(named.model).items() if "lora" in n}
    named.save_model(str(tmp_path / "a"))
    assert (tmp_path / "a" / "adapter_model.safetensors").is_file()
    parts = find_parts(tmp_path / "a")
    assert (parts.model, parts.adapter) == (str(plain / "model"), str(tmp_path / "a"))
    again = tiny.weights(load_causal_model(parts.model, adapter=parts.adapter, device="cpu"))
    assert all(torch.equal(again[n], w) for n, w in own.items())


@pytest.mark.slow
def test_pairs_train_an_adapter_against_itself_as_it_was(adapter: Path, tmp_path: Path) -> None:
    given = {"retention": "none", "max_steps": 1, "processing_class": None, "policy": "standard"}
    trainer = tiny.dpo(tmp_path / "out", model=str(adapter), validation_dataset=None, **given)
    assert isinstance(trainer, AlphaDPOTrainer)
    trainer.train()
    assert trainer.state.log_history[0]["rewards/margins"] == pytest.approx(0.0, abs=1e-6)


def test_two_adapters_at_once_are_refused(adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another one is asked for.*leave it out"):
        tiny.sft(tmp_path / "out", model=str(adapter), peft=True, retention="none")


def test_an_adapter_whose_base_is_gone_is_refused_and_the_remedy_works(
    adapter: Path, plain: Path, tmp_path: Path
) -> None:
    file = adapter / "adapter_config.json"
    change(adapter, file.name, base_model_name_or_path="/gone/base")
    for use in (
        lambda: ModelOptions(model_name_or_path=str(adapter)).tokenizer(),
        lambda: tiny.sft(tmp_path / "out", model=str(adapter), processing_class=None),
    ):
        with pytest.raises(ConfigError, match=f"base does not exist.*/gone/base.*{file}"):
            use()
    options = ModelOptions(model_name_or_path=str(plain / "model"), adapter=str(adapter))
    assert any("lora" in name for name, _ in options.model().named_parameters())
    change(adapter, file.name, base_model_name_or_path=str(plain / "model"))
    ModelOptions(model_name_or_path=str(adapter), device="cpu").model()
    for content, message in (
        ("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n", "git lfs pull"),
        ('{"base_model_name_or_path": ', "adapter_config.json of the folder is broken"),
    ):
        file.write_text(content)
        with pytest.raises(ModelError, match=message):
            ModelOptions(model_name_or_path=str(adapter)).tokenizer()


@pytest.mark.parametrize("layers", [2, 4])
def test_an_adapter_of_another_base_is_refused(adapter: Path, tmp_path: Path, layers: int) -> None:
    tiny.model(layers=layers).save_pretrained(tmp_path / "other")
    kind = "lacks" if layers == 4 else "has"
    with pytest.raises(ModelError, match=f"of another model.*{kind} 6 weights"):
        load_causal_model(tmp_path / "other", adapter=adapter, device="cpu")


def test_what_is_no_adapter_is_refused_by_what_it_is(
    adapter: Path, plain: Path, tmp_path: Path
) -> None:
    for place, message in (
        (plain / "model", f"that of a model.*--model_name_or_path {plain / 'model'}"),
        (plain, "holds no adapter"),
        (tmp_path, f"the newest one: --adapter {tmp_path / 'checkpoint-7'}"),
    ):
        shutil.copytree(adapter, tmp_path / "checkpoint-7", dirs_exist_ok=True)
        with pytest.raises(ModelError, match=message):
            find_parts(plain / "model", place)
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(ModelError, match="adapter_model.safetensors is cut short"):
        find_parts(adapter)


# --- vision-language models -----------------------------------------------------------------------


@pytest.fixture
def llava(tmp_path: Path) -> tuple[Path, Any]:
    """A vision-language model in a folder, and its text part alone."""
    torch.manual_seed(0)
    text = tiny.model()
    vision = {"model_type": "clip_vision_model", "hidden_size": 8, "intermediate_size": 8,
              "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8,
              "patch_size": 4, "projection_dim": 8}  # fmt: skip
    model = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text.config.to_dict(), image_token_index=3)
    )
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    model.save_pretrained(tmp_path / "llava")
    return tmp_path / "llava", text


def test_a_vision_language_model_is_loaded_as_the_trainers_load_it(llava: tuple[Path, Any]) -> None:
    folder, text = llava
    loaded = load_causal_model(folder, device="cpu")
    assert type(loaded) is type(load_for_training(str(folder)))
    ids = torch.arange(4, 20)[None]
    torch.testing.assert_close(loaded(input_ids=ids).logits, text.eval()(input_ids=ids).logits)
    assert not any(p.requires_grad for n, p in loaded.named_parameters() if "vision" in n)


@pytest.mark.slow
def test_a_vision_language_model_has_the_values_of_its_text_part(llava: tuple[Path, Any]) -> None:
    folder, text = llava
    ids = torch.randint(4, 40, (2, 9), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    config = ScorerConfig("label", parameters="all")
    loaded = load_causal_model(folder, device="cpu")
    values = [Scorer(m.eval(), batch, config=config).score(batch).total for m in (loaded, text)]
    torch.testing.assert_close(values[0], values[1], rtol=1e-3, atol=1e-6)
