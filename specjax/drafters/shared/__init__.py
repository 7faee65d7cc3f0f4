"""Parts that several drafters share: drawn trees, likeliest trees, look-ups."""
