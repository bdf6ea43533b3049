"""Generate on one path and print the result: `python -m tests.gpu_path.engine JSON`.

CUDA's paths need a process of their own, because the choice of triton and of the runner
is the process's.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

H2O = "vllm_h2o.core.scheduler.H2OScheduler"
WORKERS = {
    "cpu": "vllm_h2o.plugin.cpu_worker.H2OCPUWorker",
    "v1": "tests.gpu_path.workers.InterpretedWorker",
    "v2": "tests.gpu_path.workers.InterpretedWorker",
    "v2 graphs": "tests.gpu_path.workers.GraphedWorker",
}
# Two can not outgrow the budget, one fills it while it generates, one starts beyond. In
# chunks of 32 two prompts end with a step of one token, the longest beside decodes.
LENGTHS, NUM_TOKENS = (20, 90, 129, 33), 9


def result_of(
    path: str,
    model: str,
    policy: dict[str, Any],
    options: dict[str, Any],
    lengths: Sequence[int] = LENGTHS,
    num_tokens: int = NUM_TOKENS,
    asked: Sequence[int] = (),
) -> dict[str, Any]:
    """Run an engine on prompts of these lengths, of which the first ask for budgets;
    `{"tokens": ..., ...}`."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(path.startswith("v2")))
    if path != "cpu":
        import tests.gpu_path.interpreted  # noqa: F401
    from benchmarks.forcing import processor
    from tests.engine.helpers import assert_pool_whole, engine, greedy
    from tests.engine.tiny_models import random_prompts

    drafts = "speculative_config" in options
    settings = {
        "logits_processors": [] if drafts else [processor()],
        "max_model_len": 256, "max_num_seqs": 6, "skip_tokenizer_init": True,
        "additional_config": {"h2o": policy}, "scheduler_cls": H2O,
        "worker_cls": WORKERS[path],
    }  # fmt: skip
    with engine(Path(model), **(settings | options)) as llm:
        result = {}
        if path != "cpu":
            result["warmed_up"] = llm.collective_rpc("probe_ops")[0]
        llm.collective_rpc("probe_watch")
        wishes = [{"h2o_budget": budget} for budget in asked]
        wishes += [{}] * (len(lengths) - len(asked))
        parameters = [
            greedy(num_tokens, logprobs=0, flat_logprobs=True, extra_args=each)
            for each in wishes
        ]
        prompts = [{"prompt_token_ids": ids} for ids in random_prompts(*lengths)]
        outputs = [x.outputs[0] for x in llm.generate(prompts, parameters)]
        result["tokens"] = [list(output.token_ids) for output in outputs]
        result["logprobs"] = [list(output.logprobs.logprobs) for output in outputs]
        # By request id, which has a random end.
        survivors = llm.collective_rpc("probe_survivors")[0]
        result["survivors"] = [survivors[name] for name in sorted(survivors)]
        if policy.get("keep"):
            result["next"] = next_turn(llm, prompts[1], outputs[1], num_tokens)
        assert_pool_whole(llm)
        profile = llm.collective_rpc("h2o_profile")[0]
        result["errors"] = profile and profile.errors
        result["stats"] = llm.collective_rpc("h2o_stats")[0]
        if not drafts:
            result |= forced_result(llm, Path(model) / f"forced by {path}.json")
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        result["runner"] = type(runner).__module__
        if path == "v1":
            result["one_token_steps"] = llm.collective_rpc("probe_one_token_steps")[0]
        if "graphs" in path:
            result["graphs"] = llm.collective_rpc("probe_graphs")[0]
    return result


def forced_result(llm: Any, record: Path) -> dict[str, Any]:
    """Forced tokens, and what the model thought of them.

    Args:
        llm: With the processor of `benchmarks.forcing`.
        record: A file that the processor writes.
    """
    from benchmarks.forcing import forced
    from tests.engine.tiny_models import random_prompts

    prompts = [{"prompt_token_ids": ids} for ids in random_prompts(9, 130)]
    given = [forced([7] * 3), forced([*range(9)], record_path=str(record))]
    outputs = llm.generate(prompts, given)
    return {
        "given": [list(x.outputs[0].token_ids) for x in outputs],
        "forced": json.loads(record.read_text())["logprobs"],
    }


def next_turn(llm: Any, prompt: Any, answer: Any, num_tokens: int) -> dict[str, Any]:
    """Tokens and survivors of a turn that goes on from this one."""
    from tests.engine.helpers import greedy
    from tests.engine.tiny_models import random_prompts

    (more,) = random_prompts(70)
    turn = prompt["prompt_token_ids"] + list(answer.token_ids) + more
    asks = {"h2o": {"continue": True, "report": True}}
    llm.collective_rpc("probe_watch")
    parameters = greedy(num_tokens, extra_args=asks)
    (output,) = llm.generate([{"prompt_token_ids": turn}], parameters)
    (survivors,) = llm.collective_rpc("probe_survivors")[0].values()
    return {
        "tokens": list(output.outputs[0].token_ids),
        "survivors": survivors,
        "continued": output.kv_transfer_params["h2o"]["tokens_continued"],
    }


if __name__ == "__main__":
    print(json.dumps(result_of(**json.loads(sys.argv[1]))))
