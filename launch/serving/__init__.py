"""`launch.serve`: slots that refill, behind OpenAI's HTTP surface.

From the device up: `control` says what is done in one visit, `slots` does it,
and `scheduler` decides it on the one thread that owns the device; `jobs` does,
where there is work of a known amount and nobody waits for any of it. `asking`,
`texts` and `answers` are OpenAI's words for it; `http` and `limits` carry them.
"""
