"""Flax (NNX) modules, one file per family of layers."""
