"""A chat with a budget of its own, and one that keeps everything, over HTTP.

vllm serve path/to/model --kv-policy h2o --h2o-budget 512
python examples/openai_client.py http://localhost:8000 256
"""

import sys
from typing import Any

from openai import OpenAI

QUESTION = "Name three colours. " * 60


def main(server: str, budget: str) -> None:
    """Print what each chat got, and its answer."""
    client = OpenAI(base_url=f"{server}/v1", api_key="none")
    model = client.models.list().data[0].id
    asked: list[dict[str, Any]] = [{"h2o_budget": budget}, {"h2o_policy": "full"}]
    for asks in asked:
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=32,
            extra_body={"vllm_xargs": {**asks, "h2o_report": True}},
        )
        print(asks, "got", answer.kv_transfer_params["h2o"])
        print("   ", answer.choices[0].message.content)


if __name__ == "__main__":
    main(*sys.argv[1:])
