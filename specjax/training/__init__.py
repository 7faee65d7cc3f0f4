"""What a draft is trained for, and what it learns while it decodes."""
