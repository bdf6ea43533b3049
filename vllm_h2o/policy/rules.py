"""Which options need which or have no effect beside which, and what kernels must have.

As data; docs/options.md has them as a table (`python -m vllm_h2o.option_table`). What
vLLM's features exclude is in `plugin/validate`, what a request may ask in
`policy/request`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_h2o.policy.methods import (
    METHODS,
    Method,
    fused_form_of,
    fused_prompt_form_of,
    splits,
)
from vllm_h2o.policy.options import (
    ATTENTION,
    AUTO,
    BLOCK,
    CACHE,
    END,
    GATE,
    INT8,
    MODEL,
    NONE,
    PROMPT,
    READ_ALL,
    REQUEST,
    TEXT,
    TOKEN,
    UNIFORM,
    flag,
    shown,
)

if TYPE_CHECKING:
    from vllm_h2o.policy.config import H2OConfig


class Capability(Enum):
    """What kernels may have beside the operations themselves."""

    READ = "read"
    """Queries that read some pages only (`H2OConfig.read`)."""
    MERGE = "merge"
    """Values of dropped tokens that go into kept ones (`H2OConfig.merge`)."""
    INT8 = "int8"
    """Keys and values of resident pages in int8 (`H2OConfig.resident_dtype`)."""
    PROMPT = "prompt"
    """Methods with rules of their own for prompts, which torch runs."""
    REQUEST = "request"
    """Head budgets that each request shares out (`H2OConfig.head_budgets`)."""
    CHUNKS = "chunks"
    """Prompts that are read in chunks (`H2OConfig.prefill_chunk`)."""
    PROMPT_CHUNKS = "prompt-chunks"
    """The same by methods with rules of their own for prompts."""
    DRAFTS = "drafts"
    """Several tokens of a row in a step, of which the last can be taken back."""
    TORCH = "torch"
    """Every method by its own torch code, whatever its form; all of this at once."""


class Values(NamedTuple):
    """Some of an option's values.

    Attributes:
        hold: Returns whether a value is one of them.
        text: What they are, as it is said behind the option's name.
        like: All of them, or one that stands for them.
    """

    hold: Callable[[Any], bool]
    text: str
    like: tuple[Any, ...] = ()

    def said(self, option: str) -> str:
        """The option with these values, as messages say it."""
        if not self.like:
            return f"h2o_{option} {self.text}"
        return f"h2o_{option}={' or '.join(map(shown, self.like))}"


def _one_of(*values: Any) -> Values:
    return Values(values.__contains__, " or ".join(map(str, values)), values)


def _but(*values: Any) -> Values:
    text = f"other than {' or '.join(map(str, values))}"
    return Values(lambda value: value not in values, text)


class Need(NamedTuple):
    """An option that, where it has some values, needs another to have some.

    Attributes:
        option: Its name, without `h2o_`.
        when: Its values that need something.
        off: One that does not.
        other: The option that is needed.
        allowed: The values that it then may have.
        why: What else would happen, where it is not plain.
    """

    option: str
    when: Values
    off: Any
    other: str
    allowed: Values
    why: str = ""

    def message(self, config: Any) -> str:
        """The error of a config that has not what is needed."""
        why = f", as {self.why}" if self.why else ""
        this = "one of these" if len(self.allowed.like) > 1 else "this"
        return (
            f"{_given(self.option, getattr(config, self.option))} needs "
            f"{self.allowed.said(self.other)} ({flag(self.other)}), not "
            f"{shown(getattr(config, self.other))}{why}: use {this}, or "
            f"h2o_{self.option}={shown(self.off)}"
        )


class Idle(NamedTuple):
    """Options that change nothing where another has some values.

    Attributes:
        options: Their names, without `h2o_`.
        other: The option that leaves them idle.
        when: Its values that do.
        use: What it should be for them to have an effect.
        why: Why they have none, where it is not plain.
        by_preset: Whether a preset's own value counts as given: without it the preset
            would be another method.
    """

    options: tuple[str, ...]
    other: str
    when: Values
    use: str
    why: str = ""
    by_preset: bool = False


class NeedsKernel(NamedTuple):
    """A capability that kernels must have for some values of an option."""

    option: str
    when: Values
    off: Any
    capability: Capability


_TOKENS, _NO_MERGE, _READ_ALL = _one_of(TOKEN), _one_of(NONE), _one_of(READ_ALL)
_SOME_HEAVY = Values(lambda ratio: ratio < 1.0, "below 1")
_PROFILE = _but(UNIFORM, REQUEST)._replace(like=(AUTO,))
_SPLITS = _one_of(*(name for name, cls in METHODS.items() if splits(cls())))._replace(
    hold=lambda score: splits(METHODS[score]())
)
_CHUNKS, _KEEPS = _but(0), _but(NONE)
_NO_FOLDER = Values(lambda folder: not folder, "left out")
_NO_SCORE = "which leaves no slots to win by score"

NEEDS = (
    Need("head_budgets", _but(UNIFORM, AUTO), UNIFORM, "eviction_unit", _TOKENS),
    Need("head_budgets", _one_of(REQUEST), AUTO, "score", _SPLITS),
    Need("head_budgets", _one_of(REQUEST), UNIFORM, "recent_ratio", _SOME_HEAVY),
    Need("prompt_score", _one_of(GATE), ATTENTION, "score", _one_of("mean")),
    Need("prompt_score", _one_of(GATE), ATTENTION, "score_decay", _one_of(1.0)),
    Need(
        "prompt_score", _one_of(GATE), ATTENTION, "head_budgets", _PROFILE,
        why="the gate is part of a head profile",
    ),
    Need("prompt_score", _one_of(GATE), ATTENTION, "eviction_unit", _TOKENS),
    Need("prompt_score", _one_of(GATE), ATTENTION, "recent_ratio", _SOME_HEAVY),
    Need("merge", _but(NONE), NONE, "eviction_unit", _TOKENS),
    Need(
        "resident_dtype", _one_of(INT8), MODEL, "merge", _NO_MERGE,
        why="values that merge would be rounded again and again",
    ),
    Need("resident_dtype", _one_of(INT8), MODEL, "eviction_unit", _TOKENS),
    Need("prefill_chunk", _CHUNKS, 0, "eviction_unit", _TOKENS),
    Need("prefill_chunk", _CHUNKS, 0, "merge", _NO_MERGE),
    Need("prefill_chunk", _CHUNKS, 0, "read", _READ_ALL),
    Need("keep", _KEEPS, NONE, "head_budgets", _but(REQUEST)._replace(like=(AUTO,))),
    Need("keep", _KEEPS, NONE, "eviction_unit", _TOKENS),
    Need("keep", _KEEPS, NONE, "merge", _NO_MERGE),
    Need("keep", _KEEPS, NONE, "read", _READ_ALL),
    Need(
        "keep_folder", Values(bool, "given"), "", "keep",
        _KEEPS._replace(like=(END, PROMPT)),
        why="nothing is kept that could be written",
    ),
    Need(
        "positions", _one_of(CACHE), TEXT, "prefill_chunk",
        _CHUNKS._replace(like=(1024,)),
        why="a prompt that is read whole must be no longer than what the model was "
        "trained for",
    ),
    Need(
        "positions", _one_of(CACHE), TEXT, "resident_dtype",
        _but(INT8)._replace(like=(MODEL,)),
        why="keys that move would be rounded again and again",
    ),
    Need("eviction_unit", _one_of(BLOCK), TOKEN, "recent_ratio", _SOME_HEAVY),
)  # fmt: skip


IDLE = (
    Idle(
        ("keep_seconds", "keep_sessions"),
        "keep", _one_of(NONE), use=f"h2o_keep={END!r}",
    ),
    Idle(("keep_size",), "keep_folder", _NO_FOLDER, use="h2o_keep_folder=FOLDER"),
    Idle(
        ("observation_window", "pooling"),
        "prompt_score", _one_of(GATE), use=f"h2o_prompt_score={ATTENTION!r}",
    ),
    Idle(
        ("observation_window", "pooling", "prompt_score", "score", "score_decay",
         "read"),
        "recent_ratio", _one_of(1.0), use="a smaller h2o_recent_ratio", why=_NO_SCORE,
    ),
)  # fmt: skip


def idle_rows(options: Collection[str]) -> Iterator[Idle]:
    """`IDLE`, and options that methods lack.

    Args:
        options: Names of all that a user may set; a method may have others.
    """
    by_methods: dict[tuple[str, ...], list[str]] = {}
    fields = [f.name for cls in METHODS.values() for f in dataclasses.fields(cls)]
    for option in dict.fromkeys(fields):
        able = tuple(name for name, cls in METHODS.items() if hasattr(cls(), option))
        if option in options:
            by_methods.setdefault(able, []).append(option)
    for able, named in by_methods.items():
        lacks = Values(partial(_lacks, able), f"other than {' or '.join(able)}")
        use = f"h2o_score={' or '.join(map(shown, able))}"
        yield Idle(tuple(named), "score", lacks, use, by_preset=True)
    yield from IDLE


def _lacks(able: Collection[str], score: str) -> bool:
    return score not in able


KERNELS = (
    NeedsKernel("head_budgets", _one_of(REQUEST), UNIFORM, Capability.REQUEST),
    NeedsKernel("resident_dtype", _one_of(INT8), MODEL, Capability.INT8),
    NeedsKernel("prefill_chunk", _CHUNKS, 0, Capability.CHUNKS),
    NeedsKernel("keep", _KEEPS, NONE, Capability.CHUNKS),
    NeedsKernel("read", _but(READ_ALL), READ_ALL, Capability.READ),
    NeedsKernel("merge", _but(NONE), NONE, Capability.MERGE),
)
ONE_AT_A_TIME = {Capability.READ, Capability.MERGE}
"""Both together are the torch reference's."""


