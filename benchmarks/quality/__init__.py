"""Quality of eviction policies: ours in the engine, the peers on the same work."""
