"""Configs without weights, for tests that make an engine's config and no engine."""

from pathlib import Path

SMOLLM2 = Path(__file__).parent / "smollm2"
"""The shape of SmolLM2-135M: 30 layers, 9 query heads on 3 KV heads of 64."""
