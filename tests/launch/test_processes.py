"""Several processes of one run."""

import json
import signal
import threading

import pytest
import several
from absl import flags
from absl.testing import flagsaver
from files import read_jsonl, write_jsonl

from launch import decode, processes, without_tpu

_NAMES = (
  "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID",
  "JAX_PLATFORMS",
)  # fmt: skip


BY_HAND = dict(
  JAX_COORDINATOR_ADDRESS="a:1", JAX_NUM_PROCESSES="3", JAX_PROCESS_ID="0"
)


@pytest.mark.parametrize(
  ("flag", "how", "numbers"),
  [
    ("auto", dict(), None),
    ("auto", dict(tpu=True, JAX_PLATFORMS="cpu"), None),
    ("off", dict(tpu=True), None),
    ("off", BY_HAND, None),
    ("auto", dict(tpu=True), (None, None)),  # jax finds them itself
    ("on", dict(), (None, None)),
    ("auto", BY_HAND, (3, 0)),
  ],
)
def test_distributed_initializes_only_when_needed(
  monkeypatch, flag, how, numbers
):
  for name in _NAMES:
    monkeypatch.delenv(name, raising=False)
  has_tpu = how.get("tpu", False)
  for name in how.keys() - {"tpu"}:
    monkeypatch.setenv(name, how[name])
  asked = []
  monkeypatch.setattr(
    processes.jax.distributed, "initialize", lambda **given: asked.append(given)
  )
  monkeypatch.setattr(processes.jax.config, "update", lambda *_: None)
  monkeypatch.setattr(without_tpu, "has_tpu", lambda: has_tpu)
  with flagsaver.flagsaver():
    flags.FLAGS(["test", f"--distributed={flag}", "--heartbeat_timeout=7"])
    processes.start()
  assert [
    (x["num_processes"], x["process_id"], x["heartbeat_timeout_seconds"])
    for x in asked
  ] == ([] if numbers is None else [(*numbers, 7)])


def test_processes_split_rows_and_the_first_writes_the_output(
  pair, cli, tmp_path
):
  """Models are cut within each, rows across."""
  texts = ["def f(x):\n", "import os", "class A:", "x", "for"]
  prompts = write_jsonl(
    tmp_path / "in.jsonl", [{"id": [t], "prompt": t} for t in texts]
  )
  settings = (
    "--config.max_new_tokens=12", "--config.drafter=model(tokens=3)",
    "--config.temperature=1", "--config.batch_size=2", f"--prompts={prompts}",
    "--nobaseline",
  )  # fmt: skip
  alone = tmp_path / "alone.jsonl"
  assert cli(decode.run, *settings, f"--output={alone}") == 0
  done = several.finish(
    several.start(
      [
        ["-m", "launch.decode",
         f"--config=configs/huggingface.py:target={pair[0]},draft={pair[1]}",
         *settings, "--config.mesh=data:2,model:2",
         f"--output={tmp_path}/{i}.jsonl",
         f"--summary={tmp_path}/{i}.json"]
        for i in range(2)
      ],
      devices=2,
    )
  )  # fmt: skip
  for number, (code, out, err) in enumerate(done):
    assert code == 0, err
    assert f"process {number} of 2: 2 local of 4 devices" in err
    assert ("block efficiency" in out) == (number == 0)
  assert (tmp_path / "0.jsonl").read_text() == alone.read_text()
  summary = json.loads((tmp_path / "0.json").read_text())
  assert summary["num_tokens"] == sum(
    len(row["token_ids"]) for row in read_jsonl(alone)
  )
  assert not list(tmp_path.glob("1.*"))


# A command whose processes meet once and then wait for each other in vain.
_WAITS = """
import time
from launch import cli, processes

def run(_):
  processes.gather(None)
  print("met", flush=True)
  if MODE == "raises" and not processes.is_chief():
    time.sleep(1)
    raise cli.UserError("no such thing")
  time.sleep(1000)

cli.run(run, required=(), several_processes=True)
"""


def _waiting(tmp_path, mode):
  script = tmp_path / "waits.py"
  script.write_text(f"MODE = {mode!r}\n{_WAITS}")
  started = several.start(
    [[script, "--heartbeat_timeout=4"]] * 2, PYTHONPATH=str(several.ROOT)
  )
  watchdog = threading.Timer(
    several.PATIENCE, lambda: [p.kill() for p in started]
  )
  watchdog.start()
  for process in started:
    while "met" not in (line := process.stdout.readline()):
      assert line, process.stderr.read()
  watchdog.cancel()
  return started


@pytest.mark.parametrize(
  ("victim", "how"),
  [
    (0, signal.SIGKILL),
    pytest.param(1, signal.SIGTERM, marks=pytest.mark.slow),
  ],
)
def test_killed_process_stops_its_peer_with_a_message(tmp_path, victim, how):
  """SIGTERM too ends a process that does not ask for notice of it."""
  started = _waiting(tmp_path, "waits")
  started[victim].send_signal(how)
  done = several.finish(started)
  assert done[victim][0] == -how
  code, _, err = done[1 - victim]
  assert code not in (0, None)
  assert "another task died" in err


def test_failing_process_stops_its_peer(tmp_path):
  (code, _, err), (own_code, _, own_err) = several.finish(
    _waiting(tmp_path, "raises")
  )
  assert own_code == 2
  assert "error: process 1: no such thing" in own_err
  assert code not in (0, None)
  assert "another task died" in err
