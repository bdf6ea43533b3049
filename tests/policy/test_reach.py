"""How far back keys may be, and where they move."""

import numpy as np
import pytest
import torch

from vllm_h2o.policy.config import H2OConfig
from vllm_h2o.policy.reach import MovingKeys, Reach
from vllm_h2o.policy.rotation import Rotation, rotated

REACH = Reach.of(trained=97, chunk=25)


@pytest.fixture(scope="module")
def places():
    """`[n, b]` of tokens b when n are read, moved one step at a time; and in chunks."""
    read = 400
    place, of_tokens = np.arange(read), [np.arange(read)]
    for position in range(read):
        if position % REACH.step == 0:
            back = position - place
            place = place + REACH.step * (back > REACH.limit) * (place < position)
        of_tokens.append(place)
    return np.array(of_tokens)


@pytest.mark.rule("R19")
def test_the_closed_form_is_what_moving_step_by_step_gives(places):
    births = torch.arange(places.shape[1])
    for num_tokens, place in enumerate(places):
        read = births[:num_tokens]
        moved = REACH.moved(read, num_tokens) + read
        assert moved.tolist() == place[:num_tokens].tolist()


def test_nothing_is_farther_back_than_the_model_was_trained_for(places):
    """Neither from a generated token, nor from any of a chunk."""
    farthest = 0
    for read in range(1, len(places)):
        back = read - 1 - places[read][:read]
        assert (back >= 0).all()
        farthest = max(farthest, back.max())
        last_of_chunk = read + REACH.chunk - 1
        assert (last_of_chunk - places[read][:read]).max() < 97
    assert farthest == REACH.limit + REACH.step - 1


def test_what_moves_is_within_no_chunk(places):
    counts = np.arange(len(places), dtype=np.int32)
    changed = np.zeros(len(places), bool)
    for position in range(len(places) - 1):
        before, after = places[position], places[position + 1]
        changed[position] = (before != after).any()
        assert (before == after)[max(0, position - REACH.chunk) :].all()
    moves = REACH.moves_at(counts)
    assert changed[:-1].tolist() == moves[:-1].tolist() and changed.sum() > 10


@pytest.mark.parametrize("chunk", [0, 49, 97, 1000])
def test_a_chunk_is_no_longer_than_what_may_stay(chunk):
    with pytest.raises(ValueError, match=rf"have {chunk} tokens.*97 may have 41"):
        Reach.of(97, chunk)


def test_a_config_says_whether_keys_move():
    moving = H2OConfig(positions="cache", prefill_chunk=100, trained_length=2048)
    assert Reach.of_config(H2OConfig(), 64, 32) is None
    assert Reach.of_config(moving, 64, 32) == Reach.of(2048, 128)
    assert Reach.of_config(moving, 160, 32) == Reach.of(2048, 320)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_moved_key_is_the_key_of_a_later_token(neox, dtype):
    """Also where the table is coarse and the move is long; its rest stays."""
    frequencies = 10000.0 ** -(torch.arange(6).double() / 6)
    angles = torch.arange(3000)[:, None] * frequencies
    table = torch.cat([angles.cos(), angles.sin()], dim=1).to(dtype)
    moving = MovingKeys.of(REACH, Rotation(table, neox), torch.device("cpu"))
    births = torch.tensor([0, 7, 2590])
    moved = REACH.moved(births, 2600)
    assert moved.min() == 0 and moved.max() > 2000
    key = torch.randn(3, 16)
    now = moving.moved(_rotated(key, births, frequencies, neox), births, 1, 2600)
    expected = _rotated(key, births + moved, frequencies, neox)
    off = 1e-4 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(now, expected, rtol=0, atol=off)


def _rotated(key, positions, frequencies, neox):
    """By complex numbers, all pairs at once."""
    turned, rest = key[:, :12].double(), key[:, 12:]
    pairs = turned.view(-1, 2, 6).transpose(1, 2) if neox else turned.view(-1, 6, 2)
    number = torch.view_as_complex(pairs.contiguous())
    angles = positions[:, None] * frequencies
    number = number * torch.complex(angles.cos(), angles.sin())
    pairs = torch.view_as_real(number)
    turned = (pairs.transpose(1, 2) if neox else pairs).flatten(1).float()
    return torch.cat([turned, rest], dim=1)


@pytest.mark.parametrize(
    ("angles", "why"),
    [
        (None, "not known"),
        (torch.rand(100, 12) * 2 - 1, "no multiples"),
    ],
)
def test_angles_that_do_not_grow_with_the_position_move_no_key(angles, why):
    with pytest.raises(ValueError, match=why):
        _ = Rotation(angles).frequencies


@pytest.mark.parametrize("first", [0, 120_000])
def test_a_key_that_moves_often_does_not_drift(first):
    """In 16 bits, where rounding to the nearest would leave slow pairs as they were.
    What is not rotated stays."""
    frequencies = 5e5 ** -(torch.arange(64).double() / 64)
    reach, births = Reach.of(4096, 1536), first + torch.arange(16)
    moving = MovingKeys(reach, frequencies, True)
    key = torch.randn(16, 130, generator=torch.Generator().manual_seed(0)).bfloat16()
    key[:, 0] = key[:, 64] = 0.0
    now, read, begins = key, 1, first // reach.step * reach.step
    for moves in range(1, 1001):
        after = begins + reach.limit + moves * reach.step + 1
        now, read = moving.moved(now, births, read, after), after
    total = reach.moved(births, read)
    assert total.min() > 990 * reach.step
    angles = total[:, None] * frequencies
    exact = rotated(key.float(), angles.cos().float(), angles.sin().float(), True)
    assert torch.equal(now[:, 128:], key[:, 128:])
    assert not now[:, 0].any() and not now[:, 64].any()
    pairs = [x.float()[:, :128].unflatten(1, (2, 64))[..., 1:] for x in (now, exact)]
    off, size = (x.norm(dim=(0, 1)) for x in (pairs[0] - pairs[1], pairs[1]))
    assert (off / size).max() < 0.15
