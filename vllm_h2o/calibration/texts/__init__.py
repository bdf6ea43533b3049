"""The texts that an engine reads to measure its heads.

Those in files are copies that do not change, see SOURCES.md. One is made up here: a
log, and facts that are asked for later, so that heads which look things up show
themselves. Head budgets and gate of every model follow from these texts, and so do the
published figures.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
from pathlib import Path

FOLDER = Path(__file__).parent
MOST_TOKENS = 2048
"""That are read of a text: the least that vLLM's defaults let through in one step."""
_MOST_FACTS = 48
_NAMES = "alice bruno chen dora emil fatima".split()
_PATHS = "/v1/completions /health /metrics /v1/models /login".split()


def calibration_texts(num_tokens: int = MOST_TOKENS) -> dict[str, str]:
    """All texts by name, each of over `num_tokens` tokens of a usual vocabulary.

    Args:
        num_tokens: At most `MOST_TOKENS`. That many from the end hold what the facts
            say and what is asked of them.
    """
    found = {path.stem: path.read_text("utf-8") for path in FOLDER.glob("*.txt")}
    num_facts = _MOST_FACTS * num_tokens // MOST_TOKENS
    found["facts"] = _facts(random.Random(0), num_facts)
    return dict(sorted(found.items()))


@functools.cache
def digest() -> str:
    """Eight hexadecimal digits that tell these texts from any others."""
    texts = json.dumps(calibration_texts(), sort_keys=True)
    return hashlib.sha256(texts.encode()).hexdigest()[:8]


def _facts(generator: random.Random, num_facts: int) -> str:
    """A log as JSON, then codes of people, then questions for all of them."""
    choice, below = generator.choice, generator.randrange
    lines = [
        json.dumps(
            {
                "time": f"2024-05-{1 + n % 28:02}T{below(24):02}:{below(60):02}:00Z",
                "user": choice(_NAMES),
                "path": choice(_PATHS),
                "status": choice([200, 200, 200, 404, 500]),
                "ms": below(3, 900),
            }
        )
        for n in range(20)
    ]
    codes = {
        f"{choice(_NAMES)}-{below(100, 1000)}": below(10**5, 10**6)
        for _ in range(num_facts)
    }
    lines += [f"The code of {who} is {code}." for who, code in codes.items()]
    asked = generator.sample(sorted(codes), len(codes))
    lines += [f"What is the code of {who}? It is {codes[who]}." for who in asked]
    return "\n".join(lines)
