"""Prompts whose dense blocks come from a KV connector, then compressed."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.helpers import assert_pool_whole, engine, generate
from tests.engine.tiny_models import random_prompts, save_heads, save_llama
from vllm_h2o import stats
from vllm_h2o.plugin.connectors import EXAMPLE

pytestmark = pytest.mark.engine

PROMPTS = random_prompts(200, 230, 260)


@pytest.mark.parametrize("policy", ["h2o", "streaming"])
def test_an_answer_to_a_prompt_that_is_loaded_is_that_to_one_that_is_read(
    policy, tmp_path
):
    """Tokens and survivors, in a batch and alone; by the gate with budgets by head."""
    save_heads(model := save_llama(tmp_path / "model"))
    store = tmp_path / "store"
    heads = {"h2o_head_budgets": "auto"} if policy == "h2o" else {}
    with engine(
        model,
        kv_policy=policy,
        h2o_budget=96,
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_batched_tokens=1024,
        enable_prefix_caching=True,
        num_gpu_blocks_override=64,
        kv_transfer_config={
            "kv_connector": EXAMPLE,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(store)},
        },
        **heads,
    ) as llm:
        read = outcomes(llm, PROMPTS)
        assert len(list(store.glob("*/*"))) == 4 * len(PROMPTS), "a file per layer"
        assert outcomes(llm, PROMPTS) == read
        assert outcomes(llm, PROMPTS[1:2]) == read[1:2]
        assert stats(llm)["transitions"] == 7
        for file in store.glob("*/*"):
            save_file(
                {k: torch.zeros_like(v) for k, v in load_file(file).items()}, file
            )
        pairs = zip(read, outcomes(llm, PROMPTS), strict=True)
        assert all(mine != theirs for mine, theirs in pairs), "it is what is loaded"
        assert_pool_whole(llm)


def test_attention_can_not_choose_beside_a_connector(tmp_path):
    """Without a gate it would be what the default comes to."""
    save_heads(model := save_llama(tmp_path / "model"), gated=False)
    with (
        pytest.raises(ValueError, match="--kv-transfer-config, and the head profile"),
        engine(
            model,
            kv_policy="h2o",
            h2o_budget=96,
            max_model_len=512,
            skip_tokenizer_init=True,
            kv_transfer_config={"kv_connector": EXAMPLE, "kv_role": "kv_both"},
        ),
    ):
        pass


def outcomes(llm, prompts):
    """Tokens and survivors of each prompt, of which the pool has nothing."""
    assert llm.reset_prefix_cache()
    llm.collective_rpc("probe_watch")
    tokens = generate(llm, prompts, 16)
    survivors = llm.collective_rpc("probe_survivors")[0]
    in_order = sorted(survivors, key=lambda name: int(name.partition("-")[0]))
    return list(zip(tokens, [survivors[name] for name in in_order], strict=True))
