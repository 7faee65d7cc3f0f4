"""Training objectives for drafts, and the loss for online learning."""
