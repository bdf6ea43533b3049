"""A chat of ten turns: each goes on from what the one before has held.

python examples/conversation.py path/to/model

The model has to have a chat template, and full attention in all of its layers.
"""

import sys
from pathlib import Path

from vllm import LLM, SamplingParams

TEXT = (Path(__file__).parents[1] / "docs" / "operations.md").read_text()
QUESTIONS = [
    f"{TEXT[:5000]}\n\nWhat is this text about?",
    "For whom is it written?",
    "Which options does it name?",
    "What can go wrong?",
    "What should be watched?",
    "What does it say about memory?",
    "What does it say about prompts?",
    "Which numbers does it give?",
    "What is missing?",
    "Sum it up in one sentence.",
]


def main(model: str) -> None:
    """Print each answer, and how many tokens of its prompt were not read."""
    llm = LLM(model, enable_h2o=True, h2o_keep="end", max_model_len=4096)
    wishes = {"continue": True, "report": True}
    parameters = SamplingParams(
        max_tokens=48, temperature=0, extra_args={"h2o": wishes}
    )
    messages: list[dict[str, str]] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        (answer,) = llm.chat(messages, parameters, use_tqdm=False)
        text, report = answer.outputs[0].text, answer.kv_transfer_params["h2o"]
        messages.append({"role": "assistant", "content": text})
        length, known = len(answer.prompt_token_ids), report["tokens_continued"]
        print(f"{length} tokens, {known} not read: {text.strip()[:80]!r}")


if __name__ == "__main__":
    main(sys.argv[1])
