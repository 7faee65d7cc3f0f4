"""How much to draft: when a chain ends, how wide a pass is, which length."""
