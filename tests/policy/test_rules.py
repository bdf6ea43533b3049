"""Options that need each other or idle: each rule by what breaks it, and by its fix."""

from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_h2o.option_table import lines
from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.methods import METHODS, Sum
from vllm_h2o.policy.options import flag
from vllm_h2o.policy.presets import OPTION_NAMES, PRESETS, resolve_config
from vllm_h2o.policy.rules import NEEDS, broken_need, idle_rows

SAMPLES = {
    "recent_ratio": (0.0, 0.3, 1.0),
    "observation_window": (16, "all"),
    "pooling": (1, 7),
    "prompt_score": ("auto", "attention", "gate"),
    "score": tuple(METHODS),
    "score_decay": (1.0, 0.5),
    "read": ("100%", "20%"),
    "merge": ("none", "value"),
    "resident_dtype": ("auto", "model", "int8"),
    "prefill_chunk": (0, 512),
    "keep": ("none", "end", "prompt"),
    "keep_folder": ("", "/dev/shm/h2o"),
    "keep_size": (16.0, 2.0),
    "keep_seconds": (0.0, 60.0),
    "keep_sessions": (0, 2),
    "positions": ("text", "cache"),
    "eviction_unit": ("token", "block"),
    "head_budgets": ("uniform", "auto", "measure", "request", "heads.json"),
}
IDLES = tuple(
    row
    for row in idle_rows(OPTION_NAMES)
    if any(map(row.when.hold, SAMPLES[row.other]))
)
"""But for what all methods have."""
OPTIONS_PAGE = Path(__file__).parents[2] / "docs" / "options.md"


def _changed(config, options):
    """What is to become a config, which a broken one can not."""
    return SimpleNamespace(**asdict(config) | options, method=None)


def _breaking(need):
    """Options of a preset that break this need and none before it."""
    values = product(SAMPLES[need.option], SAMPLES[need.other])
    configs = [*PRESETS.values(), H2OConfig(prefill_chunk=512)]
    for (option, other), config in product(values, configs):
        options = {need.option: option, need.other: other}
        if broken_need(_changed(config, options)) is need:
            yield config, options


@pytest.mark.parametrize("need", NEEDS, ids=lambda need: f"{need.option}-{need.other}")
def test_what_is_needed_is_named_and_mends(need):
    found = [*_breaking(need)]
    assert found, "no sample breaks it"
    for config, options in found:
        with pytest.raises(ValueError) as error:
            replace(config, **options)
        said = str(error.value)
        for option in (need.option, need.other):
            assert f"h2o_{option}" in said and flag(option) in said
            assert repr(options[option]) in said
        assert f"or h2o_{need.option}={need.off!r}" in said
        fixes = [{need.option: need.off}]
        fixes += [{need.other: value} for value in need.allowed.like]
        for fix in fixes:
            value = next(iter(fix.values()))
            assert repr(value) in said
            assert broken_need(_changed(config, options | fix)) is not need


@pytest.mark.parametrize(
    "idle, option",
    [(idle, option) for idle in IDLES for option in idle.options],
    ids=lambda x: x if isinstance(x, str) else f"{x.other}",
)
def test_what_has_no_effect_is_named(idle, option):
    """Beside the value that leaves it idle; with another it has one."""
    by_profile = {"head_budgets": "auto"}
    for name, value, more in product(PRESETS, SAMPLES[option], ({}, by_profile)):
        for beside in SAMPLES[idle.other]:
            if idle.when.hold(beside):
                options = more | {option: value, idle.other: beside}
                with pytest.raises(ValueError) as error:
                    resolve_config(name, None, options)
                said = str(error.value)
                if f"{flag(option)}) has no effect with h2o_{idle.other}=" in said:
                    assert f"h2o_{option}={value!r}" in said
                    assert f"h2o_{idle.other}={beside!r} ({flag(idle.other)})" in said
                    return
    raise AssertionError("no sample has no effect")


def test_a_method_may_have_options_that_no_user_sets(monkeypatch):
    @dataclass(frozen=True)
    class Own(Sum):
        name = "own"
        sharpness: float = 2.0

    monkeypatch.setitem(METHODS, "own", Own)
    for score in METHODS:
        resolve_config("h2o", None, {"score": score})


def test_an_option_of_one_method_alone_has_no_effect_with_others():
    """None of ours has one: `score_decay` is all methods'."""
    rows = [*idle_rows(["score_decay", "gamma", "t1"])]
    (row,) = [row for row in rows if "gamma" in row.options]
    assert row.options == ("gamma", "t1") and row.by_preset
    assert [row.when.hold(score) for score in ("cake", "mean")] == [False, True]


def test_the_table_of_the_docs_is_the_rules():
    page = OPTIONS_PAGE.read_text()
    assert "\n".join(lines()) in page, "python -m vllm_h2o.option_table"
