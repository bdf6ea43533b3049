"""What one request may ask for, other than the engine's policy."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from vllm_h2o.policy.chunks import chunk_tokens
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.ladder import Climb, Ladder, length_class
from vllm_h2o.policy.layout import SlotLayout
from vllm_h2o.policy.options import (
    ATTENTION,
    CACHE,
    END,
    KEEPS,
    MOST_TOKENS,
    NONE,
    PROMPT,
    parse_budget,
    parse_window,
    share_of,
    shown,
)
from vllm_h2o.policy.presets import FULL
from vllm_h2o.policy.reach import Reach

KEY = "h2o"
"""The name of a dictionary of options in a request's `extra_args`; also, with `_`, what
the names of single options begin with, where a client can only send single values."""


@dataclass(frozen=True)
class RequestLimits:
    """What the requests of an engine may ask for.

    Attributes:
        config: The engine's policy.
        layout: The slots of a request that asks for no budget: none has more.
        ladder: The budgets of requests that ask for none.
        why_one_budget: Why all requests have the same budget; empty: they may differ.
        rounds: Whether a number that a request asks for is rounded up to a budget of
            the ladder: where the kernels read tables that are made once.
        most_chunk: Tokens of a chunk that there is memory for; 0: any.
    """

    config: H2OConfig
    layout: SlotLayout
    ladder: Ladder
    why_one_budget: str = ""
    rounds: bool = False
    most_chunk: int = 0

    @classmethod
    def of(
        cls, config: H2OConfig, layout: SlotLayout, device: str, max_model_len: int
    ) -> RequestLimits:
        """The limits of an engine.

        Args:
            config: The policy.
            layout: The slots of the longest request.
            device: Torch's name of its kind.
            max_model_len: Tokens of the longest request.
        """
        why, size = "", layout.block_size
        if layout.whole_blocks:
            why = "the engine was started with --h2o-eviction-unit block"
        share = config.share
        if share is None or why or layout.budget >= max_model_len:
            ladder = Ladder.of_number(layout.budget_blocks, size, max_model_len)
            if config.gated and layout.budget >= max_model_len:
                why = why or "the engine holds all, and has no gate to choose by"
            elif device != "cpu" and not why:
                why = (
                    f"on {device} they differ only where --h2o-budget is a share that "
                    "does not hold the longest request"
                )
        else:
            fewest = SlotLayout.fewest_of_request(config, size)
            least = max(config.min_budget, size * fewest)
            ladder = Ladder.of_share(
                share, least, layout.budget_blocks, size, max_model_len
            )
            if device != "cpu" and len(ladder.budgets) == 1:
                why = (
                    f"on {device} they differ only where --h2o-budget has smaller ones "
                    "for shorter requests (--max-model-len, --h2o-min-budget)"
                )
        # A turn that goes on may be as long as any request: there is memory for that.
        counts = device != "cpu" and not config.keeps
        most_chunk = 0
        if counts:
            asked, held = config.prefill_chunk, config.slots_per_token
            most_chunk = chunk_tokens(asked, layout.budget, size, held)
        rounds = device != "cpu" and not why
        return cls(config, layout, ladder, why, rounds, most_chunk)

    @property
    def has_several(self) -> bool:
        """Whether the budgets of two requests can differ."""
        return not self.why_one_budget

    @property
    def are_known(self) -> bool:
        """Whether all budgets that requests can have are the ladder's."""
        return self.rounds or not self.has_several

    @cached_property
    def most_at_once(self) -> int:
        """Tokens of a prompt that a request may ask to read at once; 0: any."""
        size = self.layout.block_size
        reach = Reach.of_config(self.config, self.layout.budget, size)
        return 0 if reach is None else reach.chunk

    @cached_property
    def fewest_blocks(self) -> int:
        """Blocks of a request at least."""
        return SlotLayout.fewest_of_request(self.config, self.layout.block_size)

    def climb(
        self, asked: int | str | None, num_tokens: int, most_tokens: int
    ) -> Climb:
        """The budget that a request begins with: at most the engine's; and what next.

        Args:
            asked: Tokens, or `"N%"`; None: as the engine has it.
            num_tokens: Of what it reads.
            most_tokens: That the request can have at its end.
        """
        size, most = self.layout.block_size, self.layout.budget_blocks
        # A ladder of one budget has none for the smaller share of a request's own.
        own = isinstance(asked, str) and len(self.ladder.budgets) == 1
        if self.ladder.share is not None and not isinstance(asked, int) and not own:
            share = None if asked is None else self.config.share_of_tokens(asked)
            step = self.ladder.enters(num_tokens, most_tokens, share)
            return Climb(self.ladder, step, share)
        longest = self.ladder.lengths[-1]
        if asked is None:
            mine = length_class(self.layout.budget, longest, num_tokens, most_tokens)
            return Climb(self.ladder, length_class=mine)
        tokens = self.tokens_of(asked, most_tokens)
        blocks = min(max(-(-tokens // size), self.fewest_blocks), most)
        if self.rounds:
            blocks = next(each for each in self.ladder.budgets if each >= blocks)
            ladder = Ladder.of_number(blocks, size, most_tokens)
            return Climb(ladder, is_fixed=True)
        mine = length_class(blocks * size, longest, num_tokens, most_tokens)
        ladder = Ladder.of_number(blocks, size, most_tokens)
        return Climb(ladder, is_fixed=True, length_class=mine)

    def tokens_of(self, asked: int | str, most_tokens: int) -> int:
        """Slots that a request asks for, in tokens or as a share of its memory."""
        if isinstance(asked, int):
            return asked
        return self.config.tokens_of(asked, most_tokens)


@dataclass(frozen=True)
class RequestOptions:
    """Wishes of one request; what is None is as the engine's policy has it.

    Attributes:
        policy: `"full"`: nothing of this request is ever evicted. Or the name of the
            engine's policy.
        budget: Token slots, or `"N%"` of the memory of its prompt and `max_tokens` in
            vLLM's cache; rounded up to whole blocks.
        observation_window: How many of its last prompt queries score its prompt, see
            `H2OConfig.observation_window`.
        prefill_chunk: Tokens of its prompt that are read at once, see
            `H2OConfig.prefill_chunk`; 0: it is read whole.
        keep: What stays of it when it has ended, see `H2OConfig.keep`.
        continue_: Whether it goes on from what has stayed of a request that it begins
            with the tokens of: these are not read again. None: it does so if it has
            the name of a session, from what has stayed of that session's requests.
        report: Whether its answer comes with what it got.
    """

    policy: str | None = None
    budget: int | str | None = None
    observation_window: int | str | None = None
    prefill_chunk: int | None = None
    keep: str | None = None
    continue_: bool | None = None
    report: bool = False

    @property
    def is_full(self) -> bool:
        """Whether the request keeps all of its tokens."""
        return self.policy == FULL

    def chunk(self, config: H2OConfig) -> int:
        """Tokens of its prompt that are read at once; 0: all."""
        asked = self.prefill_chunk
        return config.prefill_chunk if asked is None else asked

    def kept(self, config: H2OConfig) -> str:
        """What stays of it, see `H2OConfig.keep`."""
        if self.is_full:
            return NONE
        return config.keep if self.keep is None else self.keep

    @property
    def asks_to_be_kept(self) -> bool:
        """Whether the request itself says that something of it stays: then it is
        compressed even if it ends with its first token."""
        return self.keep in (END, PROMPT)

    @classmethod
    def parse(
        cls,
        extra_args: Mapping[str, Any] | None,
        limits: RequestLimits,
        most_tokens: int,
    ) -> RequestOptions:
        """Read the options of a request.

        Args:
            extra_args: Of its sampling parameters: `{"h2o": {"policy": "full"}}`, or
                `{"h2o_policy": "full"}`. What does not concern H2O is left alone.
            limits: Of the engine.
            most_tokens: That the request can have at its end: prompt and `max_tokens`.

        Raises:
            ValueError: An option is unknown, has a bad value or no effect; the message
                names the option, the value and what to do.
        """
        given = _given(extra_args or {})
        known = {field.name.rstrip("_"): field.name for field in fields(cls)}
        for name, value in given.items():
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                fix = " or ".join(f"{KEY}_{option}" for option in close or known)
                raise _bad(name, value, f"there is no such option, use {fix}")
        options = cls(**{known[n]: v for n, v in given.items() if v is not None})
        options._check_policy(limits.config)
        budget = options._parsed_budget(limits, most_tokens)
        window = options._parsed_window(limits.config)
        chunk = options._parsed_chunk(limits)
        return cls(
            options.policy,
            budget,
            window,
            chunk,
            options._parsed_keep(limits.config),
            options._parsed_continue(limits.config),
            _parsed_bool("report", options.report),
        )

    def check_length(self, config: H2OConfig, most_tokens: int) -> None:
        """Raise ValueError if a request keeps more than the model was trained for.

        Args:
            config: The engine's policy.
            most_tokens: That the request, or a session's turns together, can have.
        """
        trained = config.trained_length
        if self.is_full and config.moves_keys and most_tokens > trained:
            why = f"the model was trained for {trained} tokens, and this, or all turns "
            why += f"of this session, may have {most_tokens}: use a shorter prompt or "
            raise _bad("policy", self.policy, why + "max_tokens, or leave it out")

    def _check_policy(self, config: H2OConfig) -> None:
        if self.policy not in (None, FULL, config.policy):
            fix = f"use {FULL!r} to keep all tokens, or {config.policy!r}, the engine's"
            raise _bad("policy", self.policy, fix)

    def _parsed_budget(
        self, limits: RequestLimits, most_tokens: int
    ) -> int | str | None:
        asked: Any = self.budget
        if asked is None:
            return None
        if isinstance(asked, float) and asked.is_integer():
            asked = int(asked)  # as some clients write numbers
        try:
            parsed = parse_budget(asked)
        except ValueError:
            fix = "use a number of token slots such as 512, or a share of the request "
            raise _bad("budget", asked, fix + "such as '20%'") from None
        if self.is_full:
            why = f"as {KEY}_policy={FULL!r} keeps all tokens"
            raise _bad("budget", asked, f"it has no effect, {why}: leave it out")
        if limits.why_one_budget:
            why = limits.why_one_budget
            raise _bad("budget", asked, f"all have the engine's, {why}: leave it out")
        most, size = limits.layout.budget, limits.layout.block_size
        share = isinstance(parsed, str)
        engines = limits.ladder.share
        config = limits.config
        if isinstance(parsed, str) and engines is not None:
            if share_of(parsed) > share_of(str(config.budget)):
                fix = f"more than the engine's (--h2o-budget), use '{config.budget}'"
                raise _bad("budget", asked, f"{fix} or less")
            return parsed
        tokens = limits.tokens_of(parsed, most_tokens)
        if tokens > most:
            of = f"{tokens} of its {most_tokens} tokens, " if share else ""
            fix = f"{of}more than the engine's (--h2o-budget), use {most} or less"
            raise _bad("budget", asked, fix)
        fewest = limits.fewest_blocks
        if tokens <= (fewest - 1) * size and not share:
            fix = f"use {(fewest - 1) * size + 1} or more"
            raise _bad("budget", asked, f"less than {fewest} blocks of {size}, {fix}")
        return parsed

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

    def _parsed_chunk(self, limits: RequestLimits) -> int | None:
        asked: Any = self.prefill_chunk
        config, most = limits.config, limits.most_at_once
        if asked is None:
            return None
        try:
            parsed = int(asked)
            whole = float(asked) == parsed and not isinstance(asked, bool)
        except (ValueError, TypeError, OverflowError):
            parsed, whole = -1, False
        if not whole or not 0 <= parsed <= MOST_TOKENS:
            fix = "use a number of prompt tokens such as 2048, 0 to read it whole"
            raise _bad("prefill_chunk", asked, fix)
        why = ""
        if self.is_full:
            why = f"{KEY}_policy={FULL!r} keeps all tokens"
        elif not config.prefill_chunk:
            why = "it needs an engine that was started with --h2o-prefill-chunk"
        if why:
            fix = f"it has no effect, as {why}: leave it out"
            raise _bad("prefill_chunk", asked, fix)
        if most and not 0 < parsed <= most:
            fix = f"use 1 to {most}, as keys move up (--h2o-positions {CACHE})"
            raise _bad("prefill_chunk", asked, fix)
        if (most := limits.most_chunk) and parsed > most:
            fix = f"use at most {most}, which the server has memory for, or 0"
            raise _bad("prefill_chunk", asked, f"{fix} (--h2o-prefill-chunk)")
        return parsed

    def _parsed_keep(self, config: H2OConfig) -> str | None:
        if self.keep is None:
            return None
        if self.keep not in KEEPS:
            raise _bad("keep", self.keep, f"use {END!r}, {PROMPT!r} or {NONE!r}")
        self._check_keeps("keep", self.keep, config)
        return self.keep

    def _parsed_continue(self, config: H2OConfig) -> bool | None:
        if self.continue_ is None:
            return None
        parsed = _parsed_bool("continue", self.continue_)
        if parsed:
            self._check_keeps("continue", self.continue_, config)
        return parsed

    def _check_keeps(self, option: str, value: Any, config: H2OConfig) -> None:
        why = ""
        if self.is_full:
            why = f"{KEY}_policy={FULL!r} keeps all tokens in vLLM's prefix cache"
        elif not config.keeps:
            why = (
                f"it needs an engine that was started with --h2o-keep {END} or {PROMPT}"
            )
        if why:
            raise _bad(option, value, f"it has no effect, as {why}: leave it out")


def asks_anything(extra_args: Mapping[str, Any] | None) -> bool:
    """Whether something in a request's `extra_args` is meant for H2O."""
    names = (name for name in extra_args or () if isinstance(name, str))
    return any(name.startswith(KEY) for name in names)


DEFAULTS = RequestOptions()
"""The options of a request that asks for nothing."""


def _given(extra_args: Mapping[str, Any]) -> dict[str, Any]:
    """The options by name, of either spelling."""
    together = extra_args.get(KEY)
    if together is None:
        together = {}
    if not isinstance(together, Mapping):
        fix = f'use a dictionary such as {{"policy": "full"}}, or {KEY}_policy'
        raise ValueError(f"{KEY} of this request is {shown(together)}: {fix}")
    given = {
        name if isinstance(name, str) else shown(name): value
        for name, value in together.items()
    }
    for name, value in extra_args.items():
        if not isinstance(name, str) or not name.startswith(KEY + "_"):
            continue
        option = name.removeprefix(KEY + "_")
        if option in given:
            other = f"{KEY}: {{{shown(option)}: {shown(given[option])}}}"
            raise _bad(option, value, f"{other} was given too, drop one of them")
        given[option] = value
    return given


def _parsed_bool(option: str, given: Any) -> bool:
    # Where only numbers and strings can be sent, true is 1.
    said = {"true": True, "1": True, "1.0": True}
    said |= {"false": False, "0": False, "0.0": False}
    parsed = said.get((given if isinstance(given, str) else shown(given)).lower())
    if parsed is None:
        raise _bad(option, given, "use true or false")
    return parsed


def _bad(option: str, value: Any, fix: str) -> ValueError:
    name = shown(f"{KEY}_{option}").strip("'")
    return ValueError(f"{name} of this request is {shown(value)}: {fix}")
