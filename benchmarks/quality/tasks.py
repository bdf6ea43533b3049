"""Retrieval tasks after RULER's recipes, made from seeds.

    passkey      one number in a haystack of essays
    needles      three numbers of three cities, one is asked for
    paraphrased  the same, asked in other words: of the country's capital
    decoys       the same among other numbers of the city and numbers of other cities
    keyvalue     lines of words and numbers, one is asked for
    counting     how often a word stands in a list of words

`context` ends where the haystack ends; `question` follows it, up to the first words
of the assistant's answer, which RULER gives too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.quality.texts import KINDS

WORDS = (
    "apple river stone cloud garden window silver forest bridge candle mirror "
    "ocean pencil rocket saddle tunnel velvet winter yellow zebra anchor basket "
    "copper dragon engine feather guitar hammer island jacket kettle ladder"
).split()
CAPITALS = {
    "London": "England",
    "Paris": "France",
    "Berlin": "Germany",
    "Madrid": "Spain",
    "Rome": "Italy",
    "Vienna": "Austria",
    "Oslo": "Norway",
    "Dublin": "Ireland",
    "Athens": "Greece",
    "Prague": "Czechia",
}
CITIES = list(CAPITALS)
OTHER_NUMBERS = "ordinary secret lucky former".split()
"""What `decoys` has of the city that is asked for, beside the special one."""


@dataclass(frozen=True)
class Question:
    """One retrieval task, in tokens.

    Attributes:
        task: Name of the recipe.
        depth: Where the answer stands in the context, 0 to 1.
        context: Token ids up to the end of the haystack.
        question: Token ids from there to the begun answer.
        answers: What the output must contain.
    """

    task: str
    depth: float
    context: list[int]
    question: list[int]
    answers: tuple[str, ...]

    def share_answered_by(self, text: str) -> float:
        """Which part of the answers stands in the output, as words of their own."""
        words = "".join(c if c.isalnum() else " " for c in text).split()
        return sum(answer in words for answer in self.answers) / len(self.answers)


def questions(
    tokenizer: Any,
    tasks: list[str],
    num_tokens: int,
    depths: list[float],
    per_depth: int,
    seed: int,
) -> list[Question]:
    """`per_depth` questions of each task at each depth, about `num_tokens` long."""
    essays = KINDS["essay"]()
    made = []
    for task in tasks:
        recipe = RECIPES[task]
        for depth in depths:
            for number in range(per_depth):
                rng = random.Random(f"{seed} {task} {depth} {number}")
                made.append(
                    _build(tokenizer, task, recipe, num_tokens, depth, rng, essays)
                )
    return made


def _build(
    tokenizer: Any,
    task: str,
    recipe: Recipe,
    num_tokens: int,
    depth: float,
    rng: random.Random,
    essays: list[str],
) -> Question:
    """Fit the haystack to the length and put it through the chat template."""
    size = num_tokens * 4
    while True:
        lines, asked, begun, answer = recipe(rng, size, depth, essays)
        haystack = "\n".join(lines)
        turn = [{"role": "user", "content": f"{haystack}\n\n{asked}"}]
        text = tokenizer.apply_chat_template(
            turn, tokenize=False, add_generation_prompt=True
        )
        text += begun
        end = text.index(haystack) + len(haystack)
        context = tokenizer(text[:end], add_special_tokens=False)["input_ids"]
        question = tokenizer(text[end:], add_special_tokens=False)["input_ids"]
        total = len(context) + len(question)
        if total <= num_tokens:
            return Question(task, depth, context, question, (answer,))
        # Four characters a token were too many for this text.
        size = int(size * num_tokens / total) - 8


def _essay_lines(rng: random.Random, size: int, essays: list[str]) -> list[str]:
    essay = " ".join(rng.choice([e for e in essays if len(e) > 2 * size]).split())
    start = rng.randrange(len(essay) - size)
    sentences = essay[start : start + size].split(". ")
    return [f"{sentence}." for sentence in sentences[1:-1]]


def _insert(lines: list[str], depth: float, line: str) -> None:
    lines.insert(round(depth * len(lines)), line)


def _passkey(rng, size, depth, essays):
    key = str(rng.randrange(10_000, 100_000))
    lines = _essay_lines(rng, size - 80, essays)
    needle = f"The secret number is {key}. Remember it. The secret number is {key}."
    _insert(lines, depth, needle)
    return lines, "What is the secret number?", "The secret number is", key


def _needles(rng, size, depth, essays):
    lines, city, number = _numbers_of_cities(rng, size, depth, essays)
    asked = f"What is the special magic number for {city}?"
    return lines, asked, f"The special magic number for {city} is", number


def _paraphrased(rng, size, depth, essays):
    lines, city, number = _numbers_of_cities(rng, size, depth, essays)
    asked = f"Which figure did the text give to the capital of {CAPITALS[city]}?"
    return lines, asked, f"The capital of {CAPITALS[city]} has the figure", number


def _decoys(rng, size, depth, essays):
    lines, city, number = _numbers_of_cities(rng, size - 240, depth, essays)
    for kind in OTHER_NUMBERS:
        decoy = str(rng.randrange(10_000, 100_000))
        _insert(lines, rng.random(), f"The {kind} magic number for {city} is {decoy}.")
    asked = f"What is the special magic number for {city}?"
    return lines, asked, f"The special magic number for {city} is", number


def _numbers_of_cities(rng, size, depth, essays):
    """Lines, the first of three cities, and its number."""
    cities = rng.sample(CITIES, 3)
    numbers = [str(rng.randrange(10_000, 100_000)) for _ in cities]
    lines = _essay_lines(rng, size - 180, essays)
    others = [rng.random(), rng.random()]
    for city, number, at in zip(cities, numbers, [depth, *others], strict=True):
        _insert(lines, at, f"The special magic number for {city} is {number}.")
    return lines, cities[0], numbers[0]


def _keyvalue(rng, size, depth, essays):
    count = max(4, size // 40)
    names = [f"{a}-{b}" for a in WORDS for b in WORDS if a != b]
    names = rng.sample(names, count)
    values = [str(rng.randrange(10_000, 100_000)) for _ in names]
    lines = [f"{name}: {value}" for name, value in zip(names, values, strict=True)]
    at = min(round(depth * count), count - 1)
    asked = f"What is the value of {names[at]}?"
    return lines, asked, f"{names[at]}:", values[at]


def _counting(rng, size, depth, essays):
    """The depth is where the first of the counted words stands."""
    word, count = rng.choice(WORDS), rng.randrange(2, 6)
    others = [w for w in WORDS if w != word]
    words = [rng.choice(others) for _ in range(size // 4)]
    first = round(depth * (len(words) - 2 * count))
    for at in [first, *rng.sample(range(first + 1, len(words)), count - 1)]:
        words[at] = word
    asked = f"How often does the word {word} stand in the list? Answer with a number."
    return [" ".join(words)], asked, f"The word {word} stands in the list", str(count)


Recipe = Callable[..., tuple[list[str], str, str, str]]
"""Returns the lines of the haystack, the question, the begun answer, the answer."""

RECIPES: dict[str, Recipe] = {
    "passkey": _passkey,
    "needles": _needles,
    "paraphrased": _paraphrased,
    "decoys": _decoys,
    "keyvalue": _keyvalue,
    "counting": _counting,
}
