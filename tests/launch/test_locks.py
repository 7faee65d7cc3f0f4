"""One writer at a time."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys

import pytest
import several

from launch import locks

_HOLDS = """
import pathlib, sys, time
from launch import locks
with locks.Lock(pathlib.Path(sys.argv[1]), what="W"):
  print("held", flush=True)
  time.sleep(100)
"""


@pytest.fixture
def lock(tmp_path):
  return lambda: locks.Lock(tmp_path / "lock", what="W")


def test_a_lock_is_gone_when_it_is_given_back(lock, tmp_path):
  for _ in range(2):
    with contextlib.suppress(KeyError), lock():
      assert (tmp_path / "lock").exists()
      raise KeyError
    assert not (tmp_path / "lock").exists()


def test_the_second_is_told_who_holds_it_until_that_is_killed(
  lock, tmp_path, capsys
):
  holder = subprocess.Popen(
    [sys.executable, "-c", _HOLDS, tmp_path / "lock"], cwd=several.ROOT,
    stdout=subprocess.PIPE, text=True,
  )  # fmt: skip
  try:
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match="W is being written by") as refused:
      lock().__enter__()
    assert f"process {holder.pid} on {socket.gethostname()}" in str(
      refused.value
    )
  finally:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
  with lock():
    found = json.loads((tmp_path / "lock").read_text())
    assert found["pid"] == os.getpid()
    assert found.keys() == {"host", "pid", "started", "command"}
  said = capsys.readouterr().err
  assert (
    f"took over the lock of W, which was not given back by process {holder.pid}"
    in said
  )


@pytest.mark.parametrize("text", ["", "{", "[3]", '{"host": "other"}'])
def test_what_a_dead_process_left_behind_locks_nothing(lock, tmp_path, text):
  (tmp_path / "lock").write_text(text)
  with lock():
    assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()


def test_a_lock_that_is_deleted_while_it_is_taken_is_taken_anew(
  lock, tmp_path, monkeypatch
):
  """The holder before deletes its file between our opening and locking it."""
  real, times = locks.fcntl.flock, []

  def flock(file, how):
    if not times:
      (tmp_path / "lock").unlink()
    times.append(how)
    real(file, how)

  monkeypatch.setattr(locks.fcntl, "flock", flock)
  with lock():
    assert len(times) == 2
    assert (tmp_path / "lock").exists()


def test_where_nothing_can_be_locked_it_is_said(lock, monkeypatch, capsys):
  def flock(*_):
    raise OSError(locks.errno.ENOLCK, "No locks available")

  monkeypatch.setattr(locks.fcntl, "flock", flock)
  with lock():
    assert "cannot lock W (No locks available)" in capsys.readouterr().err
