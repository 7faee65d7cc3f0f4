"""Adaptive draft lengths: depth policies, pass widths, a ladder of lengths."""
