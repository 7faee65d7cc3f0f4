"""Looks for sub-layers that a target may skip when it drafts for itself."""
