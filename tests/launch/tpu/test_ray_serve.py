"""Two replicas under Ray Serve, one of which is killed; needs `ray[serve]`."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile

import pytest
import several

pytestmark = pytest.mark.heavy

_PROGRAM = """
import json, os, pathlib, signal, sys, time, urllib.request
import ray
from ray import serve

port = int(sys.argv[1])
ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
serve.start(http_options={"port": port, "host": "127.0.0.1"})
from launch.tpu import ray_serve
serve.run(ray_serve.app)

def ask(wait=120):
  body = {"prompt": "import os", "max_tokens": 12, "temperature": 1, "seed": 5}
  request = urllib.request.Request(
    f"http://127.0.0.1:{port}/v1/completions", data=json.dumps(body).encode(),
    headers={"Content-Type": "application/json"})
  with urllib.request.urlopen(request, timeout=wait) as answer:
    return json.loads(answer.read())["choices"][0]["text"]

def replicas():
  found = []
  for file in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
      if file.read_bytes().startswith(b"ray::ServeReplica"):
        found.append(int(file.parent.name))
    except OSError:
      pass
  return found

before, first = [ask() for _ in range(6)], replicas()
os.kill(first[0], signal.SIGKILL)
after, end = [], time.monotonic() + 120
while len(after) < 6 and time.monotonic() < end:
  try:
    after.append(ask())
  except OSError:
    time.sleep(0.5)
while len(replicas()) < 2 and time.monotonic() < end:
  time.sleep(0.5)
print(json.dumps({"before": before, "first": first, "after": after,
                  "last": replicas()}), flush=True)
serve.shutdown()
ray.shutdown()
"""


@pytest.mark.skipif(
  not importlib.util.find_spec("ray"), reason="ray is not installed"
)
def test_two_replicas_answer_alike_and_survive_the_death_of_one():
  # Names of Ray's sockets have 107 bytes at most: no folder of pytest's.
  with tempfile.TemporaryDirectory(prefix="ray") as short:
    done = _with_ray(short)
  assert done.returncode == 0, done.stderr[-4000:]
  # Ray has things to say after it.
  (line,) = (x for x in done.stdout.splitlines() if x.startswith('{"before"'))
  record = json.loads(line)
  assert len(record["first"]) == 2
  assert len({*record["before"], *record["after"]}) == 1
  assert len(record["after"]) == 6
  assert len(record["last"]) == 2
  assert {*record["last"]} != {*record["first"]}


def _with_ray(folder: str) -> subprocess.CompletedProcess:
  return subprocess.run(
    [sys.executable, "-c", _PROGRAM, str(several.free_port())],
    cwd=several.ROOT, capture_output=True, text=True, timeout=580,
    env={
      **os.environ, "JAX_PLATFORMS": "cpu", "SPECJAX_SLOTS": "2",
      "SPECJAX_MAX_PROMPT": "32", "SPECJAX_REPLICAS": "2",
      "PYTHONPATH": str(several.ROOT), "RAY_TMPDIR": folder,
      "RAY_AUTH_MODE": "disabled",
    },
  )  # fmt: skip
