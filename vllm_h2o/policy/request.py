"""What one request may ask for, other than the engine's policy."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from vllm_h2o.policy.config import ATTENTION, H2OConfig
from vllm_h2o.policy.options import parse_window
from vllm_h2o.policy.presets import FULL

KEY = "h2o"
"""Of a request's `extra_args`, with a dictionary; also, with `_`, what the names of
single options begin with, where a client can only send single values."""


@dataclass(frozen=True)
class RequestOptions:
    """Wishes of one request; what is None is as the engine's policy has it.

    Attributes:
        policy: `"full"`: nothing of this request is ever evicted. Or the name of the
            engine's policy.
        observation_window: How many of its last prompt queries score its prompt, see
            `H2OConfig.observation_window`.
    """

    policy: str | None = None
    observation_window: int | str | None = None

    @property
    def is_full(self) -> bool:
        """Whether the request keeps all of its tokens."""
        return self.policy == FULL

    @classmethod
    def parse(
        cls, extra_args: Mapping[str, Any] | None, config: H2OConfig
    ) -> RequestOptions:
        """Read the options of a request.

        Args:
            extra_args: Of its sampling parameters: `{"h2o": {"policy": "full"}}`, or
                `{"h2o_policy": "full"}`. What does not concern H2O is left alone.
            config: The engine's policy.

        Raises:
            ValueError: An option is unknown, has a bad value or no effect; the message
                names the option, the value and what to do.
        """
        given = _given(extra_args or {})
        known = [field.name for field in fields(cls)]
        for name, value in given.items():
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                fix = " or ".join(f"{KEY}_{option}" for option in close or known)
                raise _bad(name, value, f"there is no such option, use {fix}")
        options = cls(**{n: v for n, v in given.items() if v is not None})
        options._check_policy(config)
        window = options._parsed_window(config)
        return cls(options.policy, window)

    def _check_policy(self, config: H2OConfig) -> None:
        if self.policy not in (None, FULL, config.policy):
            fix = f"use {FULL!r} to keep all tokens, or {config.policy!r}, the engine's"
            raise _bad("policy", self.policy, fix)

    def _parsed_window(self, config: H2OConfig) -> int | str | None:
        window = self.observation_window
        if window is None:
            return None
        try:
            parsed = parse_window(window)
        except ValueError:
            fix = "use a number of prompt queries such as 32, a share such as '20%', "
            raise _bad("observation_window", window, fix + "or 'all'") from None
        why = ""
        if self.is_full:
            why = f"{KEY}_policy={FULL!r} keeps all tokens"
        elif not config.keeps_heavy_set:
            why = f"the engine's policy {config.policy!r} keeps recent ones only"
        elif config.prompt_score != ATTENTION:
            why = (
                "it needs an engine that was started with --h2o-prompt-score "
                "attention, or with an option that rules the gate out"
            )
        if why:
            raise _bad(
                "observation_window",
                window,
                f"it has no effect, as {why}: leave it out",
            )
        return parsed


DEFAULTS = RequestOptions()
"""Of a request that asks for nothing."""


def _given(extra_args: Mapping[str, Any]) -> dict[str, Any]:
    """The options by name, of either spelling."""
    together = extra_args.get(KEY)
    if together is None:
        together = {}
    if not isinstance(together, Mapping):
        fix = f'use a dictionary such as {{"policy": "full"}}, or {KEY}_policy'
        raise ValueError(f"{KEY} of this request is {_shown(together)}: {fix}")
    given = {str(name): value for name, value in together.items()}
    for name, value in extra_args.items():
        if not isinstance(name, str) or not name.startswith(KEY + "_"):
            continue
        option = name.removeprefix(KEY + "_")
        if option in given:
            other = f"{KEY}: {{{option!r}: {_shown(given[option])}}}"
            raise _bad(option, value, f"{other} was given too, drop one of them")
        given[option] = value
    return given


def _bad(option: str, value: Any, fix: str) -> ValueError:
    name = _shown(f"{KEY}_{option}").strip("'")
    return ValueError(f"{name} of this request is {_shown(value)}: {fix}")


def _shown(value: Any) -> str:
    """As Python writes it; not all of it, since errors are logged and sent."""
    shown = repr(value)
    return shown if len(shown) <= 100 else shown[:97] + "..."
