"""Who gets how many blocks, and where they are."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_h2o.policy.placement import lend, lend_by_budget
from vllm_h2o.policy.profile import (
    HeadProfile,
    Spending,
    allocate,
    gate_in_json,
    splits,
)

GRID = [64, 128, 256, 512, 1024]


def profile(*layers):
    return HeadProfile(GRID, [[list(head) for head in layer] for layer in layers])


def falling(start):
    return [start, start / 2, start / 4, start / 8, start / 16]


@given(
    st.lists(
        st.lists(st.floats(1e-9, 1.0), min_size=2, max_size=2), min_size=1, max_size=6
    ),
    st.integers(2, 12),
    st.integers(2, 40),
    st.integers(1, 2),
)
def test_every_kv_head_spends_its_sum_and_no_page_is_used_twice(
    starts, budget_blocks, max_blocks, fewest
):
    given_profile = profile(*[[falling(s) for s in layer] for layer in starts])
    blocks = allocate(given_profile, 32, budget_blocks, max_blocks, fewest)
    for head in range(2):
        spent = sum(layer[head] for layer in blocks)
        assert spent == len(starts) * min(budget_blocks, max_blocks)
    assert all(fewest <= n <= max_blocks for layer in blocks for n in layer)
    pages = lend(blocks, budget_blocks)
    for head in range(2):
        used = [page for layer in pages for page in layer[head]]
        assert len(set(used)) == len(used)
        assert all(page.column < budget_blocks for page in used)
    for i, layer in enumerate(pages):
        for mine, wanted in zip(layer, blocks[i], strict=True):
            assert len(mine) == wanted
            # Own pages first and in order: what is there need not move.
            own = [(page.layer, page.column) for page in mine[:budget_blocks]]
            assert own == [(i, c) for c in range(min(wanted, budget_blocks))]


@given(
    st.lists(
        st.lists(st.floats(1e-9, 1.0), min_size=2, max_size=2), min_size=1, max_size=6
    ),
    st.lists(st.integers(2, 9), min_size=1, max_size=4),
    st.integers(1, 2),
)
def test_a_larger_budget_takes_nothing_from_anybody(starts, steps, fewest):
    """Whatever blocks are spent by, in stages; and no page moves."""
    budgets = np.cumsum(steps).tolist()

    def split_of(kv_heads):
        curves = [[falling(s) for s in layer[kv_heads]] for layer in starts]
        stages = [
            Spending(profile(*curves).stretched(96 * b, 32 * b), b, 3 * b, 3 * more)
            for b, more in zip(budgets, steps, strict=True)
        ]
        return stages, splits(stages, 32, fewest)

    stages, split = split_of(slice(None))
    for blocks, budget in zip(split, budgets, strict=True):
        assert (blocks.sum(axis=0) == len(starts) * budget).all()
        assert (fewest <= blocks).all() and (blocks <= 3 * budget).all()
    for before, after, more in zip(split, split[1:], steps[1:], strict=False):
        assert (before <= after).all() and (after - before <= 3 * more).all()
    pages = lend_by_budget([blocks.tolist() for blocks in split], budgets)
    assert [len(mine) for layer in pages for mine in layer] == [*split[-1].flat]
    for blocks, budget in zip(split, budgets, strict=True):
        for head in range(2):
            used = [
                page
                for layer, heads in enumerate(pages)
                for page in heads[head][: blocks[layer, head]]
            ]
            assert len({*used}) == len(used) == len(starts) * budget
            assert all(page.column < budget for page in used)
    # Of the first stage all is as if it were alone, and of heads that are alone too.
    assert split[0].tolist() == allocate(
        stages[0].profile, 32, budgets[0], 3 * budgets[0], fewest
    )
    first = lend(split[0].tolist(), budgets[0])
    for mine, expected in zip(sum(pages, []), sum(first, []), strict=True):
        assert mine[: len(expected)] == expected
    _, one = split_of(slice(1, 2))
    assert one[-1][:, 0].tolist() == split[-1][:, 1].tolist()


def test_blocks_go_where_the_error_falls():
    flat, steep = [1e-6] * 5, falling(1.0)
    late = [1.0, 1.0, 1.0, 1.0, 1e-6]  # nothing until 1024 tokens, then all
    assert allocate(profile([flat], [steep]), 32, 8, 64, 2) == [[2], [14]]
    assert allocate(profile([flat], [steep]), 32, 8, 64, 1) == [[1], [15]]
    assert allocate(profile([flat], [late]), 32, 20, 64, 2)[1][0] >= 32
    # A rank's heads are decided without the others'.
    both = allocate(profile([flat, steep], [steep, flat]), 32, 8, 64, 1)
    alone = allocate(profile([flat], [steep]), 32, 8, 64, 1)
    assert [layer[0] for layer in both] == [layer[0] for layer in alone]


def test_a_long_context_is_not_searched_where_nothing_was_measured():
    layers = [[falling(0.1 * i)] for i in range(1, 5)]
    expected = allocate(profile(*layers), 32, 8, 32, 1)
    assert allocate(profile(*layers), 32, 8, 10**6, 1) == expected


@pytest.mark.parametrize("budget_blocks", [4, 8, 16])
def test_a_share_of_the_context_means_the_same_at_every_length(budget_blocks):
    measured = profile([falling(0.3), falling(1e-4)], [falling(1.0), falling(0.1)])
    assert measured.context_tokens == 1280
    shares = []
    for times in (1, 4, 16):
        context, budget = times * 1280, times * 32 * budget_blocks
        stretched = measured.stretched(context, budget)
        shares.append(allocate(stretched, 32 * times, budget_blocks, 40, 1))
        assert stretched.context_tokens >= context
    assert shares[0] == shares[1] == shares[2]
    assert len({n for layer in shares[0] for n in layer}) > 1


def test_curves_reach_all_of_a_long_context():
    """As they were measured they have nothing to say past 1024 tokens."""
    hungry, flat = [1.0] * 5, [1e-6] * 5
    measured = profile([hungry], *[[flat]] * 9)
    assert allocate(measured, 32, 26, 256, 1) == [[26]] * 10
    stretched = measured.stretched(256 * 32, 26 * 32)
    assert allocate(stretched, 32, 26, 256, 1)[0] == [251]


def test_an_ample_budget_stretches_the_curves_further():
    measured = profile([falling(1.0)])
    grids = [
        measured.stretched(1280, round(share * 1280)).grid_tokens
        for share in (0.05, 0.15, 0.3, 0.9)
    ]
    assert grids == [[*GRID, 1280]] * 2 + [[2 * n for n in (*GRID, 1280)]] * 2
    # A shorter context does not shrink them.
    assert measured.stretched(640, 64).grid_tokens == [*GRID, 1280]


def test_curves_that_end_at_the_whole_context_stay_as_they_are():
    whole = HeadProfile(GRID, [[falling(1.0)]], context_tokens=GRID[-1])
    assert whole.stretched(1024, 64) == whole
    stretched = whole.stretched(4096, 400)
    assert stretched.grid_tokens == [4 * n for n in GRID]
    assert stretched.errors == whole.errors


@pytest.mark.parametrize(
    "change, part",
    [
        ({"grid_tokens": [64, 32]}, "grid_tokens"),
        ({"grid_tokens": [64]}, "grid_tokens"),
        ({"errors": [[[1.0, 2.0]], []]}, "same number of heads"),
        ({"errors": [[[1.0]]]}, "value for each"),
        ({"errors": [[[1.0, -2.0]]]}, "not negative"),
        ({"context_tokens": 100}, "context_tokens is 100"),
        ({"more": 1}, "more"),
        ({"errors": [[[float("nan"), 0.5]]]}, "errors must be finite"),
        ({"errors": [[[float("inf"), 0.5]]]}, "errors must be finite"),
        ({"errors": [[[1e300, 0.5]]]}, "at most 1e+30"),
        ({"errors": [[[10**400, 0.5]]]}, "at most 1e+30"),
        ({"grid_tokens": [64, 2**31 - 1]}, "more than 2147483648 tokens"),
        ({"measured_on": 5}, "measured_on"),
        ({"x" * 5000: 5}, "xxx"),
        ({"gate": {"explained": 2, "features": 1, "weights": ""}}, "explained of the"),
        ({"gate": {"explained": 1, "features": -1, "weights": ""}}, "features of the"),
        ({"errors": [[["much", 0.5]]]}, "errors must be finite"),
        ({"errors": [[[True, 0.5]]]}, "errors must be finite"),
        ({"grid_tokens": [64, float("nan")]}, "must be counts of tokens"),
        ({"grid_tokens": [64, 10**400]}, "is no head profile"),
        ({"grid_tokens": [0.5, 64]}, "must be counts of tokens"),
        ({"context_tokens": float("inf")}, "must be counts of tokens"),
        ({"gate": {}}, "the gate has"),
        ({"gate": {"explained": 0.5, "features": 2, "weights": "AAAA"}}, "size"),
        ({"gate": gate_in_json([[[float("nan")]]], 0.5)}, "finite"),
        ({"gate": gate_in_json([[[]]], 0.5)}, "features of the gate are 0"),
    ],
)
def test_bad_profiles_are_named(tmp_path, change, part):
    path = tmp_path / "profile.json"
    content = {"grid_tokens": [64, 128], "errors": [[[1.0, 0.5]]]} | change
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError) as error:
        HeadProfile.load(path)
    for word in ("--h2o-head-budgets", str(path), part, "vllm_h2o.calibrate"):
        assert word in str(error.value)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "1", "[" * 100_000, "\0", '{"grid_tokens": 1}', "null"]
)
def test_what_is_no_profile_at_all_is_named(tmp_path, content):
    path = tmp_path / "profile.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"head-budgets.*{path} is no head profile"):
        HeadProfile.load(path)


@pytest.mark.parametrize("path", ["/none/heads.json", "/", "\0", "/" + 5000 * "x"])
def test_a_path_without_a_profile_is_named(path):
    with pytest.raises(ValueError, match="head-budgets.* is no head profile") as error:
        HeadProfile.load(Path(path))
    assert len(str(error.value)) < 600


def test_whole_numbers_are_errors_too():
    large = HeadProfile([64, 128], [[[10**29, 10**28]]])
    assert allocate(large, 32, 3, 8, 1) == [[3]]


def test_a_device_is_written_to_as_it_is(tmp_path):
    """Nothing takes its place, nor that of a link."""
    link = tmp_path / "null"
    link.symlink_to("/dev/null")
    profile([falling(1.0)]).save(link)
    assert link.is_symlink() and not Path("/dev/null").is_file()
    linked, file = tmp_path / "linked.json", tmp_path / "file.json"
    linked.symlink_to(file)
    profile([falling(1.0)]).save(linked)
    assert linked.is_symlink() and HeadProfile.load(file) == HeadProfile.load(linked)


def test_a_profile_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    path = tmp_path / "profile.json"
    profile([falling(1.0)]).save(path)
    before = path.read_text()
    monkeypatch.setattr(json, "dumps", lambda *_: "{" * 10_000)
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        profile([falling(0.1)]).save(path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_profile_survives_its_file(tmp_path):
    original = profile([falling(1.0)], [falling(0.1)])
    original.save(tmp_path / "profile.json")
    assert HeadProfile.load(tmp_path / "profile.json") == original
    gate = np.arange(6, dtype=np.float32).reshape(2, 1, 3)
    original = replace(original, gate=gate_in_json(gate, 0.5))
    original.save(tmp_path / "profile.json")
    loaded = HeadProfile.load(tmp_path / "profile.json")
    assert loaded == original and np.array_equal(loaded.gate_weights(), gate)
    assert loaded.stretched(4096, 64).gate == original.gate
