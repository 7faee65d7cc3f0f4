"""The server of `launch.serve`: OpenAI's HTTP API over slots that refill.

From the device up: `control` has the orders for one iteration, `slots` carries
them out, and `scheduler` gives them, on the one thread that owns the device;
for offline work `jobs` gives them. `fields`, `schemas`, `texts` and `answers`
translate from and to OpenAI's form; `http`, `limits` and `server` are the web
server.
"""
