"""Flax (NNX) networks, their checkpoints, and the embedded pair."""
