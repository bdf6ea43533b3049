"""Prompts in int8 do not depend on steps, but for what rounding makes of last digits.

With residents in the model's type the oracle says it (`test_reading_on`, in steps
shorter than a chunk).
"""

import pytest

from tests.engine.helpers import engine, greedy
from tests.engine.tiny_models import random_prompts, save_llama

pytestmark = pytest.mark.engine

# A share that grows from 32 to 192 slots, in chunks and while it decodes: a tenth of
# the memory of float32 holds a fifth of the tokens.
OPTIONS = {
    "kv_policy": "h2o",
    "h2o_budget": "10%",
    "h2o_min_budget": 32,
    "h2o_resident_dtype": "int8",
    "h2o_prefill_chunk": 128,
    "h2o_keep": "prompt",
    "enable_prefix_caching": True,
    "skip_tokenizer_init": True,
    "max_model_len": 2048,
    "max_num_seqs": 4,
    "h2o_head_budgets": "uniform",
    "h2o_prompt_score": "attention",
}
GOES_ON = {"h2o": {"continue": True, "report": True}}
NUM_LAYERS, NUM_HEADS, HELD = 4, 4, 192


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def at_once(model):
    return held_after(model, 256)


def held_after(model, step):
    """Positions, keys and values that are held of each turn, in steps of so many
    tokens; the turn goes on from its prompt's first 200."""
    found = []
    with engine(model, **OPTIONS, max_num_batched_tokens=step) as llm:
        for seed in range(4):
            first, more = random_prompts(200, 600, seed=seed)
            llm.generate([{"prompt_token_ids": first}], greedy(100))
            llm.collective_rpc("probe_watch")
            turn = [{"prompt_token_ids": first + more}]
            (output,) = llm.generate(turn, greedy(40, extra_args=GOES_ON))
            report = output.kv_transfer_params["h2o"]
            assert report["tokens_continued"] == 200 and report["budget"] == HELD
            looks = [("probe_survivors",), ("probe_values", "keys"), ("probe_values",)]
            found.append(
                [
                    next(iter(llm.collective_rpc(look, args=args)[0].values()))
                    for look, *args in looks
                ]
            )
    return found


@pytest.mark.parametrize("step", [pytest.param(96, marks=pytest.mark.slow), 7])
def test_steps_move_few_values_by_one(model, at_once, step):
    """A sum's last digit differs, and so does a number between two steps of int8.

    In the first layer next to none: what is rounded twice, from another place or at
    another time, would differ there. Later layers see what the earlier have made of it,
    and a tie of two tokens may fall otherwise.
    """
    for one, other in zip(held_after(model, step), at_once, strict=True):
        for layer in range(NUM_LAYERS):
            moved = survived = total = 0
            for head in range(NUM_HEADS):
                (ours, *mine), (theirs, *its) = (
                    [part[layer][head] for part in held] for held in (one, other)
                )
                survived += len({*ours} & {*theirs})
                if ours == theirs:
                    for x, y in zip(mine, its, strict=True):
                        steps = (x.int() - y.int()).abs()
                        assert steps.max() <= 1
                        moved += int(steps.sum())
                        total += steps.numel()
            assert survived >= NUM_HEADS * HELD - 2 * (layer > 0)
            assert moved <= (0.02 if layer else 1e-4) * total and total > 0
