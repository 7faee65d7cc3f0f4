"""The server of `launch.serve`: OpenAI's HTTP API with continuous batching.

From the device up: `programs` are compiled for the slots, `control` has the
orders for one iteration, `slots` carries them out (with `prefixes`, the prefix
cache), and `scheduler` gives them by `objectives`, on the one thread that owns
the device. `schemas` and `answers` translate from and to OpenAI's format;
`http` and `metrics` are the web server, and `server` builds all of it.
"""
