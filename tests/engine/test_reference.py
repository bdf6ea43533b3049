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
LENGTHS = (300, 345, 420, 1500)
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
        kept = [[head.survivors() for head in layer] for layer in result.heads]
        assert survivors[i] == kept, _difference(survivors[i], kept)


def _difference(actual, expected):
    wrong = [
        (layer, head, sorted(set(a) - set(e)), sorted(set(e) - set(a)))
        for layer, (x, y) in enumerate(zip(actual, expected, strict=True))
        for head, (a, e) in enumerate(zip(x, y, strict=True))
        if a != e
    ]
    parts = "(layer, head, only engine, only reference)"
    return f"{len(wrong)} heads differ, {parts}: {wrong[:5]}"
