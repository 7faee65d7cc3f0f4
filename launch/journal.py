"""A run's progress on disk, so that a stopped run goes on where it was.

While a file is being decoded, every finished batch is appended to
`OUT.jsonl.partial`, one line each. At the end the rows are put in the order of
the prompts and `OUT.jsonl` appears, whole, in one rename. A line torn by a
crash is dropped and its batch decoded again; batches draw from streams of their
own, so the result is the same as that of a run that was never stopped.
"""

import json
import os
import pathlib


class Journal:
  """The partial results of one output file.

  Attributes:
    batches: finished batches by number, as they were added.
  """

  def __init__(self, output: str, fingerprint: str):
    """Opens or resumes.

    Args:
      output: the final file.
      fingerprint: of everything that decides the results.

    Raises:
      ValueError: if a partial file of other settings is there.
      FileNotFoundError: if the folder of `output` is not.
    """
    self._output = pathlib.Path(output)
    check_writable(output)
    self._partial = self._output.with_name(self._output.name + ".partial")
    self._header = json.dumps({"fingerprint": fingerprint})
    self.batches: dict[int, dict] = {}
    lines = self._whole_lines()
    if lines and lines[0] != self._header:
      raise ValueError(
        f"{self._partial} is from a run with other prompts or settings; "
        "finish that run, or delete the file"
      )
    for line in lines[1:]:
      record = json.loads(line)
      self.batches[record["batch"]] = record
    if lines:  # without a torn last line, so that appending is safe
      _replace(self._partial, "\n".join(lines) + "\n")

  def _whole_lines(self) -> list[str]:
    if not self._partial.exists():
      return []
    text = self._partial.read_text("utf-8", errors="replace")
    return text.split("\n")[:-1]  # what follows the last newline is torn

  def add(self, record: dict) -> None:
    """Appends one finished batch; `record["batch"]` is its number."""
    if not self.batches:
      _replace(self._partial, self._header + "\n")
    self.batches[record["batch"]] = record
    with self._partial.open("a", encoding="utf-8") as out:
      out.write(json.dumps(record) + "\n")
      out.flush()
      os.fsync(out.fileno())

  def finish(self, rows: list[dict]) -> None:
    """Writes the output, whole, and removes the partial file."""
    _replace(self._output, "".join(json.dumps(row) + "\n" for row in rows))
    self._partial.unlink(missing_ok=True)


def _replace(path: pathlib.Path, text: str) -> None:
  """Writes a file so that it is never seen half-written."""
  temporary = path.with_name(path.name + ".tmp")
  temporary.write_text(text, encoding="utf-8")
  os.replace(temporary, path)


def check_writable(path: str) -> None:
  """Raises, before any work is done, if `path` cannot become a file.

  Raises:
    FileNotFoundError: if its folder does not exist.
    ValueError: if it is a folder itself.
  """
  target = pathlib.Path(path)
  if not target.parent.is_dir():
    raise FileNotFoundError(f"no such folder for {path}: {target.parent}")
  if target.is_dir():
    raise ValueError(f"expected a file, but {path} is a folder")
  if not os.access(target.parent, os.W_OK):
    raise PermissionError(f"cannot write to {target.parent}")


def write_json(path: str, value: dict) -> None:
  """Writes a JSON file, whole or not at all."""
  _replace(pathlib.Path(path), json.dumps(value, indent=2) + "\n")
