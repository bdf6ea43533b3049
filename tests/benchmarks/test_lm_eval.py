"""lm_eval's own vLLM model takes H2O's options, and its generating tasks evict."""

import pytest

pytest.importorskip(
    "lm_eval", reason="pip install --no-deps -r requirements/quality.txt"
)

import vllm_h2o
from benchmarks.quality.ruler import have_tokenizer_of_sentences
from tests.engine.tiny_models import save_reading_llama
from vllm_h2o.core.settings import h2o_config

pytestmark = pytest.mark.engine


def test_model_args_reach_the_engine(tmp_path, monkeypatch):
    """The command is that of docs/benchmarks/lm-eval.md."""
    monkeypatch.setenv("VLLM_H2O_CALIBRATE", "0")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    have_tokenizer_of_sentences()
    from lm_eval import simple_evaluate
    from lm_eval.models.vllm_causallms import VLLM

    folder = save_reading_llama(tmp_path)
    lm = VLLM.create_from_arg_string(
        f"pretrained={folder},dtype=float32,max_model_len=1024,enforce_eager=True,"
        "block_size=32,kv_policy=h2o,h2o_budget=20%,h2o_min_budget=64"
    )
    try:
        config = h2o_config(lm.model.llm_engine.vllm_config)
        assert (config.policy, config.budget, config.min_budget) == ("h2o", "20%", 64)
        found = simple_evaluate(
            lm,
            tasks=["niah_single_1"],
            limit=2,
            metadata={"pretrained": str(folder), "max_seq_lengths": [512]},
        )
        assert found["n-samples"]["niah_single_1"]["effective"] == 2
        stats = vllm_h2o.stats(lm.model)
        assert stats["transitions"] == 2 and stats["tokens_evicted"] > 0
    finally:
        lm.model.llm_engine.engine_core.shutdown()
