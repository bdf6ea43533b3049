"""Models whose keys can not move are refused when they are loaded."""

import pytest

from tests.engine.helpers import engine
from tests.engine.tiny_models import save_llama

pytestmark = pytest.mark.engine

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
OPTIONS = {
    "kv_policy": "streaming",
    "h2o_budget": 64,
    "h2o_prefill_chunk": 128,
    "h2o_positions": "cache",
    "max_model_len": 4096,
    "skip_tokenizer_init": True,
}


@pytest.mark.parametrize(
    ("rope", "options", "why"),
    [
        (YARN, {}, "--max-model-len is 4096, but .* for 2048 positions only"),
        ({}, {"max_num_batched_tokens": 32}, "--max-num-batched-tokens is 32, to see"),
    ],
    ids=["a table that does not grow", "nothing to see it by"],
)
def test_a_model_whose_keys_can_not_move_is_refused(tmp_path, rope, options, why):
    rope = {"rope_parameters": {"rope_theta": 1e4, **rope}} if rope else {}
    model = save_llama(tmp_path, num_hidden_layers=2, **rope)
    said = rf"h2o_positions.*--h2o-positions.*{why}.*'text'"
    with pytest.raises(ValueError, match=said), engine(model, **(OPTIONS | options)):
        pass
