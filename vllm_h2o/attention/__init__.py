"""Choosing: which tokens stay, computed on the workers, per layer and KV head."""
