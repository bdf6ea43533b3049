"""Quality under eviction, measured in the engine and beside its peers."""
