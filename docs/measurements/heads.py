"""Trains a head for some seconds of processor time; see heads.sh.

  heads.py FOLDER SECONDS FLAG...

Runs `launch.train` with the flags, at a constant learning rate, until the
process has used SECONDS of processor time after its second step, so compiling
does not count. It then exports FOLDER/head. The number of steps is written to
FOLDER/steps; where that exists, training takes as many.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

_POLL = 0.2  # seconds


def used(pid: int) -> float:
  """Processor seconds of a process."""
  fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1]
  user, system = map(int, fields.split()[11:13])
  return (user + system) / os.sysconf("SC_CLK_TCK")


def steps_of(folder: pathlib.Path) -> int:
  """The last step in a run's metrics, 0 if there is none."""
  path = folder / "metrics.jsonl"
  if not path.is_file():
    return 0
  whole, _, _ = path.read_text("utf-8").rpartition("\n")
  return json.loads(whole.rpartition("\n")[2])["step"] if whole else 0


def main(folder: pathlib.Path, seconds: float, flags: list[str]) -> None:
  """Trains, and writes the number of steps."""
  run, known = folder / "run", folder / "steps"
  command = [sys.executable, "-m", "launch.train", f"--workdir={run}", *flags]
  command += ["--config.log_every=1", "--config.decay_share=0"]
  if not known.is_file():
    folder.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen([*command, "--config.num_steps=100000"])
    begun = None
    while begun is None or used(process.pid) - begun < seconds:
      time.sleep(_POLL)
      if process.poll() is not None:
        sys.exit(process.returncode)
      if begun is None and steps_of(run) >= 2:
        begun = used(process.pid)
    process.send_signal(signal.SIGTERM)
    process.wait()
    known.write_text(f"{steps_of(run)}\n")
  subprocess.run(
    [*command, f"--config.num_steps={known.read_text().strip()}",
     f"--export={folder / 'head'}"],
    check=True,
  )  # fmt: skip


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:])
