"""The gate: keys are turned back, and what is planted is found."""

import pytest
import torch

from tests.reference import gate_by_transformers
from vllm_h2o.calibration.gate_fit import RIDGE, Examples, total
from vllm_h2o.policy.gate import expected, features
from vllm_h2o.policy.rotation import Rotation


def rotation(neox, dim=12, count=50):
    angles = torch.arange(count)[:, None] / 10 ** (torch.arange(dim // 2) / 3)
    return Rotation(torch.cat([angles.cos(), angles.sin()], dim=1), neox)


def rotate(key, positions, dim, neox):
    """By complex numbers, pair by pair."""
    turned = key.clone().double()
    for i in range(dim // 2):
        pair = [i, i + dim // 2] if neox else [2 * i, 2 * i + 1]
        angle = (positions / 10 ** (i / 3)).double()[:, None]
        number = torch.complex(*(key[..., d].double() for d in pair))
        number = number * torch.complex(angle.cos(), angle.sin())
        turned[..., pair[0]], turned[..., pair[1]] = number.real, number.imag
    return turned.float()


@pytest.mark.parametrize("neox", [True, False])
def test_keys_are_turned_back(neox):
    key, positions = torch.randn(30, 3, 16), torch.arange(30)
    turned = rotate(key, positions, 12, neox)
    back = rotation(neox).undone(turned)
    torch.testing.assert_close(back, key, rtol=1e-4, atol=1e-5)
    assert (turned - key).abs().max() > 0.5


def planted(num_tokens, seed, noise=0.0):
    """Features of two KV heads, and attention that depends on them."""
    generator = torch.Generator().manual_seed(seed)
    key, value = torch.randn(2, num_tokens, 2, 8, generator=generator)
    x = features(key, value, torch.arange(num_tokens, 0, -1))
    weights = torch.randn(2, 20, generator=torch.Generator().manual_seed(7)) / 20
    weights[:, -1] = 1.0
    attention = expected(x, weights)
    factor = 1 + noise * torch.randn(attention.shape, generator=generator)
    return x, attention * factor.clamp(min=0), weights


def test_the_gate_finds_what_was_planted():
    """In one piece or in two, and says how well on tokens that it has not seen."""
    x, attention, weights = planted(4000, 0)
    whole = Examples.of(x, attention)
    pieces = slice(None, 1500), slice(1500, None)
    parts = total([Examples.of(x[:, each], attention[:, each]) for each in pieces])
    found = whole.weights()
    torch.testing.assert_close(parts.weights(), found, rtol=1e-3, atol=1e-4)
    # Of features that tell nothing of each other all shrink alike.
    shrunk = weights[:, :16] / (1 + RIDGE)
    torch.testing.assert_close(found[:, :16], shrunk, rtol=0, atol=0.003)
    unseen = Examples.of(*planted(4000, 1)[:2])
    assert (unseen.explained(found) > 0.97).all()


def test_the_ridge_is_over_standardized_features():
    """Also of keys whose mean is eighty times what varies about it."""
    x, attention, _ = planted(2000, 0, noise=0.5)
    x[..., 3] = 8.0 + 0.1 * x[..., 3]
    found = Examples.of(x, attention).weights()
    for head in range(2):
        roots = attention[head] ** 0.25
        expected = gate_by_transformers.weights([(x[head], roots)]).float()
        torch.testing.assert_close(found[head], expected, rtol=0.02, atol=1e-3)
    assert found[:, 3].abs().min() > 0.1


def test_a_feature_that_never_varies_has_no_say():
    x, attention, _ = planted(1000, 0)
    found = Examples.of(x, attention).weights()
    for value in (0.0, 3.0):
        x[..., 5] = value
        weights = Examples.of(x, attention).weights()
        assert weights.isfinite().all() and weights[:, 5].abs().max() < 0.01
        others = [i for i in range(19) if i != 5]
        torch.testing.assert_close(
            weights[:, others], found[:, others], rtol=0.1, atol=0.01
        )


def test_what_is_explained_is_a_share_of_the_variance():
    x, attention, _ = planted(4000, 0, noise=0.5)
    examples = Examples.of(x, attention)
    found = examples.weights()
    root = attention**0.25
    error = (root - (x @ found[..., None])[..., 0]).square().mean(dim=1)
    direct = 1 - error / root.var(dim=1, correction=0)
    torch.testing.assert_close(
        examples.explained(found).float(), direct, rtol=1e-3, atol=1e-3
    )
    assert (direct < 0.95).all()
    mean = torch.zeros_like(found)
    mean[:, -1] = root.mean(dim=1)
    assert examples.explained(mean).abs().max() < 1e-3


def test_heads_that_tell_all_tokens_alike_are_not_explained():
    """Attention that is the same for all, that is none, and that is next to none."""
    x, attention, _ = planted(1000, 0)
    for amount in (1e-4, 0.0, 1e-30):
        attention[1] = amount
        examples = Examples.of(x, attention)
        other = Examples.of(x, attention * 1.5)
        explained = other.explained(examples.weights())
        assert explained[1] == 0.0 and explained.dtype == torch.float32


def test_rotations_that_are_not_known_tell_nothing():
    class Module:
        rotary_dim, head_size, is_neox_style = 12, 16, True
        cos_sin_cache = rotation(True).angles

    assert Rotation.of(Module()).angles is Module.cos_sin_cache
    key = torch.randn(30, 3, 16)
    changes = {"mrope_section": [1]}, {"rotary_dim": 8}, {"head_size": 8}
    for change in (*changes, {"cos_sin_cache": None}):
        other = type("Other", (Module,), change)()
        told = Rotation.of(other).undone(key)
        assert not told[..., 1:].any()
        torch.testing.assert_close(told[..., 0], key.norm(dim=-1))
    # Longer than the table is.
    assert not rotation(True, count=20).undone(key)[..., 1:].any()
