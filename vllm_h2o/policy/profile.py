"""Uneven budgets: how much each KV head loses at which budget, and who gets what.

A few KV heads need far more of the past than the others. A profile, measured once
per model (`python -m vllm_h2o.calibrate`), says how the error of each head's output
falls with its budget; `allocate` spends a request's blocks where the error falls
most. The total stays what the scheduler counts.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_h2o.policy.files import write_whole
from vllm_h2o.policy.options import shortened, shown
from vllm_h2o.policy.trials import Trials

FILE_NAME = "h2o_heads.json"
"""Where a model's folder holds its profile."""

SCARCE_SHARE, MOST_STRETCH = 0.15, 2.0
"""The limits of `HeadProfile.stretched`. Simulated on SmolLM2 and the texts of
`benchmarks/quality`, of the factors tried 1 lost the least at 10 and 15 % of the
context, 1.5 at 20 % and 2 at 30 %; the rule goes between them."""

_MOST_FEATURES = 2**16
_MOST_TOKENS, _MOST_ERROR = 2**31, 1e30
"""Most tokens of a context, and the largest error, that a file may have."""

Curve = npt.NDArray[np.float64]
"""Error of a KV head by its blocks, falling."""


NO_PROFILE = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    RecursionError,
)
"""What files raise that have no profile, or none that is sound."""


