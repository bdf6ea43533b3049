"""What a user asks for: one frozen dataclass, its presets, its validation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vllm_h2o.policy.methods import METHODS, Method

ALL_QUERIES = "all"
"""`observation_window` value: every prompt query scores (the H2O paper)."""

UNIFORM, AUTO, MEASURE = "uniform", "auto", "measure"
"""`head_budgets` values that are no file."""

_OF_SCORES = ("observation_window", "pooling", "score", "score_decay")
_UNITS = ("token", "block")


@dataclass(frozen=True)
class H2OConfig:
    """A KV eviction policy, fully resolved; `PRESETS` has those with a name.

    The defaults are the policy `h2o`.

    Attributes:
        policy: Name of the preset that the values started from.
        budget: Token slots per request, an `int`, or a percentage of
            max-model-len such as `"20%"`. Rounded up to whole blocks.
        recent_ratio: Share of the budget that the recent window takes, rounded
            to whole blocks, at least one for either part. 1.0: no heavy set,
            only sinks and recent tokens.
        sinks: First prompt tokens that are never evicted. Scores keep them anyway
            (docs/benchmarks/quality.md); what has no scores needs them.
        observation_window: How many of the last prompt queries score the
            prompt; `"all"`: every one.
        pooling: Width (odd) of the max-pool over neighbouring prompt positions
            when the prompt is compressed; 1: none.
        score: What tokens are compared by: the name of one of `METHODS`.
        score_decay: What an old score is multiplied by per new query.
        eviction_unit: `"token"` or `"block"`.
        head_budgets: `"uniform"`, the file of a head profile
            (`vllm_h2o.policy.profile`), `"auto"`: the profile in the model's
            folder, else one that an engine has measured, now or before, or
            `"measure"`: what the engine measures now.

    Raises:
        ValueError: A value is out of range; the message names the option, the
            value and what to do.
    """

    policy: str = "h2o"
    budget: int | str = "20%"
    recent_ratio: float = 0.35
    sinks: int = 0
    observation_window: int | str = 32
    pooling: int = 15
    score: str = "mean"
    score_decay: float = 1.0
    eviction_unit: str = "token"
    head_budgets: str = AUTO

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "budget", parse_budget(self.budget))
        set_(self, "observation_window", parse_window(self.observation_window))
        _check_number("recent_ratio", self.recent_ratio, 0.0, 1.0)
        _check_number("score_decay", self.score_decay, 0.0, 1.0)
        _check_int("sinks", self.sinks, 0)
        _check_int("pooling", self.pooling, 1)
        if self.pooling % 2 == 0:
            raise _bad("pooling", self.pooling, "use an odd width, 1 for none")
        _check_choice("score", self.score, tuple(METHODS))
        _check_choice("eviction_unit", self.eviction_unit, _UNITS)
        if not isinstance(self.head_budgets, str) or not self.head_budgets:
            fix = "use 'uniform', 'auto', 'measure' or the file of a head profile"
            raise _bad("head_budgets", self.head_budgets, fix)
        if self.eviction_unit == "block" and self.head_budgets not in (UNIFORM, AUTO):
            raise ValueError(
                f"h2o_head_budgets={self.head_budgets!r} needs "
                "h2o_eviction_unit='token': with 'block' use h2o_head_budgets='uniform'"
            )
        if self.recent_ratio == 1.0 and self.eviction_unit == "block":
            raise ValueError(
                "h2o_eviction_unit='block' needs a heavy set, but "
                "h2o_recent_ratio=1.0 leaves none: use h2o_eviction_unit='token' "
                "or a smaller h2o_recent_ratio"
            )

    @property
    def method(self) -> Method:
        """What tokens are compared by, with the options of it that are given here."""
        cls = METHODS[self.score]
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{n: getattr(self, n) for n in names if hasattr(self, n)})

    @property
    def keeps_heavy_set(self) -> bool:
        """Whether any slot is won by score."""
        return self.recent_ratio < 1.0

    @property
    def may_differ_by_head(self) -> bool:
        """Whether heads may have budgets of their own: tokens compete by score."""
        return self.keeps_heavy_set and self.eviction_unit == "token"

    def budget_tokens(self, max_model_len: int) -> int:
        """Token slots asked for, before rounding up to blocks."""
        if isinstance(self.budget, int):
            return self.budget
        percent = float(self.budget.rstrip("%"))
        return max(1, -int(-max_model_len * percent // 100))


def parse_budget(value: int | str) -> int | str:
    """Return an `int` number of tokens, or a percentage as `"N%"`."""
    fix = "use a number of token slots such as 512, or a percentage such as '20%'"
    if isinstance(value, bool):
        raise _bad("budget", value, fix)
    if isinstance(value, int):
        if value < 1:
            raise _bad("budget", value, fix)
        return value
    text = str(value).strip()
    try:
        if text.endswith("%"):
            percent = float(text[:-1])
            if not 0.0 < percent <= 100.0:
                raise ValueError
            return f"{percent:g}%"
        tokens = int(text)
        if tokens < 1:
            raise ValueError
        return tokens
    except ValueError:
        raise _bad("budget", value, fix) from None


def parse_window(value: int | str) -> int | str:
    """Return an `int` number of prompt queries, or `"all"`."""
    fix = "use a number of prompt queries such as 32, or 'all'"
    if isinstance(value, bool):
        raise _bad("observation_window", value, fix)
    if isinstance(value, str) and value.strip().lower() == ALL_QUERIES:
        return ALL_QUERIES
    try:
        window = int(value)
    except (TypeError, ValueError, OverflowError):
        raise _bad("observation_window", value, fix) from None
    if window < 1 or float(value) != window:
        raise _bad("observation_window", value, fix)
    return window


def _bad(option: str, value: Any, fix: str, prefix: str = "h2o_") -> ValueError:
    flag = "--" + (prefix + option).replace("_", "-")
    return ValueError(f"{prefix}{option} ({flag}) is {value!r}: {fix}")


def _check_number(option: str, value: Any, low: float, high: float) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not low <= value <= high:
        raise _bad(option, value, f"use a number from {low} to {high}")


def _check_int(option: str, value: Any, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise _bad(option, value, f"use a whole number, {low} or more")


def _check_choice(
    option: str, value: Any, choices: tuple[str, ...], prefix: str = "h2o_"
) -> None:
    if value not in choices:
        raise _bad(option, value, f"use one of {', '.join(choices)}", prefix)


_SUMS = H2OConfig(recent_ratio=0.5, score="sum", head_budgets=UNIFORM)

PRESETS: Mapping[str, H2OConfig] = {
    "h2o": H2OConfig(),
    "h2o-paper": replace(
        _SUMS, policy="h2o-paper", observation_window=ALL_QUERIES, pooling=1
    ),
    "snapkv": replace(_SUMS, policy="snapkv", pooling=7),
    "tova": replace(
        _SUMS,
        policy="tova",
        recent_ratio=0.0,
        observation_window=1,
        pooling=1,
        score_decay=0.0,
    ),
    "streaming": replace(
        _SUMS,
        policy="streaming",
        recent_ratio=1.0,
        sinks=4,
        observation_window=1,
        pooling=1,
    ),
}
"""The policies that evict; `full` is the absence of one."""

FULL = "full"
POLICY_NAMES = (FULL, *PRESETS)

OPTION_NAMES = tuple(
    field.name for field in dataclasses.fields(H2OConfig) if field.name != "policy"
)


def resolve_config(
    policy: str | None, enable_h2o: bool | None, options: Mapping[str, Any]
) -> H2OConfig | None:
    """Merge a policy name and explicit options into a config.

    Args:
        policy: `kv_policy` as given, None when it was not.
        enable_h2o: As given, None when it was not. True means `policy="h2o"`.
        options: Explicit options by field name (no `h2o_` prefix).

    Returns:
        The config, or None when nothing is to be evicted.

    Raises:
        ValueError: Unknown or contradictory options.
    """
    if policy is not None:
        _check_choice("kv_policy", policy, POLICY_NAMES, prefix="")
    if not isinstance(enable_h2o, bool | None):
        raise _bad("enable_h2o", enable_h2o, "use True or False", prefix="")
    unknown = sorted(set(options) - set(OPTION_NAMES))
    if unknown:
        raise ValueError(
            f"unknown H2O option {unknown[0]!r}: use one of {', '.join(OPTION_NAMES)}"
        )
    if enable_h2o is True and policy not in (None, "h2o"):
        raise ValueError(
            f"enable_h2o=True means kv_policy='h2o', but kv_policy={policy!r} "
            "was given too: drop one of them"
        )
    if enable_h2o is False and policy not in (None, FULL):
        raise ValueError(
            f"enable_h2o=False turns eviction off, but kv_policy={policy!r} "
            "turns it on: drop one of them"
        )
    name = "h2o" if enable_h2o else (policy or FULL)
    if name == FULL:
        if options:
            option, value = next(iter(options.items()))
            asked = (
                f"kv_policy={FULL!r}"
                if policy
                else ("enable_h2o=False" if enable_h2o is False else "no kv_policy")
            )
            raise ValueError(
                f"h2o_{option}={value!r} has no effect with {asked}: "
                "add kv_policy='h2o' (--kv-policy h2o) or drop the option"
            )
        return None
    config = replace(PRESETS[name], **options)
    idle = [name for name in _OF_SCORES if name in options]
    if idle and not config.keeps_heavy_set:
        raise ValueError(
            f"h2o_{idle[0]}={options[idle[0]]!r} has no effect with recent_ratio=1.0, "
            "which leaves no slots to win by score: drop it, or use a smaller "
            "h2o_recent_ratio (--h2o-recent-ratio)"
        )
    return config
