"""Flax (NNX) modules, a file a family of layers."""