@dataclass(frozen=True)
class HeadProfile:
    """Errors of attention outputs under eviction, by layer, KV head and budget.

    Attributes:
        grid_tokens: `[n]` budgets in tokens, ascending.
        errors: `[num_layers, num_kv_heads, n]` squared error of the head's
            contribution to what the layer puts out, relative as
            `vllm_h2o.calibration.sensitivity` says.
        measured_on: What it was measured on, for people.
        context_tokens: Tokens of the texts; 0: the grid ends at 80 % of them, as
            in files that do not say.
        gate: What `gate_in_json` made of the model's gate (`vllm_h2o.policy.gate`);
            None: it has none.
        trials: The fields of `vllm_h2o.policy.trials.Trials`: what the ways to choose
            lost on texts that nothing was learned from; None: none was tried.
    """

    grid_tokens: list[int]
    errors: list[list[list[float]]]
    measured_on: str = ""
    context_tokens: int = 0
    gate: dict[str, Any] | None = None
    trials: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        grid = self.grid_tokens
        if not all(type(n) is int and n >= 0 for n in (*grid, self.context_tokens)):
            raise ValueError("grid_tokens and context_tokens must be counts of tokens")
        if len(grid) < 2 or sorted(set(grid)) != list(grid) or grid[0] < 1:
            raise ValueError(
                f"grid_tokens is {shown(grid)}: use ascending token counts"
            )
        heads = {len(layer) for layer in self.errors}
        if len(heads) != 1 or 0 in heads:
            raise ValueError("errors must have the same number of heads in each layer")
        curves = [curve for layer in self.errors for curve in layer]
        if any(len(curve) != len(grid) for curve in curves):
            raise ValueError("errors must have a value for each of grid_tokens")
        if not all(_is_error(e) for curve in curves for e in curve):
            raise ValueError(
                f"errors must be finite, not negative, and at most {_MOST_ERROR:g}"
            )
        if not self.context_tokens:
            object.__setattr__(self, "context_tokens", round(grid[-1] / 0.8))
        if self.context_tokens < grid[-1]:
            raise ValueError(
                f"context_tokens is {self.context_tokens}: it must not be below the "
                f"last of grid_tokens, {grid[-1]}"
            )
        if self.gate is not None:
            self.gate_weights()
        if self.trials is not None:
            Trials.of_json(self.trials)

    def gate_weights(self) -> npt.NDArray[np.float32]:
        """`[num_layers, num_kv_heads, F]` weights of the gate.

        Raises:
            ValueError: There is none, or it is damaged.
        """
        gate = self.gate or {}
        if {*gate} != {"explained", "features", "weights"}:
            raise ValueError(f"the gate has {sorted(gate)}: measure it again")
        explained, count = gate["explained"], gate["features"]
        if type(count) is not int or not 0 < count <= _MOST_FEATURES:
            raise ValueError(
                f"features of the gate are {shown(count)}: measure it again"
            )
        if not isinstance(explained, (int, float)) or not 0 <= explained <= 1:
            raise ValueError("explained of the gate must be a share of the variance")
        raw = base64.b64decode(gate["weights"], validate=True)
        shape = self.num_layers, self.num_kv_heads, gate["features"]
        weights = np.frombuffer(raw, "<f4").reshape(shape)
        if not weights.size or not np.isfinite(weights).all():
            raise ValueError("weights of the gate must be finite numbers")
        return weights

    @property
    def num_layers(self) -> int:
        """Attention layers that evict."""
        return len(self.errors)

    @property
    def num_kv_heads(self) -> int:
        """KV heads of a layer, of all tensor-parallel ranks together."""
        return len(self.errors[0])

    @classmethod
    def of_json(cls, content: Any) -> HeadProfile:
        """Make a profile of what a file says.

        Args:
            content: The fields by name, of JSON.

        Raises:
            ValueError, TypeError, LookupError, ArithmeticError: It is no profile, or
                has numbers that none has.
        """
        profile = cls(**content)
        if profile.context_tokens > _MOST_TOKENS:
            raise ValueError(f"grid_tokens has more than {_MOST_TOKENS} tokens")
        if not isinstance(profile.measured_on, str):
            raise ValueError("measured_on must be a text")
        return profile

    def stretched(self, context_tokens: int, budget_tokens: int) -> HeadProfile:
        """The curves for requests that are longer than the texts were.

        A share of the context is taken to mean the same at every length, and where
        all of it is kept the error to be 0. A budget of more than `SCARCE_SHARE` of
        the context stretches the curves further, in proportion, up to `MOST_STRETCH`
        times: the heads that need most then get more, up to the whole context, since
        their lookups far back barely change the mean error but decide answers.

        Args:
            context_tokens: Of the longest request.
            budget_tokens: Of a head on average.
        """
        ample = budget_tokens / context_tokens / SCARCE_SHARE
        factor = max(1.0, context_tokens / self.context_tokens)
        factor *= min(max(1.0, ample), MOST_STRETCH)
        grid = [round(tokens * factor) for tokens in self.grid_tokens]
        whole = round(self.context_tokens * factor)
        errors = self.errors
        if grid[-1] < whole:
            grid.append(whole)
            errors = [[[*curve, 0.0] for curve in layer] for layer in errors]
        return replace(self, grid_tokens=grid, errors=errors, context_tokens=whole)

    @classmethod
    def load(cls, path: Path) -> HeadProfile:
        """Read a profile.

        Raises:
            ValueError: There is none, or it is not one; the message names the
                option, the file and the fix.
        """
        fix = "write one with python -m vllm_h2o.calibrate, or use 'uniform'"
        try:
            return cls.of_json(json.loads(path.read_text("utf-8")))
        except NO_PROFILE as error:
            why = shortened(getattr(error, "strerror", None) or error)
            raise ValueError(
                "h2o_head_budgets (--h2o-head-budgets): "
                f"{shortened(path)} is no head profile ({why}): {fix}"
            ) from error

    def as_json(self) -> str:
        """A line of JSON, which `of_json` takes when it is read."""
        return json.dumps(asdict(self)) + "\n"

    def save(self, path: Path) -> None:
        """Write the profile as JSON: whole, or not at all.

        Raises:
            OSError: The file can not be written.
        """
        write_whole(path, self.as_json())


