"""A helper process that answers lines of JSON."""

import json
import os
import subprocess
from collections.abc import Sequence
from typing import Any


class JsonProcess:
  """A program that reads requests from stdin and answers each on stdout.

  A line each; the end of its input ends it, and so does the end of the process
  that started it. What it says on stderr is seen.
  """

  def __init__(self, name: str, command: Sequence[str], **env: str):
    """Starts it.

    Args:
      name: what errors call it.
      command: the program and its arguments.
      env: variables beside those of this process.

    Raises:
      OSError: if there is no such program.
    """
    self._name = name
    self._process = subprocess.Popen(
      command,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      start_new_session=True,  # Ctrl-C is for this process
      env={**os.environ, **env},
    )

  def send(self, message: dict) -> None:
    """Sends what has no answer; RuntimeError if the process ended."""
    assert self._process.stdin is not None
    try:
      self._process.stdin.write(json.dumps(message) + "\n")
      self._process.stdin.flush()
    except BrokenPipeError:
      raise RuntimeError(f"the process of {self._name} ended") from None

  def ask(self, message: dict) -> dict[str, Any]:
    """The answer to a message; RuntimeError if the process ended."""
    self.send(message)
    assert self._process.stdout is not None
    line = self._process.stdout.readline()
    if not line:
      code = self._process.wait(timeout=60)
      raise RuntimeError(f"the process of {self._name} ended: exit code {code}")
    return json.loads(line)

  def close(self) -> None:
    """Ends it."""
    self._process.kill()
    self._process.communicate()
