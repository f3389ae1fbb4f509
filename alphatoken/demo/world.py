"""The demo's world: general text, five small tasks, and a way to spoil responses."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Exchange", "draw_exchanges", "general_text", "vocabulary"]

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


def general_text(generator: random.Random) -> str:
    """A few sentences whose animal and thing stay the same: what pre-training teaches."""
    animal, thing = generator.choice(ANIMALS), generator.choice(THINGS)
    colour, place = generator.choice(COLOURS), generator.choice(PLACES)
    mood = generator.choice(MOODS)
    return (
        f"the {animal} goes to the {place} . it sees a {colour} {thing} in the {place} . "
        f"the {animal} takes the {colour} {thing} . now the {animal} is very {mood} . "
        f"then the {mood} {animal} sleeps near the {thing} ."
    )


@dataclass(frozen=True)
class Exchange:
    """One instruction with its response, word by word; ``spoiled`` marks replaced words."""

    prompt: str
    response: tuple[str, ...]
    spoiled: tuple[bool, ...]


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


def draw_exchanges(
    count: int, generator: random.Random, *, spoil: float = 0.0, avoid: Sequence[Exchange] = ()
) -> list[Exchange]:
    """Exchanges with different prompts, none of them among ``avoid``.

    Each word of a response is replaced by another word of the world with probability ``spoil``.
    """
    words = vocabulary()
    used = {exchange.prompt for exchange in avoid}
    drawn: list[Exchange] = []
    while len(drawn) < count:
        prompt, response = generator.choice(TASKS)(generator)
        if prompt in used:
            continue
        used.add(prompt)
        clean = response.split()
        spoiled = [generator.random() < spoil for _ in clean]
        noisy = [
            generator.choice([other for other in words if other != word]) if bad else word
            for word, bad in zip(clean, spoiled, strict=True)
        ]
        drawn.append(Exchange(prompt, tuple(noisy), tuple(spoiled)))
    return drawn
