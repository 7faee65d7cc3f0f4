"""Readers and writers of checkpoints: Hugging Face, GGUF, and draft heads."""
