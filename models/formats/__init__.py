"""Checkpoints of others, and ours: names of tensors, configurations, files."""
