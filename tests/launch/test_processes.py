"""Several processes of one run."""

import json
import signal
import subprocess
import sys
import threading

import pytest
import several
from absl import flags
from absl.testing import flagsaver
from files import read_jsonl, write_jsonl

from launch import cli, decode, processes, without_tpu

pytestmark = pytest.mark.usefixtures("quick_to_compile")
_NAMES = (
  "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID",
  "TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES", "MEGASCALE_NUM_SLICES",
  "JAX_PLATFORMS",
)  # fmt: skip


@pytest.fixture
def joins(monkeypatch):
  """Calls of jax by `start`, under given flags and environment."""

  def call(*args, act=processes.start, chips=(), metadata="", **environment):
    for name in _NAMES:
      monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
      monkeypatch.setenv(name, value)
    asked = []
    monkeypatch.setattr(
      processes.jax.distributed, "initialize", lambda **how: asked.append(how)
    )
    monkeypatch.setattr(
      processes.jax.config, "update", lambda *names: asked.append(names)
    )
    monkeypatch.setattr(
      without_tpu.glob, "glob", lambda p: [c for c in chips if c[:9] == p[:9]]
    )
    monkeypatch.setattr(processes, "_metadata", lambda: metadata)
    with flagsaver.flagsaver():
      flags.FLAGS(["test", *args])
      act()
    return asked[-1] if asked else None

  return call


_TPU = dict(chips=["/dev/accel0"])


@pytest.mark.parametrize(
  "how",
  [
    dict(),
    dict(metadata="10.0.0.1,10.0.0.2"),  # no chip: some other machine
    dict(**_TPU, metadata="worker-0"),
    dict(**_TPU),  # the metadata server does not answer
    dict(**_TPU, TPU_WORKER_HOSTNAMES="a,b", JAX_PLATFORMS="cpu"),
    dict(args=["--distributed=off"], JAX_COORDINATOR_ADDRESS="a:1"),
    dict(args=["--distributed=off"], **_TPU, metadata="a,b"),
  ],
)
def test_a_single_process_joins_nothing(joins, how):
  assert joins(*how.pop("args", ()), **how) is None


@pytest.mark.parametrize(
  "how",
  [
    dict(**_TPU, metadata="worker-0,worker-1"),
    dict(chips=["/dev/vfio/0"], TPU_WORKER_HOSTNAMES="a,b"),
    dict(**_TPU, TPU_PROCESS_ADDRESSES="a:1,b:1"),
    dict(**_TPU, TPU_WORKER_HOSTNAMES="a", MEGASCALE_NUM_SLICES="2"),
    dict(args=["--distributed=on"]),
  ],
)
def test_on_a_slice_of_several_workers_jax_finds_them_itself(joins, how):
  asked = joins(*how.pop("args", ()), "--heartbeat_timeout=7", **how)
  assert asked["heartbeat_timeout_seconds"] == 7
  assert (
    asked["coordinator_address"],
    asked["num_processes"],
    asked["process_id"],
  ) == (None, None, None)


def test_settings_come_from_flags_and_then_from_the_environment(joins):
  asked = joins(
    "--process_id=0",
    JAX_COORDINATOR_ADDRESS="host:1234",
    JAX_NUM_PROCESSES="3",
    JAX_PROCESS_ID="2",
  )
  assert asked["coordinator_address"] == "host:1234"
  assert asked["num_processes"] == 3
  assert asked["process_id"] == 0
  assert asked["heartbeat_timeout_seconds"] <= 45  # "within a minute"


