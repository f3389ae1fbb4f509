"""A tiny model of a hundred words and its tokenizer, saved with rows for the command line."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from alphatoken.cli import main
from alphatoken.data import Example, encode_rows, read_rows
from tests.integration import tiny_training
from tests.rows import jsonl


@dataclass(frozen=True)
class World:
    """A saved tiny model, a moved copy of it, and data files."""

    folder: Path

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def score(self, out: Path, *more: object, **changed: object) -> int:
        """Exit status of ``score`` on the small files; keyword arguments replace options."""
        options = {
            "model": self / "moved",
            "train": self / "train.jsonl",
            "validation": self / "validation.jsonl",
            "out": out,
            "batch_size": 4,
            "shard_size": 8,
            "value": None if {"estimator", "--estimator"} & {*changed, *more} else "paper",
        } | changed
        return main(["score", *flags(options), "--quiet", *map(str, more)])

    def fit(self, out: Path, *more: object, **changed: object) -> int:
        """Exit status of ``fisher`` on the reference model and the file of prompts."""
        options = {
            "model": self / "reference",
            "train": self / "prompts.jsonl",
            "output_file": out,
            "samples": 4,
            "max_new_tokens": 8,
        } | changed
        return main(["fisher", *flags(options), "--quiet", *map(str, more)])

    def loaded(self) -> tuple[Any, Any, list[Example], list[Example]]:
        """The moved model, its tokenizer, and training and validation rows as tokens."""
        path = self / "moved"
        tokenizer = AutoTokenizer.from_pretrained(path)
        train, validation = (
            encode_rows(read_rows(self / f"{name}.jsonl"), tokenizer)[0]
            for name in ("train", "validation")
        )
        return AutoModelForCausalLM.from_pretrained(path).eval(), tokenizer, train, validation


SHORT = {
    "batch_size": "per_device_train_batch_size", "fisher": "fisher_file",
    "limit": "train_limit", "model": "model_name_or_path", "out": "output_dir",
    "ratio": "keep_ratio", "scope": "keep_scope",
    "train": "train_file", "validation": "validation_file",
}  # fmt: skip
"""Words of these tests for options that most of them give."""


def flags(options: Mapping[str, object]) -> list[str]:
    """Options as words of a command; None is left out."""
    by_name = {SHORT.get(key, key): value for key, value in options.items() if value is not None}
    return [word for name, value in by_name.items() for word in (f"--{name}", str(value))]


def saved_model(folder: Path, seed: int = 0) -> Path:
    """An untrained model of the tiny language, and its tokenizer."""
    tokenizer = make_tokenizer()
    make_model(tokenizer, seed=seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(path: Path, count: int, seed: int) -> Path:
    """Rows of the tiny language as JSONL."""
    return jsonl(path, exchanges(count, seed))


def make_world(folder: Path) -> World:
    """Everything saved in a folder, a Fisher fitted by the command among it."""
    tokenizer, model = make_tokenizer(), make_model(make_tokenizer())
    for name in ("reference", "moved"):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
    write_rows(folder / "train.jsonl", 20, seed=1)
    write_rows(folder / "validation.jsonl", 6, seed=2)
    write_rows(folder / "prompts.jsonl", 5, seed=3)
    world = World(folder)
    assert world.fit(folder / "fisher.safetensors", samples=6) == 0
    return world


# --- the language ---------------------------------------------------------------------------------

SPECIAL = ("<pad>", "<unknown>", "<start>", "<end>", "<user>", "<assistant>")
LETTERS = tuple("abcdefgh")
NUMBERS = tuple(str(number) for number in range(19))
WORDS = (
    "the a an cat sees finds takes to in is was then it goes near and with now very . : ball "
    "add sort reverse ends count plus list sorted from small large of there are first last"
)
VOCABULARY = tuple(dict.fromkeys([*SPECIAL, *WORDS.split(), *LETTERS, *NUMBERS]))


def _add(generator: random.Random) -> tuple[str, str]:
    left, right = generator.randrange(10), generator.randrange(10)
    return f"add : {left} and {right}", f"{left} plus {right} is {left + right} ."


def _sort(generator: random.Random) -> tuple[str, str]:
    numbers = generator.sample(range(19), 4)
    ascending = " ".join(map(str, sorted(numbers)))
    prompt = f"sort : {' '.join(map(str, numbers))}"
    return prompt, f"the sorted list from small to large is {ascending} ."


def _reverse(generator: random.Random) -> tuple[str, str]:
    letters = generator.sample(LETTERS, 4)
    return f"reverse : {' '.join(letters)}", f"from last to first it is {' '.join(letters[::-1])} ."


def _ends(generator: random.Random) -> tuple[str, str]:
    letters = generator.sample(LETTERS, 5)
    text = f"the first is {letters[0]} and the last is {letters[-1]} ."
    return f"ends of : {' '.join(letters)}", text


def _count(generator: random.Random) -> tuple[str, str]:
    letters = generator.choices(LETTERS[:3], k=6)
    letter = generator.choice(letters)
    text = f"there are {letters.count(letter)} {letter} in the list ."
    return f"count {letter} in : {' '.join(letters)}", text


Task = Callable[[random.Random], tuple[str, str]]
TASKS: tuple[Task, ...] = (_add, _sort, _reverse, _ends, _count)


def exchanges(count: int, seed: int) -> list[dict[str, str]]:
    """Instructions with their responses, no prompt twice."""
    generator, drawn = random.Random(seed), dict[str, str]()
    while len(drawn) < count:
        prompt, response = generator.choice(TASKS)(generator)
        drawn.setdefault(prompt, response)
    return [{"prompt": prompt, "response": response} for prompt, response in drawn.items()]


TEMPLATE = (
    "<start> {% for message in messages %}{% if message.role == 'assistant' %}<assistant> "
    "{{ message.content }} <end> {% else %}<user> {{ message.content }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def make_tokenizer() -> Any:
    """One token a word, with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(VOCABULARY)}
    core = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(
        single="<start> $A", special_tokens=[("<start>", words["<start>"])]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        unk_token="<unknown>",
        bos_token="<start>",
        eos_token="<end>",
        additional_special_tokens=["<user>", "<assistant>"],
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(tokenizer: Any, seed: int = 0) -> Any:
    """The tiny model of the trainers' tests for this tokenizer, a layer deeper."""
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 96}
    ids = {n: getattr(tokenizer, n) for n in ("bos_token_id", "eos_token_id", "pad_token_id")}
    with torch.random.fork_rng(devices=[]):
        return tiny_training.model(seed, layers=4, tie_word_embeddings=True, **sizes, **ids)
