"""What a user asks for: one frozen dataclass, and its validation."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from vllm_h2o.policy.methods import METHODS, Method, summaries
from vllm_h2o.policy.options import (
    ATTENTION,
    AUTO,
    BLOCK,
    CACHE,
    GATE,
    INT8,
    KEEPS,
    MODEL,
    MOST_TOKENS,
    NONE,
    READ_ALL,
    TEXT,
    TOKEN,
    bad,
    check_choice,
    check_int,
    check_number,
    option,
    parse_budget,
    parse_read,
    parse_window,
    share_of,
)
from vllm_h2o.policy.rules import broken_need, check_needs

MOST_SLOTS_PER_TOKEN = 2.0
"""A share of the memory is at most so many times as much of the tokens: of float32 int8
would hold nearly four times as many, which nobody who says 20 % means."""
MOST_OF_TOKENS = 0.75
"""A share of the memory, if it is not more itself, is at most so much of the tokens: a
request that can hold all of its tokens is not compressed, so that it takes as much
memory as without H2O."""
MOST_POOLING = 1023
"""`pooling`: wider spans are of no use, and cost time at each prompt's end."""
MOST_SECONDS = 1e9
"""`keep_seconds`."""
LEAST_GIB, MOST_GIB = 2**-10, 2**20
"""`keep_size`."""
_UNITS = (TOKEN, BLOCK)
_MERGES = (NONE, "value")
_PROMPT_SCORES = (AUTO, ATTENTION, GATE)
_RESIDENT_DTYPES = (AUTO, MODEL, INT8)
_POSITIONS = (TEXT, CACHE)


