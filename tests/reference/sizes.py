"""How the dense reference splits a budget over heads."""

from tests.reference.dense_h2o import Sizes
from vllm_h2o.policy.ladder import length_class, lengths_of
from vllm_h2o.policy.profile import allocate


def sizes_of_heads(profile, budget, page, longest, num_prompt, num_tokens):
    """`[num_layers][num_kv_heads]`, of a budget that is a number: see `lengths_of`.

    No head has more than the longest request's richest.
    """
    most_tokens = min(num_prompt + num_tokens, longest)
    of_class = lengths_of(budget, longest)[
        length_class(budget, longest, num_prompt, most_tokens)
    ]
    richest = longest
    for length in (longest, of_class):
        most = -(-length // page)
        stretched = profile.stretched(most * page, budget)
        split = allocate(stretched, page, budget // page, min(most, richest), 1)
        richest = max(map(max, split))
    return [[own_sizes(n, page) for n in layer] for layer in split]


def own_sizes(blocks, block):
    """Half heavy, half recent: of several blocks whole ones, the odd one recent."""
    if blocks == 1:
        return Sizes(block // 2, block // 2, block)
    recent = (blocks + 1) // 2 * block
    return Sizes(blocks * block - recent, recent, block)
