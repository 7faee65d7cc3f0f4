"""Readers and writers of checkpoints: Hugging Face, GGUF, heads, own runs."""