@dataclass(frozen=True)
class H2OConfig:
    """A KV eviction policy, fully resolved; `PRESETS` has those with a name.

    The defaults are the policy `h2o`.

    Attributes:
        policy: Name of the preset that the values started from.
        budget: Token slots per request, an `int`, or a percentage such as `"20%"` of
            the memory that the request takes in vLLM's cache
            (`vllm_h2o.policy.ladder`). Rounded up to whole blocks.
        min_budget: Token slots of a request at least, where the budget is a percentage.
        prefill_chunk: Tokens of a prompt that are read at once, beside what is held of
            those before them (`vllm_h2o.policy.chunks`); 0: prompts are read whole.
        keep: `"end"`: what a compressed request holds when it ends stays in the pool
            until its blocks are needed, and later requests that begin with its tokens
            may go on from there; `"prompt"`: what it holds when its prompt has been
            read; `"none"`.
        keep_folder: A folder where that is written too, each in files of its own, so
            that it outlives the pool and the engine; empty: none.
        keep_size: GiB of files in this folder at most, of all engines that use it.
        keep_seconds: After which what is kept and has not been used is not gone on from
            any more; 0: however old it is.
        keep_sessions: Sessions (vLLM's `session_id`) of which something is kept in the
            pool at most; 0: any number.
        positions: `"cache"`: keys move up before they are farther back than the model
            was trained for (`vllm_h2o.policy.reach`), so that texts may be longer;
            `"text"`: they stay where they are in the text.
        chosen: What prompts and budgets go by, and why, where the user leaves it open:
            no option, the engine fills it in.
        resident_why: Why they have the type that `"auto"` stands for, likewise.
        slots_per_token: Slots that a token's memory in vLLM's cache holds, from 1 to
            `MOST_SLOTS_PER_TOKEN`: no option, the engine fills it in.
        trained_length: Tokens of the longest text that the model was trained for, where
            keys move up: no option, the engine fills it in.
        recent_ratio: Share of the budget that the recent window takes, rounded
            to whole blocks, at least one for either part. 1.0: no heavy set,
            only sinks and recent tokens.
        sinks: First prompt tokens that are never evicted. A softmax puts what it has
            no use for on them (StreamingLLM, arXiv 2309.17453), in some models half
            of all attention, which no estimate of a token's attention may miss.
        observation_window: How many of the last prompt queries score the prompt, an
            `int`, or a percentage of the prompt such as `"20%"`; `"all"`: every one.
        pooling: Width (odd) of the max-pool over neighbouring prompt positions
            when the prompt is compressed; 1: none.
        score: What tokens are compared by: the name of one of `METHODS`.
        prompt_score: `"attention"` of the observation window, with `pooling`;
            `"gate"`: what `vllm_h2o.policy.gate` expects; `"auto"`: the latter where
            the head profile that the worker finds has a gate, unless attention has
            lost less on texts that were left out (`vllm_h2o.policy.trials`).
        score_decay: What an old score is multiplied by per new query.
        read: Percentage of the heavy set's pages that the query of a generated token
            reads beside sinks and recent tokens, as `"20%"`. A request that is kept
            whole reads all.
        merge: `"value"`: what is dropped is averaged into the value of what is kept
            and has the most similar key (`vllm_h2o.policy.merging`); `"none"`.
        resident_dtype: `"int8"`: keys and values of compressed requests are rounded to
            8 bits (`vllm_h2o.policy.quantization`), nearly twice as many tokens in the
            same memory; `"model"`: they have the model's type; `"auto"`: see
            `vllm_h2o.policy.resident_dtype`.
        eviction_unit: `"token"` or `"block"`.
        head_budgets: `"uniform"`, the file of a head profile
            (`vllm_h2o.policy.profile`), `"auto"`: the profile in the model's
            folder, else one that an engine has measured, now or before,
            `"measure"`: what the engine measures now, or `"request"`: each request's
            own, by the score at the end of its prompt.

    Raises:
        ValueError: A value is out of range; the message names the option, the
            value and what to do.
    """

    policy: str = "h2o"
    budget: int | str = option(
        "20%",
        "Token slots per request, rounded up to whole blocks, or a percentage such as "
        "20% of the memory that the request would take without H2O.",
        parse_budget,
    )
    min_budget: int = option(
        256, "Token slots per request at least, where the budget is a percentage.", int
    )
    prefill_chunk: int = option(
        0,
        "Tokens of a prompt that are read at once: of a longer one each chunk is read "
        "beside what is held of those before it, so that it takes no more memory than "
        "a chunk and a budget; 0: prompts are read whole.",
        int,
    )
    keep: str = option(
        NONE,
        "What stays of a compressed request, until its blocks are needed: nothing, or "
        "what it holds at its end, or when its prompt has been read, so that a request "
        "that asks for it (h2o_continue) and begins with these tokens goes on there.",
        choices=KEEPS,
    )
    keep_folder: str = option(
        "",
        "A folder where what stays is written too, so that it outlives the pool: in "
        "/dev/shm it is host memory, on a disk it outlives the engine. Private to the "
        "user who runs it.",
    )
    keep_size: float = option(
        16.0,
        "GiB of files in that folder at most, of all engines that use it; what has "
        "not been used for longest goes.",
        float,
    )
    keep_seconds: float = option(
        0.0,
        "Seconds after which what stays and has not been used is of no use any more; "
        "0: however old it is.",
        float,
    )
    keep_sessions: int = option(
        0,
        "Sessions (session_id, X-Session-ID) of which something stays in the pool at "
        "most, of the others first goes what has not been used for longest; 0: any "
        "number.",
        int,
    )
    positions: str = option(
        TEXT,
        "Where keys are: in the text, or, with cache, never farther back than the "
        "model was trained for, so that --max-model-len may be more.",
        choices=_POSITIONS,
    )
    recent_ratio: float = option(
        0.35,
        "Share of the budget for the most recent tokens, 0 to 1, in whole blocks.",
        float,
    )
    sinks: int = option(4, "First tokens that are never evicted, in tokens.", int)
    observation_window: int | str = option(
        32,
        "How many of the last prompt queries score the prompt, in tokens, a percentage "
        "of the prompt such as 20%, or all.",
        parse_window,
    )
    pooling: int = option(
        15,
        "Width of the max-pool over prompt positions, odd, in tokens; 1: none.",
        int,
    )
    score: str = option(
        "mean", f"What tokens are compared by: {summaries()}.", choices=METHODS
    )
    prompt_score: str = option(
        AUTO,
        "What a prompt's tokens are compared by: the attention of its last queries, or "
        "what a gate expects of their keys and values; auto: what has lost less when "
        "the model was measured.",
        choices=_PROMPT_SCORES,
    )
    score_decay: float = option(
        1.0, "Factor on old scores per new query, 0 to 1.", float
    )
    read: str = option(
        READ_ALL,
        "Share of the pages of the heavy set that a generated token's query reads: "
        "those whose keys may suit it best, in per cent.",
        parse_read,
    )
    merge: str = option(
        NONE,
        "What becomes of a token that is dropped: nothing, or its value goes into that "
        "of the kept token with the most similar key.",
        choices=_MERGES,
    )
    resident_dtype: str = option(
        AUTO,
        "Type of the keys and values that a compressed request holds: the model's, or "
        "int8, half the memory of a token; auto: int8 where it is known to pay.",
        choices=_RESIDENT_DTYPES,
    )
    eviction_unit: str = option(
        TOKEN, "Whether tokens or whole blocks compete.", choices=_UNITS
    )
    head_budgets: str = option(
        AUTO,
        "Share the budget among KV heads: 'uniform', the file of a profile (python "
        "-m vllm_h2o.calibrate), 'auto': the profile in the model's folder, else what "
        "an engine has measured of the model at its first start, unless equal budgets "
        "have lost less there, 'measure': what "
        "this one measures anew, or 'request': each request's own, which the scores "
        "cake and d2o read off its prompt.",
    )
    resident_why: str = ""
    slots_per_token: float = 1.0
    trained_length: int = 0
    chosen: str = ""

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "budget", parse_budget(self.budget))
        set_(self, "observation_window", parse_window(self.observation_window))
        set_(self, "read", parse_read(self.read))
        check_number("recent_ratio", self.recent_ratio, 0.0, 1.0)
        check_number("score_decay", self.score_decay, 0.0, 1.0)
        check_int("sinks", self.sinks, 0, MOST_TOKENS)
        check_int("pooling", self.pooling, 1, MOST_POOLING)
        if self.pooling % 2 == 0:
            raise bad("pooling", self.pooling, "use an odd width, 1 for none")
        check_int("min_budget", self.min_budget, 1, MOST_TOKENS)
        check_int("prefill_chunk", self.prefill_chunk, 0, MOST_TOKENS)
        check_choice("score", self.score, tuple(METHODS))
        check_choice("prompt_score", self.prompt_score, _PROMPT_SCORES)
        check_choice("eviction_unit", self.eviction_unit, _UNITS)
        check_choice("merge", self.merge, _MERGES)
        check_choice("resident_dtype", self.resident_dtype, _RESIDENT_DTYPES)
        check_choice("keep", self.keep, KEEPS)
        if not isinstance(self.keep_folder, str):
            raise bad("keep_folder", self.keep_folder, "use the path of a folder")
        check_number("keep_seconds", self.keep_seconds, 0.0, MOST_SECONDS)
        check_int("keep_sessions", self.keep_sessions, 0, MOST_TOKENS)
        check_number("keep_size", self.keep_size, LEAST_GIB, MOST_GIB)
        check_choice("positions", self.positions, _POSITIONS)
        if not isinstance(self.head_budgets, str) or not self.head_budgets:
            fix = (
                "use 'uniform', 'auto', 'measure', 'request' or the file of a head "
                "profile"
            )
            raise bad("head_budgets", self.head_budgets, fix)
        check_needs(self)

    @property
    def method(self) -> Method:
        """What tokens are compared by, with the options of it that are given here."""
        cls = METHODS[self.score]
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{n: getattr(self, n) for n in names if hasattr(self, n)})

    @property
    def gated(self) -> bool:
        """Whether a prompt's tokens are compared by what the gate expects."""
        return self.prompt_score == GATE

    @property
    def prompt_pooling(self) -> int:
        """Width of the max-pool over a prompt's positions; 1: none."""
        return 1 if self.gated else self.pooling

    @property
    def may_be_gated(self) -> bool:
        """Whether nothing else that is asked for is in the gate's way."""
        return broken_need(self, prompt_score=GATE) is None

    @property
    def quantizes(self) -> bool:
        """Whether what compressed requests hold is rounded to int8."""
        return self.resident_dtype == INT8

    @property
    def keeps(self) -> bool:
        """Whether something stays of a request that has ended."""
        return self.keep != NONE

    @property
    def reads_on(self) -> bool:
        """Whether tokens may be read beside what is held of those before them."""
        return self.prefill_chunk > 0 or self.keeps

    @property
    def moves_keys(self) -> bool:
        """Whether keys move up, so that texts may be longer than what the model was
        trained for."""
        return self.positions == CACHE

    @property
    def reads_part(self) -> bool:
        """Whether a generated token's query reads a part of the held pages only."""
        return share_of(self.read) < 1.0

    @property
    def merges(self) -> bool:
        """Whether what is dropped goes into what is kept."""
        return self.merge != NONE

    @property
    def keeps_heavy_set(self) -> bool:
        """Whether any slot is won by score."""
        return self.recent_ratio < 1.0

    @property
    def may_differ_by_head(self) -> bool:
        """Whether heads may have budgets of their own: tokens compete by score."""
        return self.keeps_heavy_set and self.eviction_unit == TOKEN

    @property
    def share(self) -> float | None:
        """Of its tokens that a request keeps; None: the budget is a number."""
        if isinstance(self.budget, int):
            return None
        return self.share_of_tokens(self.budget)

    def share_of_tokens(self, percentage: str) -> float:
        """Of its tokens that a request keeps, by its share of the memory."""
        share = share_of(percentage)
        return min(share * self.slots_per_token, max(share, MOST_OF_TOKENS))

    def budget_tokens(self, max_model_len: int) -> int:
        """Token slots asked for the longest request, before rounding up to blocks."""
        if isinstance(self.budget, int):
            return self.budget
        return max(1, self.tokens_of(self.budget, max_model_len))

    def tokens_of(self, percentage: str, count: int) -> int:
        """Of `count` tokens those that are kept, by the share of the memory."""
        # A product of floats that should be whole may be more by its last digit.
        return math.ceil(round(count * self.share_of_tokens(percentage), 6))
