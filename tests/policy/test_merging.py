"""D2O's rule: what is dropped goes into the value of what is most similar."""

import math

import pytest
import torch

from vllm_h2o.policy.merging import NO_THRESHOLD, merged

EAST, NORTH = torch.eye(2)
KEPT_KEYS = torch.stack([2 * EAST, NORTH])
KEPT_VALUES = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
LOST_VALUES = torch.tensor([[7.0, 8.0]])


def lose(key, threshold):
    lost = torch.tensor([key])
    return merged(KEPT_KEYS, KEPT_VALUES, lost, LOST_VALUES, threshold)


def test_a_prompt_merges_what_is_at_least_as_similar_as_the_mean():
    lost_keys = torch.tensor([[5.0, 0.0], [3.0, 4.0], [-1.0, -1.0], [1.0, 1e-3]])
    lost_values = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
    values, threshold = merged(KEPT_KEYS, KEPT_VALUES, lost_keys, lost_values, None)
    cosines = [1.0, 0.8, -math.sqrt(0.5), 1 / math.sqrt(1 + 1e-6)]
    assert threshold == pytest.approx(sum(cosines) / 4, abs=1e-6)
    e, near = math.e, math.exp(cosines[3])
    east = e * KEPT_VALUES[0] + e * lost_values[0] + near * lost_values[3]
    north = e * KEPT_VALUES[1] + math.exp(0.8) * lost_values[1]
    torch.testing.assert_close(values[0], east / (2 * e + near))
    torch.testing.assert_close(values[1], north / (e + math.exp(0.8)))


def test_a_token_that_generation_loses_moves_the_threshold():
    values, threshold = lose([3.0, 4.0], 0.5)
    assert threshold == pytest.approx(0.3 * 0.5 + 0.7 * 0.8)
    assert torch.equal(values[0], KEPT_VALUES[0])
    share = math.exp(0.8) / (math.e + math.exp(0.8))
    expected = (1 - share) * KEPT_VALUES[1] + share * LOST_VALUES[0]
    torch.testing.assert_close(values[1], expected)


def test_what_is_not_similar_enough_only_moves_the_threshold():
    values, threshold = lose([3.0, 4.0], 0.9)
    assert threshold == pytest.approx(0.3 * 0.9 + 0.7 * 0.8)
    assert torch.equal(values, KEPT_VALUES)


def test_the_first_loss_merges():
    values, threshold = lose([-3.0, -4.0], NO_THRESHOLD)
    assert threshold == pytest.approx(-0.6)
    assert not torch.equal(values, KEPT_VALUES)


def test_nothing_lost_changes_nothing():
    empty = torch.empty(0, 2)
    values, threshold = merged(KEPT_KEYS, KEPT_VALUES, empty, empty, None)
    assert torch.equal(values, KEPT_VALUES) and threshold == NO_THRESHOLD


def test_parts_that_are_compared_apart_are_as_one(monkeypatch):
    random = torch.Generator().manual_seed(1)
    kept, lost = (
        torch.randn(2, 6, 8, generator=random),
        torch.randn(2, 11, 8, generator=random),
    )
    expected, threshold = merged(*kept, *lost, None)
    monkeypatch.setattr("vllm_h2o.policy.merging._TILE", 4)
    values, same = merged(*kept, *lost, None)
    torch.testing.assert_close(values, expected)
    assert same == pytest.approx(threshold)
