"""Combinations of values of which `make test` runs those that meet in pairs.

Most faults are of one value or of two that meet (Kuhn, Wallace and Gallo, Software
fault interactions, 2004): each value of a factor runs with each of every other, and the
rest of the product is left to `make test-all`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

Pair = tuple[int, int, int, int]
"""Two factors, and the index of a value of each."""


def in_pairs(names: str, *factors: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by the product of factors; some are slow.

    Args:
        names: Of the arguments, as for `pytest.mark.parametrize`.
        factors: The values of each, or `pytest.param` of one with its marks.
    """
    values = [[_param(value) for value in factor] for factor in factors]
    kept = _covering([*map(len, values)])
    params = []
    for indices in itertools.product(*(range(len(of)) for of in values)):
        chosen = [of[i] for of, i in zip(values, indices, strict=True)]
        marks = [mark for each in chosen for mark in each.marks]
        marks += [] if indices in kept else [pytest.mark.slow]
        params.append(pytest.param(*(each.values[0] for each in chosen), marks=marks))
    return pytest.mark.parametrize(names, params)


def _param(value: Any) -> Any:
    return value if isinstance(value, type(pytest.param())) else pytest.param(value)


def _covering(counts: Sequence[int]) -> set[tuple[int, ...]]:
    """Combinations that have all pairs: always that which has most new ones."""
    every = list(itertools.product(*map(range, counts)))
    missing = {pair for combination in every for pair in _pairs(combination)}
    kept = set()
    while missing:
        best = max(every, key=lambda each: len(_pairs(each) & missing))
        kept.add(best)
        missing -= _pairs(best)
    return kept


def _pairs(combination: tuple[int, ...]) -> set[Pair]:
    indexed = enumerate(combination)
    return {(a, i, b, j) for (a, i), (b, j) in itertools.combinations(indexed, 2)}
