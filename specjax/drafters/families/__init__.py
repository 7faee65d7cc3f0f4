"""Ways to draft, a file each; `specjax.drafters` has their functions."""