def _is_error(value: Any) -> bool:
    """Whether a value of a file may be an error; NaN may not."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0.0 <= value <= _MOST_ERROR


def gate_in_json(weights: npt.ArrayLike, explained: float) -> dict[str, Any]:
    """A gate for `HeadProfile.gate`.

    Args:
        weights: `[num_layers, num_kv_heads, F]`.
        explained: R^2 on a text that it did not learn from.
    """
    array = np.asarray(weights, "<f4")
    return {
        "explained": round(explained, 4),
        "features": array.shape[-1],
        "weights": base64.b64encode(array.tobytes()).decode(),
    }


@dataclass(frozen=True)
class Spending:
    """What blocks are spent by, up to a budget.

    Attributes:
        profile: The errors.
        budget_blocks: Blocks of a head on average at its end.
        max_blocks: Blocks of the longest sequence; no head gets more.
        more_blocks: That a head gets at most beyond those that it had before; None: as
            many as it likes.
    """

    profile: HeadProfile
    budget_blocks: int
    max_blocks: int
    more_blocks: int | None = None


def splits(
    stages: Sequence[Spending], block_size: int, fewest_blocks: int
) -> list[npt.NDArray[np.int64]]:
    """Spend `num_layers * budget_blocks` blocks per KV head where errors fall most.

    Heads of the same index in different layers share: so every tensor-parallel
    rank has its own sum, and TP=n gives TP=1's budgets.

    Args:
        stages: One after the other, each from where the one before has come to; their
            budgets and longest sequences ascend.
        block_size: Tokens per block.
        fewest_blocks: No head gets less.

    Returns:
        `[num_layers, num_kv_heads]` blocks at the end of each stage; no head has less
        than in the one before.
    """
    num_layers = stages[0].profile.num_layers
    num_kv_heads = stages[0].profile.num_kv_heads
    given = [[fewest_blocks] * num_layers for _ in range(num_kv_heads)]
    found = []
    for stage in stages:
        profile, most = stage.profile, max(stage.max_blocks, fewest_blocks)
        # Nothing falls any more past what was measured.
        measured = -(-profile.grid_tokens[-1] // block_size)
        end = max(min(most, measured), *map(max, given), fewest_blocks)
        counts = range(fewest_blocks, end + 1)
        total = num_layers * stage.budget_blocks
        for head in range(num_kv_heads):
            curves = [
                _curve(profile.grid_tokens, layer[head], block_size, counts)
                for layer in profile.errors
            ]
            caps = [most] * num_layers
            if stage.more_blocks is not None:
                caps = [min(most, n + stage.more_blocks) for n in given[head]]
            _spend(curves, total, fewest_blocks, caps, given[head])
        found.append(np.array(given).T)
    return found


def allocate(
    profile: HeadProfile,
    block_size: int,
    budget_blocks: int,
    max_blocks: int,
    fewest_blocks: int,
) -> list[list[int]]:
    """`[num_layers][num_kv_heads]` blocks of one budget; see `splits`."""
    spending = Spending(profile, budget_blocks, max_blocks)
    (split,) = splits([spending], block_size, fewest_blocks)
    return split.tolist()


def _curve(
    grid: list[int], errors: list[float], block_size: int, counts: range
) -> Curve:
    """Error at each count of blocks: log-log interpolation, falling."""
    tokens = np.array(counts) * block_size
    known = np.log(np.maximum(np.asarray(errors, float), 1e-12))
    logs = np.interp(np.log(tokens), np.log(np.asarray(grid, float)), known)
    return np.minimum.accumulate(np.exp(logs))


def _spend(
    curves: list[Curve], total: int, fewest: int, most: list[int], given: list[int]
) -> None:
    """Give curves blocks, one after the other: the steepest fall goes first.

    Looking ahead over several blocks is what makes a greedy choice right where a
    curve falls late.

    Args:
        curves: From `fewest` blocks on.
        total: Blocks of all curves together at the end.
        fewest: Where the curves start.
        most: No curve gets more than its own.
        given: Blocks of each curve, updated in place.
    """
    left = total - sum(given)

    def steepest(i: int) -> tuple[float, int]:
        room = min(left, most[i] - given[i])
        return _steepest(curves[i], given[i] - fewest, room)

    falls = [steepest(i) for i in range(len(curves))]
    while left > 0:
        choice = max(range(len(curves)), key=lambda i: falls[i][0])
        fall, step = falls[choice]
        if fall <= 0.0:
            break
        given[choice] += step
        left -= step
        for i in range(len(curves)):
            if i == choice or falls[i][1] > left:
                falls[i] = steepest(i)
    while left > 0:  # what no curve wants: the poorest first
        able = [i for i in range(len(curves)) if given[i] < most[i]]
        if not able:
            break
        poorest = min(able, key=given.__getitem__)
        given[poorest] += 1
        left -= 1


def _steepest(curve: Curve, start: int, most: int) -> tuple[float, int]:
    """The steepest average fall from `start` on, and over how many blocks."""
    errors = curve[start + 1 : start + 1 + most]
    if not len(errors):
        return 0.0, 0
    falls = (curve[start] - errors) / np.arange(1, len(errors) + 1)
    step = int(falls.argmax())
    return float(falls[step]), step + 1
