"""Training objectives of drafts, and the loss of drafts that learn online."""
