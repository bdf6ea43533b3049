"""The whole of it in seconds: an engine, on random weights that no package brings."""

import pytest

from tests.engine.helpers import assert_pool_whole, engine, generate
from tests.engine.tiny_models import random_prompts, save_phi3

pytestmark = [pytest.mark.engine, pytest.mark.check]


def test_a_tiny_model_evicts_within_its_budget(tmp_path):
    """Whose window never binds: its layers are compressed as any other's."""
    model = save_phi3(tmp_path)
    options = {"kv_policy": "h2o", "h2o_budget": 64, "skip_tokenizer_init": True}
    prompts = random_prompts(200, 90, 20)
    with engine(model, max_model_len=512, **options) as llm:
        tokens = generate(llm, prompts, 24)
        stats = llm.collective_rpc("h2o_stats")[0]
        assert_pool_whole(llm)
    assert [len(answer) for answer in tokens] == [24, 24, 24]
    # The third request fits its budget and stays dense.
    assert stats["transitions"] == 2
    assert stats["tokens_evicted"] > 0
