"""What several drafters share: drawn trees, likeliest trees, lookups."""
