"""Which cells a command of `benchmarks.quality` measures."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from benchmarks.quality.cells import (
    BLOCK_SIZE,
    BLOCKS,
    ENGINE,
    FULL,
    GENERATION,
    KVPRESS,
    LOSS,
    PROMPT_ONLY,
    RETRIEVAL,
    TORCH,
    Cell,
)

BUDGETS = (0.5, 0.2, 0.1, 0.05)
TEXT_TOKENS, QUESTION_TOKENS = 2560, 960
OTHER_BUDGETS, OTHER_SCORED_TOKENS = (0.2, 0.1), 512
LIST_TOKENS = 320
"""Of the tasks in which a 135M model loses its way in longer prompts."""

Variant = tuple[str, str, dict[str, Any]]
"""`(label, preset, options)`."""

H2O: Variant = ("h2o", "h2o", {})
UNIFORM: Variant = ("h2o uniform", "h2o", {"head_budgets": "uniform"})
OURS = [H2O, UNIFORM, ("h2o-paper", "h2o-paper", {}), ("streaming", "streaming", {})]
BY_ATTENTION = {"prompt_score": "attention"}
INT8: Variant = ("h2o int8", "h2o", {"resident_dtype": "int8"})
THEIR_TYPE = {"resident_dtype": "model"}
"""Of all variants that say nothing else: their budgets are shares of the tokens."""
ATTENTION: Variant = ("h2o prompt_score=attention", "h2o", BY_ATTENTION)
CAKE: Variant = ("cake", "cake", {})
READS_OR_MERGES: list[Variant] = [
    ("mpcache", "mpcache", {}),
    ("h2o read=20%", "h2o", {"read": "20%"} | BY_ATTENTION),
    ("d2o", "d2o", {}),
    ("d2o uniform", "d2o", {"head_budgets": "uniform"}),
    ("h2o merge=value", "h2o", {"merge": "value"} | BY_ATTENTION),
]
OURS_TOO: list[Variant] = [
    ("snapkv", "snapkv", {}),
    ("tova", "tova", {}),
    ATTENTION,
    CAKE,
    *READS_OR_MERGES,
    ("h2o block", "h2o", {"eviction_unit": "block", "head_budgets": "uniform"}),
]
LEVERS: list[Variant] = [
    (f"h2o {name}={value}", "h2o", {name: value} | BY_ATTENTION)
    for name, value in (
        ("sinks", 0),
        ("recent_ratio", 0.5),
        ("score", "sum"),
        ("score", "norm"),
        ("observation_window", "all"),
        ("observation_window", 64),
        ("pooling", 1),
    )
]
"""What the preset sets where prompts go by attention, one at a time set otherwise."""
PRESSES = ["tova", "observed_attention", "snapkv", "streaming_llm"]
PRESSES_TOO = ["expected_attention", "keydiff", "random"]
PROMPT_PRESSES = [
    "kvzip",
    "kvzip_plus",
    "kvgrad",
    "kvzap",
    "lukv",
    "adakv_snapkv",
    "adakv_expected_attention",
    "adakv_compactor",
    "critical_adakv_snapkv",
    "tova",
    "snapkv",
]
"""Methods of `prompt_only`."""
QUESTION_BUDGETS = (0.5, 0.25, 0.125)
SHARED = ["32-head-sum", "32-layer-sum", "32-model-sum", "32-model-random"]


def grid(args: argparse.Namespace, folder: str) -> Iterator[Cell]:
    """The cells; the full cache first, which writes the references."""
    base = {"model": args.model, "seed": args.seed, "references": folder}
    if args.questions:
        yield from _questions(args, base)
        return
    if loss_only(args):
        yield from _other_losses(args, base)
        return
    if args.prompt_only or args.chunks:
        for known in (True, False):
            asked = {"work": RETRIEVAL, "context_tokens": QUESTION_TOKENS}
            asked |= base | {"question_known": known}
            yield from (
                _chunked(args.chunks, 0.2, asked)
                if args.chunks
                else _prompt_only(0.2, asked)
            )
        return
    yield from _losses(args.full, base)
    yield from _retrievals(args.full, base)
    if args.full:
        yield from _generations(base)


def _losses(full: bool, base: dict) -> Iterator[Cell]:
    work = base | {
        "work": LOSS,
        "context_tokens": TEXT_TOKENS,
        "scored_tokens": 1024 if full else 256,
    }
    yield Cell(ENGINE, FULL, budget_tokens=0, **work)
    if not full:
        yield from _ours(OURS, 0.2, work)
        yield from _ours(OURS[:2], 0.1, work)
        yield from _peers(PRESSES[:1], 0.2, work)
        return
    for fraction in BUDGETS:
        yield from _ours(OURS + OURS_TOO, fraction, work)
    for fraction in BUDGETS[2:]:
        yield from _ours(LEVERS, fraction, work)
    for fraction in BUDGETS:
        yield from _peers(PRESSES + PRESSES_TOO, fraction, work)
        budget = tokens_of(fraction, TEXT_TOKENS)
        yield Cell(TORCH, "cake", budget_tokens=budget, **work)
        for policy in SHARED:
            yield Cell(BLOCKS, policy, budget_tokens=budget, **work)


def _other_losses(args: argparse.Namespace, base: dict) -> Iterator[Cell]:
    work = base | {
        "work": LOSS,
        "context_tokens": args.context or TEXT_TOKENS,
        "scored_tokens": OTHER_SCORED_TOKENS,
        "texts": args.texts,
        "max_model_len": args.max_model_len,
        "dtype": args.dtype,
    }
    yield Cell(ENGINE, FULL, budget_tokens=0, **work)
    for fraction in args.budgets or OTHER_BUDGETS:
        if args.prompt_only:
            yield from _prompt_only(fraction, work)
            continue
        if args.chunks:
            yield from _chunked(args.chunks, fraction, work)
            continue
        if args.recent:
            variants: list[Variant] = [
                (f"h2o recent_ratio={ratio:g}", "h2o", {"recent_ratio": ratio})
                for ratio in args.recent
            ]
            yield from _ours(variants, fraction, work)
            continue
        as_users = {"budget": f"{100 * fraction:g}%", "resident_dtype": "auto"}
        share: Variant = ("h2o share", "h2o", as_users)
        yield from _ours(
            [H2O, share, INT8, ATTENTION, UNIFORM, CAKE, *READS_OR_MERGES],
            fraction,
            work,
        )
        yield from _peers(PRESSES, fraction, work)
        budget = tokens_of(fraction, work["context_tokens"])
        yield Cell(TORCH, "cake", budget_tokens=budget, **work)


def _prompt_only(fraction: float, work: dict) -> Iterator[Cell]:
    """Cells of what compresses a prompt once, ours in the same form."""
    ours = _ours([H2O, ATTENTION, UNIFORM], fraction, work)
    yield from (replace(cell, system=PROMPT_ONLY) for cell in ours)
    peers = _peers(PROMPT_PRESSES, fraction, work)
    yield from (replace(cell, system=PROMPT_ONLY) for cell in peers)


def _chunked(chunks: list[int], fraction: float, work: dict) -> Iterator[Cell]:
    """Cells of prompts that are read whole, and in chunks of so many budgets."""
    budget = tokens_of(fraction, work["context_tokens"])
    variants: list[Variant] = [H2O]
    for count in chunks:
        options = {"prefill_chunk": count * budget}
        variants.append((f"h2o in chunks of {count} budgets", "h2o", options))
    yield from _ours(variants, fraction, work)


def _questions(args: argparse.Namespace, base: dict) -> Iterator[Cell]:
    """Questions, known or asked later: the full cache answers alike."""
    for length in args.questions:
        work = base | {
            "work": RETRIEVAL,
            "context_tokens": length,
            "tasks": args.tasks,
            "dtype": args.dtype,
            # Besides the chat template, whose tokens RULER does not count.
            "max_model_len": length + 256,
        }
        yield Cell(ENGINE, FULL, budget_tokens=0, **work)
        for known in (True, False):
            asked = work | {"question_known": known}
            for fraction in args.budgets or QUESTION_BUDGETS:
                if args.prompt_only:
                    yield from _prompt_only(fraction, asked)
                    continue
                yield from _ours([H2O, INT8, ATTENTION, UNIFORM], fraction, asked)
                yield from _peers(PRESSES, fraction, asked)


def _retrievals(full: bool, base: dict) -> Iterator[Cell]:
    work = base | {"work": RETRIEVAL, "context_tokens": QUESTION_TOKENS}
    if not full:
        work |= {"per_depth": 2}
    asked_later = work | {"question_known": False}
    yield Cell(ENGINE, FULL, budget_tokens=0, **work)
    yield from _ours([*OURS[:2], INT8], 0.2, work)
    yield from _ours([H2O, INT8], 0.2, asked_later)
    if not full:
        return
    lists = work | {"context_tokens": LIST_TOKENS, "tasks": ["keyvalue", "counting"]}
    for asked in (asked_later, lists):
        yield Cell(ENGINE, FULL, budget_tokens=0, **asked)
    yield from _ours(OURS[:2], 0.2, lists)
    yield from _ours(OURS[2:] + OURS_TOO + LEVERS, 0.2, work)
    yield from _peers(PRESSES + PRESSES_TOO, 0.2, work)
    yield from _peers(PRESSES + PRESSES_TOO, 0.2, lists)
    budget = tokens_of(0.2, QUESTION_TOKENS)
    for asked in (work, asked_later):
        yield Cell(TORCH, "cake", budget_tokens=budget, **asked)
    yield from _ours([H2O], 0.5, asked_later)
    yield from _ours([ATTENTION, UNIFORM], 0.2, asked_later)
    yield from _peers(PRESSES, 0.2, asked_later)
    for fraction in (0.5, 0.1):
        yield from _ours(OURS, fraction, work)
        yield from _peers(PRESSES, fraction, work)


def _generations(base: dict) -> Iterator[Cell]:
    work = base | {"work": GENERATION, "context_tokens": 1024, "scored_tokens": 512}
    yield Cell(ENGINE, FULL, budget_tokens=0, **work)
    for fraction in (0.5, 0.2):
        yield from _ours(OURS, fraction, work)


def _ours(variants: list[Variant], fraction: float, work: dict) -> Iterator[Cell]:
    budget = tokens_of(fraction, work["context_tokens"])
    for label, preset, options in variants:
        yield Cell(
            ENGINE, preset, budget_tokens=budget, label=label,
            options=THEIR_TYPE | options, **work,
        )  # fmt: skip


def _peers(presses: list[str], fraction: float, work: dict) -> Iterator[Cell]:
    budget = tokens_of(fraction, work["context_tokens"])
    for press in presses:
        yield Cell(KVPRESS, press, budget_tokens=budget, **work)


def tokens_of(fraction: float, context_tokens: int) -> int:
    """Budget in whole blocks, exact for the lengths used here but 5 and 10 % of 960."""
    return round(fraction * context_tokens / BLOCK_SIZE) * BLOCK_SIZE


def fraction_of(cell: Cell) -> str:
    """The budget over the context, 1 for the full cache."""
    return f"{cell.budget_tokens / cell.context_tokens or 1.0:.4f}"


def loss_only(args: argparse.Namespace) -> bool:
    """Whether only losses are measured, of texts or lengths of their own."""
    return bool(args.texts or args.context or args.max_model_len)
