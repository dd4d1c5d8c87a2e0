"""Several processes, one training: who holds what, what they exchange, and checkpoints of parts."""
