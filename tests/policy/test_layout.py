"""Slots against a simulation that moves tokens around one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.layout import SlotLayout, first_observer, place_of
from vllm_h2o.policy.presets import PRESETS


@given(
    heavy=st.integers(1, 4),
    recent=st.integers(1, 4),
    length=st.integers(1, 120),
    blocks=st.booleans(),
)
@pytest.mark.rule("R9")
def test_ring_holds_the_most_recent_tokens(heavy, recent, length, blocks):
    size = 4
    layout = SlotLayout(size, heavy * size, recent * size, 0, blocks)
    slots = [None] * layout.budget
    for position in range(length):
        slots[layout.slot(position)] = position
    ring = slots[layout.heavy_slots :]
    after = range(max(layout.heavy_slots, length - layout.recent_slots), length)
    assert sorted(p for p in ring if p is not None) == list(after)
    assert slots[: layout.heavy_slots] == [
        p if p < length else None for p in range(layout.heavy_slots)
    ]
    # Ring blocks hold aligned blocks of positions.
    assert all(p is None or layout.slot(p) % size == p % size for p in slots)


@given(length=st.integers(0, 200))
def test_resident_tokens(length):
    token = SlotLayout(8, 16, 32, 0, whole_blocks=False)
    block = SlotLayout(8, 16, 32, 0, whole_blocks=True)
    assert token.resident_tokens(length) == min(length, 48)
    expected = length if length <= 48 else 40 + (length - 1) % 8 + 1
    assert block.resident_tokens(length) == expected


@pytest.mark.parametrize(
    "config, expected",
    [
        (H2OConfig(budget=256, recent_ratio=0.5), (256, 128, 128)),
        (H2OConfig(budget=257, recent_ratio=0.5), (288, 128, 160)),
        (H2OConfig(budget=5000, recent_ratio=0.5), (1024, 512, 512)),
        (H2OConfig(budget="20%", recent_ratio=0.5), (224, 96, 128)),
        (H2OConfig(budget=320, recent_ratio=0.25), (320, 224, 96)),
        (H2OConfig(budget=320, recent_ratio=0.01), (320, 288, 32)),
        (H2OConfig(budget=320, recent_ratio=0.99), (320, 32, 288)),
        (PRESETS["h2o"], (224, 160, 64)),
        (PRESETS["tova"], (224, 192, 32)),
        (PRESETS["streaming"], (224, 4, 220)),
    ],
)
def test_rounding_to_blocks(config, expected):
    layout = SlotLayout.from_config(config, 32, 1000)
    assert (layout.budget, layout.heavy_slots, layout.recent_slots) == expected
    assert layout.budget_blocks * 32 == layout.budget


@pytest.mark.parametrize(
    "config, expected",
    [
        (H2OConfig(recent_ratio=0.35), (21, 11)),
        (H2OConfig(recent_ratio=0.99), (4, 28)),
        (H2OConfig(recent_ratio=0.01), (31, 1)),
        (H2OConfig(recent_ratio=0.99, sinks=0), (1, 31)),
    ],
)
def test_a_single_block_is_shared(config, expected):
    """Its slots compete like those of any other heavy set."""
    assert SlotLayout.fewest_blocks(config, 32) == 1
    layout = SlotLayout.of_blocks(config, 32, 1)
    assert (layout.heavy_slots, layout.recent_slots) == expected


@pytest.mark.parametrize(
    "sinks, recent_ratio, fewest",
    [(16, 0.5, 1), (17, 0.5, 2), (32, 0.5, 2), (33, 0.5, 3), (65, 0.1, 4)],
)
def test_the_poorest_head_holds_the_sinks(sinks, recent_ratio, fewest):
    config = H2OConfig(sinks=sinks, recent_ratio=recent_ratio)
    assert SlotLayout.fewest_blocks(config, 32) == fewest
    assert SlotLayout.of_blocks(config, 32, fewest).heavy_slots >= sinks


def test_pinned_slots():
    assert SlotLayout(32, 64, 64, 4, whole_blocks=False).pinned_slots == 4
    assert SlotLayout(32, 64, 64, 4, whole_blocks=True).pinned_slots == 32
    assert SlotLayout(32, 64, 64, 0, whole_blocks=True).pinned_slots == 0


def test_first_observer():
    assert first_observer(H2OConfig(observation_window=64), 100) == 36
    assert first_observer(H2OConfig(observation_window=64), 10) == 0
    assert first_observer(H2OConfig(observation_window="all"), 100) == 0
    assert first_observer(H2OConfig(observation_window="20%"), 101) == 80
    assert first_observer(H2OConfig(observation_window="1%"), 10) == 9
    assert first_observer(H2OConfig(observation_window="7%"), 100) == 93


@given(
    st.floats(0.0, 1.0),
    st.integers(0, 4),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.lists(st.integers(0, 30), min_size=3, max_size=3),
)
@pytest.mark.rule("R10")
def test_slots_of_a_budget_that_grows(ratio, sinks, steps, waits):
    """A token takes the next free slot; if there is none, that of the oldest recent."""
    config = H2OConfig(recent_ratio=ratio, sinks=sinks, budget=4096)
    sizes = [sum(steps[: n + 1]) + 1 for n in range(len(steps))]
    layouts = [SlotLayout.of_blocks(config, 8, blocks) for blocks in sizes]
    slots, position, grown_at, before = [], 0, 0, 0
    for layout, wait in zip(layouts, [*waits, 30], strict=False):
        # A budget grows once it is full.
        for _ in range(layout.budget - len(slots) + wait):
            place = place_of(position, grown_at, before)
            ring = slots[layout.heavy_slots :]
            oldest = layout.heavy_slots + ring.index(min(ring)) if ring else 0
            full = len(slots) == layout.budget
            assert layout.slot(place) == (oldest if full else len(slots))
            if full:
                slots[oldest] = position
            else:
                slots.append(position)
            position += 1
        ring = sorted(slots[layout.heavy_slots :])
        slots = slots[: layout.heavy_slots] + ring
        grown_at, before = position, layout.budget
