"""A language of a hundred words, its tokenizer, and an untrained decoder for it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

ANIMALS = ("cat", "dog", "bird", "mouse", "horse", "fox")
PLACES = ("garden", "house", "river", "forest", "field")
THINGS = ("ball", "stone", "apple", "leaf", "hat")
COLOURS = ("red", "blue", "green", "white", "black")
MOODS = ("happy", "sad", "tired", "hungry")
LETTERS = tuple("abcdefgh")
NUMBERS = tuple(str(number) for number in range(19))
WORDS = (
    "the a an sees finds takes to in is was then it goes sleeps near and with now very . : "
    "add sort reverse ends count plus list sorted from small large of there are first last"
)


def vocabulary() -> list[str]:
    """Every word of the world, once."""
    words = [*WORDS.split(), *ANIMALS, *PLACES, *THINGS, *COLOURS, *MOODS]
    return list(dict.fromkeys([*words, *LETTERS, *NUMBERS]))


@dataclass(frozen=True)
class Exchange:
    """One instruction with its response, word by word."""

    prompt: str
    response: tuple[str, ...]


def _add(generator: random.Random) -> tuple[str, str]:
    left, right = generator.randrange(10), generator.randrange(10)
    return f"add : {left} and {right}", f"{left} plus {right} is {left + right} ."


def _sort(generator: random.Random) -> tuple[str, str]:
    numbers = generator.sample(range(19), 4)
    given, found = " ".join(map(str, numbers)), " ".join(map(str, sorted(numbers)))
    return f"sort : {given}", f"the sorted list from small to large is {found} ."


def _reverse(generator: random.Random) -> tuple[str, str]:
    letters = generator.sample(LETTERS, 4)
    return f"reverse : {' '.join(letters)}", f"from last to first it is {' '.join(letters[::-1])} ."


def _ends(generator: random.Random) -> tuple[str, str]:
    letters = generator.sample(LETTERS, 5)
    text = f"the first is {letters[0]} and the last is {letters[-1]} ."
    return f"ends of : {' '.join(letters)}", text


def _count(generator: random.Random) -> tuple[str, str]:
    letters = generator.choices(LETTERS[:3], k=6)
    chosen = generator.choice(letters)
    text = " ".join(letters)
    return (
        f"count {chosen} in : {text}",
        f"there are {letters.count(chosen)} {chosen} in the list .",
    )


TASKS: tuple[Callable[[random.Random], tuple[str, str]], ...] = (
    _add,
    _sort,
    _reverse,
    _ends,
    _count,
)


def draw_exchanges(count: int, generator: random.Random) -> list[Exchange]:
    """Exchanges with different prompts."""
    drawn: dict[str, Exchange] = {}
    while len(drawn) < count:
        prompt, response = generator.choice(TASKS)(generator)
        drawn.setdefault(prompt, Exchange(prompt, tuple(response.split())))
    return list(drawn.values())


TEMPLATE = (
    "<start> {% for message in messages %}{% if message.role == 'assistant' %}<assistant> "
    "{{ message.content }} <end> {% else %}<user> {{ message.content }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def make_tokenizer() -> Any:
    """One token a word, with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<unknown>", "<start>", "<end>", "<user>", "<assistant>"]
    words = {word: number for number, word in enumerate([*special, *vocabulary()])}
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
    """A Llama of four layers and about 200,000 parameters, freshly initialised."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=96,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)
