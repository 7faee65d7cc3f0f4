"""What is committed under docs/: one name a quantity, possible numbers."""

import functools
import json
import pathlib
import re

DOCS = pathlib.Path(__file__).resolve().parents[1] / "docs"
ROOT = DOCS.parent

# What a quantity is called (right) by nobody any more.
NAMES = {
  "block_efficiency": {
    "tokens_per_call", "tokens_per_target_call", "tokens_per_round",
    "emitted_per_call",
  },
  "num_tokens": {"emitted_tokens", "tokens_emitted", "num_emitted_tokens"},
  "num_target_calls": {"target_calls", "target_passes"},
}  # fmt: skip


@functools.cache
def results() -> dict[str, list]:
  """The JSON values of every committed result, by its path."""
  found = {}
  for path in sorted([*DOCS.rglob("*.json"), *DOCS.rglob("*.jsonl")]):
    text = path.read_text("utf-8")
    parts = text.split("\n") if path.suffix == ".jsonl" else [text]
    name = str(path.relative_to(DOCS))
    found[name] = [json.loads(part) for part in parts if part.strip()]
  return found


def objects(value):
  """Every JSON object in a value."""
  if isinstance(value, dict):
    yield value
  inside = value.values() if isinstance(value, dict) else value
  for one in inside:
    if isinstance(one, dict | list):
      yield from objects(one)


def stem(key: str) -> str:
  """A key without what is said of the quantity (`_ci`, `_change`, ...)."""
  return re.sub(r"(_request_mean|_change|_ci)+$", "", key)


def test_one_quantity_has_one_name_in_all_results():
  others = set().union(*NAMES.values())
  wrong = {
    (name, key)
    for name, values in results().items()
    for one in objects(values)
    for key in one
    if stem(key) in others
  }
  assert not wrong
  assert any("block_efficiency" in x for x in objects(results().values()))


def test_one_quantity_has_one_name_in_all_that_writes_or_reads_it():
  others = set().union(*NAMES.values())
  quoted = re.compile(r"[\"'`]([a-z_]+)[\"'`]")
  wrong = {
    (str(path.relative_to(ROOT)), key)
    for folder in ("specjax", "launch", "models", "configs", "colab", "docs")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".md", ".ipynb", ".sh", ".html")
    for key in quoted.findall(path.read_text("utf-8"))
    if stem(key) in others
  }
  assert not wrong
