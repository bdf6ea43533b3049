"""The token ids of the texts that a model is measured on."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.tokenizers import cached_tokenizer_from_config

from vllm_h2o.calibration.ranks import of_first_rank
from vllm_h2o.calibration.texts import calibration_texts, digest
from vllm_h2o.policy.options import shortened

logger = init_logger(f"vllm.{__name__}")

NUM_SEEDED_TEXTS = 4


def texts_to_read(model_config: Any, length: int) -> tuple[list[list[int]], str]:
    """Token ids of texts, all of one length, and what these are.

    Those of `vllm_h2o.calibration.texts`; random ones where the engine has no
    tokenizer, or one that makes too few tokens of them. All ranks have the first one's.
    """
    texts: list[list[int]] = []
    if get_tensor_model_parallel_rank() == 0:
        try:
            texts = _tokenized(model_config, length)
        except Exception as error:
            logger.warning_once("H2O can not tokenize its texts: %s", shortened(error))
    if texts := of_first_rank(texts):
        return texts, f"tokens (vllm-h2o's, {digest()})"
    return seeded_texts(model_config, length), "random token ids"


def _tokenized(model_config: Any, length: int) -> list[list[int]]:
    """The ends of the texts, where what is asked for has been said before."""
    tokenizer = cached_tokenizer_from_config(model_config)
    if tokenizer is None:
        return []
    start = _first_ids(model_config)
    ids = [
        tokenizer.encode(text, add_special_tokens=False)
        for text in calibration_texts(length).values()
    ]
    cut = [start + list(each)[len(start) - length :] for each in ids]
    return cut if all(len(each) == length for each in cut) else []


def _first_ids(model_config: Any) -> list[int]:
    """What prompts of the model begin with, if anything."""
    first = getattr(model_config.hf_text_config, "bos_token_id", None)
    if isinstance(first, int) and 0 <= first < model_config.get_vocab_size():
        return [first]
    return []


def seeded_texts(model_config: Any, length: int) -> list[list[int]]:
    """Random token ids that every start has alike; each says its first half twice.

    So heads that look up what stood before show themselves.
    """
    generator = torch.Generator().manual_seed(0)
    size = model_config.get_vocab_size()
    # Special and unused tokens sit at both ends of a vocabulary.
    low, high = size // 50, max(9 * size // 10, size // 50 + 1)
    start, texts = _first_ids(model_config), []
    for _ in range(NUM_SEEDED_TEXTS):
        half = torch.randint(low, high, ((length + 1) // 2,), generator=generator)
        texts.append((start + 2 * half.tolist())[:length])
    return texts
