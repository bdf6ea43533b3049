"""Measuring: what a model's KV heads lose, the gate, and where both are kept."""