@pytest.mark.parametrize(
  ("args", "environment", "words"),
  [
    ([], {"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES must be a number"),
    (["--coordinator_address=host"], {}, "must be HOST:PORT, got 'host'"),
    (["--num_processes=2", "--process_id=0"], {}, "the address of process 0"),
  ],
)
def test_half_a_setting_is_refused(joins, args, environment, words):
  with pytest.raises(ValueError, match=words):
    joins(*args, **environment)


def test_others_that_do_not_come_are_no_mistake_in_the_command(
  joins, monkeypatch, capsys
):
  """Exit code 1: a worker of a slice tries it again."""

  def waits(**_):
    raise RuntimeError("DEADLINE_EXCEEDED: Barrier timed out.")

  def start(_):
    monkeypatch.setattr(processes.jax.distributed, "initialize", waits)
    processes.start()

  codes = []
  joins(
    act=lambda: codes.append(cli._guarded(start, ["test"])),
    JAX_COORDINATOR_ADDRESS="a:1",
  )
  assert codes == [1]
  (line,) = capsys.readouterr().err.splitlines()
  assert "--distributed=auto cannot join the other processes (DEADLINE" in line


def test_on_without_anything_to_join_is_one_line_and_exit_code_2():
  done = subprocess.run(
    [sys.executable, "-m", "launch.decode", "--distributed=on",
     "--config=configs/embedded.py"],
    cwd=several.ROOT, capture_output=True, text=True, check=False,
    timeout=several.PATIENCE,
  )  # fmt: skip
  assert done.returncode == 2
  (line,) = done.stderr.strip().splitlines()
  assert "--distributed=on cannot join the other processes" in line
  assert "--coordinator_address=HOST:PORT" in line


def test_a_command_of_one_process_refuses_to_be_one_of_several():
  (process,) = several.start(
    [["-m", "launch.studies.audit"]], JAX_NUM_PROCESSES="2"
  )
  ((code, _, errors),) = several.finish([process])
  assert code == 2
  (line,) = errors.strip().splitlines()
  assert "this command is of one process" in line
  assert "--distributed=off" in line


@pytest.mark.parametrize(
  ("how", "refused"),
  [
    (dict(), False),
    (dict(args=["--distributed=on"]), True),
    (dict(args=["--distributed=on", "--num_processes=1"]), False),
    (dict(JAX_COORDINATOR_ADDRESS="a:1"), True),
    (dict(args=["--distributed=off"], JAX_COORDINATOR_ADDRESS="a:1"), False),
    (dict(**_TPU, metadata="worker-0,worker-1"), True),
  ],
)
def test_what_counts_as_one_of_several(joins, how, refused):
  start = lambda: joins(*how.pop("args", ()), act=processes.refuse, **how)
  if refused:
    with pytest.raises(ValueError, match="of one process, but was started"):
      start()
  else:
    assert start() is None


def test_several_processes_decode_shares_and_the_first_writes(
  pair, cli, tmp_path
):
  texts = ["def f(x):\n", "import os", "class A:", "x", "for"]
  prompts = write_jsonl(
    tmp_path / "in.jsonl", [{"id": [t], "prompt": t} for t in texts]
  )
  settings = (
    "--config.max_new_tokens=12", "--config.drafter=model(tokens=3)",
    "--config.temperature=1", f"--prompts={prompts}", "--nobaseline",
  )  # fmt: skip
  alone = tmp_path / "alone.jsonl"
  assert cli(decode.run, *settings, f"--output={alone}") == 0
  done = several.finish(
    several.start(
      [
        ["-m", "launch.decode",
         f"--config=configs/huggingface.py:target={pair[0]},draft={pair[1]}",
         *settings, f"--output={tmp_path}/{i}.jsonl",
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

cli.reads(*processes.FLAGS)

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
    pytest.param(1, signal.SIGTERM, marks=pytest.mark.heavy),
  ],
)
def test_when_one_is_killed_the_other_stops_with_a_message(
  tmp_path, victim, how
):
  """SIGTERM too ends a process that does not ask for notice of it."""
  started = _waiting(tmp_path, "waits")
  started[victim].send_signal(how)
  done = several.finish(started)
  assert done[victim][0] == -how
  code, _, err = done[1 - victim]
  assert code not in (0, None)
  assert "another task died" in err


def test_when_one_fails_alone_the_other_stops(tmp_path):
  (code, _, err), (own_code, _, own_err) = several.finish(
    _waiting(tmp_path, "raises")
  )
  assert own_code == 2
  assert "error: process 1: no such thing" in own_err
  assert code not in (0, None)
  assert "another task died" in err


def test_gathering_alone_is_a_list_of_one():
  assert processes.gather({"a": [1, "é"]}) == [{"a": [1, "é"]}]
  assert processes.is_chief()


def test_every_batch_is_decoded_once_whatever_the_number_of_processes(
  monkeypatch,
):
  """Two processes in lockstep, as `gather` sees them."""
  shares = []
  for rank in range(2):
    mine = []
    monkeypatch.setattr(processes, "several", lambda: True)
    monkeypatch.setattr(processes.jax, "process_index", lambda rank=rank: rank)
    monkeypatch.setattr(processes.jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes, "gather", lambda value: [value])
    list(
      processes.round_robin(
        list(range(7)),
        lambda number, part, mine=mine: (
          mine.append((number, part)) or {"batch": part}
        ),
        together=False,
      )
    )
    shares.append(mine)
  # Each counts its own: of two engines that take turns at going first, none
  # goes first always.
  assert shares == [
    [(0, 0), (1, 2), (2, 4), (3, 6)],
    [(0, 1), (1, 3), (2, 5)],
  ]
