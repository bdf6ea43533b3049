"""What a user may set: how an option is declared, read and refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import field
from numbers import Integral
from typing import Any

MOST_TOKENS = 2**31
"""Tokens that an option may speak of: longer no sequence is, and what processes send
each other has room for no more."""
MOST_SHOWN = 100
"""Characters of a value that a message shows."""
ALL_QUERIES = "all"
"""`observation_window` value: every prompt query scores (the H2O paper)."""
READ_ALL = "100%"
"""`read` value: queries read all pages."""
UNIFORM, AUTO, MEASURE, REQUEST = "uniform", "auto", "measure", "request"
"""`head_budgets` values that are no file; `AUTO` is one of other options too."""
ATTENTION, GATE = "attention", "gate"
MODEL, INT8 = "model", "int8"
TOKEN, BLOCK = "token", "block"
NONE, END, PROMPT = "none", "end", "prompt"
KEEPS = (NONE, END, PROMPT)
TEXT, CACHE = "text", "cache"


def parse_budget(value: int | str) -> int | str:
    """Return an `int` number of tokens, or a percentage as `"N%"`."""
    fix = "use a number of token slots such as 512, or a percentage such as '20%'"
    if isinstance(value, bool):
        raise bad("budget", value, fix)
    try:
        text = _typed(value)
        if text.endswith("%"):
            return _percentage("budget", text, fix)
        tokens = int(text)
        if not 1 <= tokens <= MOST_TOKENS:
            raise ValueError
        return tokens
    except ValueError:
        raise bad("budget", value, fix) from None


def _percentage(option: str, text: str, fix: str) -> str:
    """The same share as `"N%"`, more than nothing and not more than all."""
    try:
        percent = float(text[:-1])
        if not 0.0 < percent <= 100.0:
            raise ValueError
    except ValueError:
        raise bad(option, text, fix) from None
    return f"{percent:g}%"


def parse_read(value: int | str) -> str:
    """Return the percentage that `--h2o-read` is, as `"N%"`."""
    fix = "use a percentage such as '20%', or '100%' for all"
    try:
        text = _typed(value)
        if text.endswith("%"):
            return _percentage("read", text, fix)
    except ValueError:
        pass
    raise bad("read", value, fix)


def part_of(count: int, percentage: str) -> int:
    """So many of `count` as `"N%"` says, rounded up."""
    return -int(-count * float(percentage.rstrip("%")) // 100)


def share_of(percentage: str) -> float:
    """The share that `"N%"` is."""
    return float(percentage.rstrip("%")) / 100.0


def parse_window(value: int | str) -> int | str:
    """Return an `int` number of prompt queries, `"N%"` of a prompt, or `"all"`."""
    fix = "use a number of prompt queries such as 32, a share such as '20%', or 'all'"
    if isinstance(value, bool):
        raise bad("observation_window", value, fix)
    try:
        text = str(value) if isinstance(value, float) else _typed(value).lower()
        if text == ALL_QUERIES:
            return ALL_QUERIES
        if text.endswith("%"):
            return _percentage("observation_window", text, fix)
        window = int(value)
        whole = float(value) == window
    except (ValueError, OverflowError):
        raise bad("observation_window", value, fix) from None
    if not 1 <= window <= MOST_TOKENS or not whole:
        raise bad("observation_window", value, fix)
    return window


def _typed(value: Any) -> str:
    """A number or what a user has typed, as text.

    Raises:
        ValueError: It is something else, or a number too long to be written.
    """
    if not isinstance(value, (Integral, str)) or isinstance(value, bool):
        raise ValueError
    return str(value).strip()


def shown(value: Any) -> str:
    """A value as Python writes it, or its beginning: messages are logged and sent."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # numbers of over 4300 digits, deep nesting
        return f"a value of type {type(value).__name__} that is too large to show"
    return shortened(text, MOST_SHOWN)


def shortened(text: Any, most: int = 300) -> str:
    """A path, or an error with one, or its beginning."""
    whole = str(text)
    return whole if len(whole) <= most else whole[: most - 3] + "..."


def bad(option: str, value: Any, fix: str, prefix: str = "h2o_") -> ValueError:
    """An error that names an option, both spellings, its value and what to do."""
    return ValueError(
        f"{prefix}{option} ({flag(option, prefix)}) is {shown(value)}: {fix}"
    )


def flag(option: str, prefix: str = "h2o_") -> str:
    """An option as the command line has it."""
    return "--" + (prefix + option).replace("_", "-")


def check_number(option: str, value: Any, low: float, high: float) -> None:
    """Raise ValueError unless a value is a number from `low` to `high`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not low <= value <= high:
        raise bad(option, value, f"use a number from {low} to {high}")


def check_int(option: str, value: Any, low: int, high: int | None = None) -> None:
    """Raise ValueError unless a value is whole and from `low` to `high`, if given."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):
        to = f"{low} or more" if high is None else f"from {low} to {high}"
        raise bad(option, value, f"use a whole number, {to}")


def check_choice(
    option: str, value: Any, choices: tuple[str, ...], prefix: str = "h2o_"
) -> None:
    """Raise ValueError unless a value is one of `choices`."""
    if value not in choices:
        raise bad(option, value, f"use one of {', '.join(choices)}", prefix)


def option(
    default: Any,
    summary: str,
    parse: Callable[[str], Any] | None = None,
    choices: Iterable[str] | None = None,
) -> Any:
    """A field that a user sets, with what the command line says of it.

    Args:
        default: In the preset `h2o`.
        summary: For `--help`.
        parse: Of what is typed; None: a string.
        choices: The only values.
    """
    return field(
        default=default,
        metadata={"summary": summary, "parse": parse, "choices": choices},
    )
