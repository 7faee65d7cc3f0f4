r"""Serves a pair over an OpenAI-compatible HTTP API.

  python -m launch.serve --config=configs/smollm2.py:batch --port=8000 --slots=8

  curl localhost:8000/v1/completions -H "Content-Type: application/json" \
    -d '{"prompt": "def main(", "max_tokens": 32, "temperature": 0}'

/v1/completions, /v1/chat/completions and /v1/models follow OpenAI's API;
/health and /metrics (Prometheus) are for operators. See docs/serving.md.

A request gets a slot (a row of the running batch) as soon as one is free. Its
tokens depend only on its prompt, settings and seed, not on the other slots.

The server listens on 127.0.0.1 unless --host is given, and requires the bearer
token in $SPECJAX_API_KEY if that is set. After SIGTERM (or Ctrl-C) it rejects
new requests, finishes the running ones, and exits with code 0.

Several processes (see launch/processes.py) serve one model sharded by
config.mesh over their devices: process 0 takes the requests.
"""

import os
import pathlib
import sys
import time

from absl import flags

from launch import cli, processes
from launch.assembly import pair

try:
  from launch.serving import server
except ModuleNotFoundError as missing:
  if missing.name not in ("prometheus_client", "starlette", "uvicorn"):
    raise
  raise SystemExit(
    cli.fail(
      f"{missing.name} is not installed: {sys.executable} -m pip install -e "
      "'.[serve]'"
    )
  ) from None

# Host names that a server listening only on this machine accepts. Other names
# may belong to web sites that resolve here (DNS rebinding).
_LOCAL = ("localhost", "127.0.0.1", "[::1]")

cli.reads(cli.CONFIG)
_HOST = flags.DEFINE_string(
  "host", "127.0.0.1", "Address to listen on; 0.0.0.0 is open to everyone."
)
_PORT = flags.DEFINE_integer("port", 8000, "The port; 0 picks a free one.")
_SLOTS = flags.DEFINE_integer(
  "slots", 8, "Requests decoded at the same time.", lower_bound=1
)
_QUEUE = flags.DEFINE_integer(
  "queue", 64, "Requests that may wait for a slot.", lower_bound=0
)
_MAX_PROMPT = flags.DEFINE_integer(
  "max_prompt", 1024,
  "Maximum prompt tokens; a completion may add config.max_new_tokens.",
  lower_bound=1,
)  # fmt: skip
_SHARE = flags.DEFINE_boolean(
  "share_prefixes", True, "Reuse the KV cache of an earlier text with the same "
  "prefix. Response times then reveal the reuse.",
)  # fmt: skip
_ANSWER_SECONDS = flags.DEFINE_float(
  "answer_seconds", 600.0, "Maximum seconds per answer.", lower_bound=0.1
)
_DRAIN_SECONDS = flags.DEFINE_float(
  "drain_seconds", 30.0, "Seconds for running answers at shutdown."
)
_NAME = flags.DEFINE_string(
  "model_name", None, "The model's name; by default its checkpoint's."
)
_TEMPLATE = flags.DEFINE_string(
  "chat_template", None, "A Jinja file to use instead of the target's."
)
_DEPTHS = flags.DEFINE_enum(
  "depth_policy", "whole", server.POLICIES,
  "How deep slots draft: as in the config, or as deep as pays at the current "
  "load, given the requests' objectives (slo_ms_per_token).",
)  # fmt: skip


_ROWS = flags.DEFINE_enum(
  "rows", "all", ("all", "running"),
  "Slots that a round computes: all, or as many as decode, rounded up to a "
  "power of two; then neighbors may change a request's logits by rounding.",
)  # fmt: skip


def run(_) -> int:
  """The command."""
  begun = time.monotonic()

  def log(text: str) -> None:
    if processes.is_chief():
      print(f"{time.monotonic() - begun:6.1f} s: {text}", file=sys.stderr)

  config = cli.CONFIG.value
  config.batch_size = _SLOTS.value
  if processes.several() and not config.mesh:
    raise cli.UserError(
      "several processes serve one model sharded over their devices: give "
      "config.mesh, or start separate servers"
    )
  path = _TEMPLATE.value
  template = pathlib.Path(path).read_text("utf-8") if path else None
  listener = None
  if processes.is_chief():  # before minutes of compiling
    listener = server.bind(_HOST.value, _PORT.value)
  loaded = pair.load(config)
  for note in loaded.notes:
    log(note)
  slots = server.make_slots(
    config,
    loaded,
    num_slots=_SLOTS.value,
    max_prompt=_MAX_PROMPT.value,
    share_prefixes=_SHARE.value,
    depth_policy=_DEPTHS.value,
    rows=_ROWS.value,
    log=log,
  )
  if listener is None:
    server.follow(slots)
    return 0
  service = server.make_service(
    config, loaded, slots, queue=_QUEUE.value, depth_policy=_DEPTHS.value,
    name=_NAME.value, chat_template=template,
    token=os.environ.get("SPECJAX_API_KEY") or None,
    hosts=_LOCAL if _HOST.value in (*_LOCAL, "::1") else ("*",),
    answer_seconds=_ANSWER_SECONDS.value,
  )  # fmt: skip
  service.scheduler.start()
  port = listener.getsockname()[1]
  host = f"[{_HOST.value}]" if ":" in _HOST.value else _HOST.value
  with server.compiling_rest(slots, log):
    ended_well = server.run(
      service, listener, drain_seconds=_DRAIN_SECONDS.value,
      ready=lambda: log(
        f"serving {service.defaults.model} on http://{host}:{port}/ "
        f"({slots.num_slots} slots of {slots.max_length} tokens)"
      ),
    )  # fmt: skip
  if ended_well:
    return 0
  code = cli.fail("the loop has ended", 1)
  if processes.several():
    processes.leave(code)  # do not wait for others, which may have died
  return code


if __name__ == "__main__":
  cli.run(run, several_processes=True)
