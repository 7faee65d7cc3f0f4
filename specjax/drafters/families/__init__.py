"""Ways to draft, one file each; `specjax.drafters` has their functions."""
