"""The head profile of SmolLM2 that this repository ships.

    python -m benchmarks.quality.calibration

Measured on the second text of each kind; the quality grid reads the first.
"""

from __future__ import annotations

import torch

from benchmarks.quality.texts import texts
from benchmarks.smollm2 import PROFILE, ensure_model
from vllm_h2o.calibrate import CONTEXT_TOKENS, measure


def main() -> None:
    """Measure and write the profile."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = ensure_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    samples = [found[1] for found in texts(tokenizer, CONTEXT_TOKENS, 2).values()]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    measure(model, samples, folder.name).save(PROFILE)


if __name__ == "__main__":
    main()
