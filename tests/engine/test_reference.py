"""H2O is H2O: the engine against the dense reference, on SmolLM2 in float32."""

import itertools
import json

import pytest

from benchmarks.smollm2 import ensure_model
from tests.engine.helpers import engine, generate, prompts_of
from tests.reference.dense_h2o import DenseLlama, Sizes, Variant
from tests.reference.dense_h2o import generate as generate_densely

pytestmark = pytest.mark.engine

BUDGET, NUM_TOKENS = 256, 64
LENGTHS = (300, 330, 400, 1100)
SIZES = Sizes(heavy=128, recent=128, block=32)
VARIANTS = [
    Variant(window, pooling, score, unit)
    for window, pooling, score, unit in itertools.product(
        (None, 64), (1, 15), ("sum", "mean"), ("token", "block")
    )
] + [
    Variant(1, 1, "sum", "token", decay=0.0, sinks=0),
    Variant(64, 15, "mean", "token", decay=0.9),
]


def settings_of(variant):
    return json.dumps(
        {
            "budget": BUDGET,
            "observation_window": variant.window or "all",
            "pooling": variant.pooling,
            "score": variant.score,
            "eviction_unit": variant.unit,
            "score_decay": variant.decay,
            "sinks": variant.sinks,
        }
    )


@pytest.fixture(scope="module")
def llm():
    with engine(kv_policy="h2o", h2o_budget=BUDGET) as llm:
        yield llm


@pytest.fixture(scope="module")
def prompts():
    return prompts_of(*LENGTHS)


@pytest.fixture(scope="module")
def expected(prompts):
    """Results of the reference by prompt and variant."""
    model = DenseLlama(ensure_model())
    return [
        generate_densely(model, prompt, NUM_TOKENS, VARIANTS, SIZES)
        for prompt in prompts
    ]


@pytest.mark.parametrize("number", range(len(VARIANTS)), ids=lambda i: str(VARIANTS[i]))
def test_engine_equals_reference(llm, prompts, expected, number):
    llm.collective_rpc("probe_set_policy", args=(settings_of(VARIANTS[number]),))
    llm.collective_rpc("probe_watch")
    tokens = generate(llm, prompts, NUM_TOKENS)
    survivors = list(llm.collective_rpc("probe_survivors")[0].values())
    assert len(survivors) == len(prompts)
    for i, results in enumerate(expected):
        result = results[number]
        assert tokens[i] == result.tokens, f"prompt {i}"
        wrong = _differences(survivors[i], result.heads)
        # Equal but for ties: float32 sums in another order decide them.
        untied = [w for w in wrong if not _is_tie(w)]
        assert not untied, f"prompt {i}, (layer, head, engine only, reference only)"
        assert len(wrong) <= 3, f"prompt {i}: too many ties to be ties"


def _differences(survivors, heads):
    """(layer, KV head, only in the engine, only in the reference, close calls)."""
    found = []
    for layer, (actual, expected) in enumerate(zip(survivors, heads, strict=True)):
        for number, (tokens, head) in enumerate(zip(actual, expected, strict=True)):
            kept = set(head.survivors())
            if (only := set(tokens) - kept) or kept - set(tokens):
                missing = kept - set(tokens)
                found.append((layer, number, only, missing, head.close_calls))
    return found


def _is_tie(difference):
    """One unit for another, in a decision that the reference calls close."""
    _, _, only, missing, close_calls = difference
    return len(only) == len(missing) and only | missing <= close_calls