def broken_need(config: Any, **instead: Any) -> Need | None:
    """The first need that a config does not meet; None: it meets all.

    Args:
        config: An `H2OConfig`, or what is to become one.
        instead: Values that options may get.
    """

    def value(option: str) -> Any:
        return instead[option] if option in instead else getattr(config, option)

    for need in NEEDS:
        asked = need.when.hold(value(need.option))
        if asked and not need.allowed.hold(value(need.other)):
            return need
    return None


def check_needs(config: Any) -> None:
    """Raise ValueError where an option of a config needs what another has not."""
    need = broken_need(config)
    if need is not None:
        raise ValueError(need.message(config))


def check_effects(config: H2OConfig, given: Mapping[str, Any]) -> None:
    """Raise ValueError where an option of a config has no effect.

    Args:
        config: The policy.
        given: The options that a user has set, as they were typed.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for row in idle_rows(defaults):
        if not row.when.hold(getattr(config, row.other)):
            continue
        for option in row.options:
            value = given.get(option, getattr(config, option))
            of_preset = row.by_preset and value != defaults[option]
            if option in given or of_preset:
                whose = "" if option in given else f" of {config.policy}"
                why = f", {row.why}" if row.why else ""
                raise ValueError(
                    f"{_given(option, value)}{whose} has no effect with "
                    f"{_given(row.other, getattr(config, row.other))}{why}: drop it, "
                    f"or use {row.use}"
                )


def have_method(
    method: Method, forms: Collection[str], capabilities: Collection[Capability]
) -> bool:
    """Whether kernels have a method, by their `FORMS` and `CAPABILITIES`."""
    own_prompts = fused_prompt_form_of(method) is None
    return fused_form_of(method) in forms and (
        not own_prompts or Capability.PROMPT in capabilities
    )


def check_kernels(
    config: H2OConfig,
    forms: Collection[str],
    capabilities: Collection[Capability],
    lacking: str,
) -> None:
    """Raise ValueError where kernels lack what a policy needs.

    Args:
        config: The policy.
        forms: The kernels' `FORMS`.
        capabilities: Their `CAPABILITIES`.
        lacking: What the message says of an option that they lack.
    """
    if Capability.TORCH in capabilities:
        return
    if not have_method(config.method, forms, capabilities):
        one = f"one of {', '.join(sorted(forms))}"
        raise ValueError(f"{_given('score', config.score)} {lacking}, or use {one}")
    asked = [row for row in KERNELS if row.when.hold(getattr(config, row.option))]
    own_prompts = fused_prompt_form_of(config.method) is None
    if own_prompts and Capability.PROMPT_CHUNKS not in capabilities:
        capabilities = {*capabilities} - {Capability.CHUNKS}
    together = {row.capability for row in asked} >= ONE_AT_A_TIME
    # First what has no kernel in any case.
    for row in sorted(asked, key=lambda row: row.capability in capabilities):
        lacks = row.capability not in capabilities
        if lacks or (together and row.capability in ONE_AT_A_TIME):
            with_ = "" if lacks else " beside h2o_merge (--h2o-merge)"
            if own_prompts and row.capability is Capability.CHUNKS:
                with_ = f" beside {_given('score', config.score)}"
            raise ValueError(
                f"{_given(row.option, getattr(config, row.option))}{with_} {lacking}, "
                f"or use h2o_{row.option}={shown(row.off)}"
            )


def _given(option: str, value: Any) -> str:
    return f"h2o_{option}={shown(value)} ({flag(option)})"
