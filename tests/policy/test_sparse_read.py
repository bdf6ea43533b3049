"""Which pages a query reads, on cases worked out by hand."""

import pytest
import torch

from vllm_h2o.policy.sparse_read import pages_read

PAGE = torch.tensor([0, 0, 1, 1, 2, 2, 3])
NONE = torch.zeros(7, dtype=torch.bool)


def read(keys, share, always=NONE, query=((1.0, 0.0),)):
    """Pages that are read; a key's second element is 0."""
    keys = torch.tensor([[key, 0.0] for key in keys])
    tokens = pages_read(torch.tensor(query), keys, PAGE, always, share)
    pages = sorted({*PAGE[tokens].tolist()})
    assert torch.equal(tokens, torch.isin(PAGE, torch.tensor(pages)))
    return pages


def test_pages_of_the_highest_bound_are_read():
    """0.6 of the highest and 0.4 of the lowest key: 6, 5.2, 4 and 1."""
    keys = [10.0, 0.0, 6.0, 4.0, 4.0, 4.0, 1.0]
    assert read(keys, 0.25) == [0]
    assert read(keys, 0.5) == [0, 1]
    assert read(keys, 0.51) == [0, 1, 2]
    assert read(keys, 1.0) == [0, 1, 2, 3]
    # Of a query that looks the other way: 4 and 1 times -1 are the highest.
    assert read(keys, 0.5, query=((-1.0, 0.0),)) == [2, 3]


def test_heads_of_a_group_choose_together():
    keys = [10.0, 0.0, 6.0, 4.0, 4.0, 4.0, 1.0]
    assert read(keys, 0.25, query=((1.0, 0.0), (-3.0, 0.0))) == [3]


@pytest.mark.parametrize(("share", "pages"), [(0.01, [0, 1, 3]), (1.0, [0, 1, 2, 3])])
def test_some_pages_are_read_always(share, pages):
    """The share is of the others."""
    always = NONE.clone()
    always[[2, 6]] = True
    assert read([9.0] * 2 + [-9.0] * 5, share, always) == pages


def test_of_equal_pages_the_lower_is_read():
    assert read([1.0] * 7, 0.5) == [0, 1]
