"""One engine, four requests: the engine's budget, two of their own, and the full cache.

python examples/offline.py path/to/model
"""

import sys
from pathlib import Path

from vllm import LLM, SamplingParams

TEXT = (Path(__file__).parents[1] / "README.md").read_text()
PROMPT = f"{TEXT[:5000]}\n\nWhat this is, in one sentence:"
REQUESTS = [{}, {"budget": 256}, {"budget": "20%"}, {"policy": "full"}]


def main(model: str) -> None:
    """Print what each request got, and its answer."""
    llm = LLM(model, enable_h2o=True, h2o_budget=512, max_model_len=2048)
    parameters = [
        SamplingParams(
            max_tokens=48, temperature=0, extra_args={"h2o": {**asks, "report": True}}
        )
        for asks in REQUESTS
    ]
    answers = llm.generate([PROMPT] * len(REQUESTS), parameters)
    for asks, answer in zip(REQUESTS, answers, strict=True):
        print(asks, "got", answer.kv_transfer_params["h2o"])
        print("   ", answer.outputs[0].text.strip()[:200])


if __name__ == "__main__":
    main(sys.argv[1])
