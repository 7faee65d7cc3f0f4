"""llama.cpp beside ours, by a package that stands in for it."""

import json
import os
import re
import sys
import types
import typing

import files
import ggufs
import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from configs import huggingface as experiments
from launch import evaluate
from launch.evaluation import llama_cpp_program, llama_cpp_reference, reference
from models import checkpoints
from models.formats import gguf_file

pytestmark = pytest.mark.usefixtures("quick_to_compile")

# What it yields is never ours: id 7 without an end.
PACKAGE = """
import gguf
print("chatter, on the stdout of answers")
__version__ = "9.1"
told = []

def llama_print_system_info():
  return " ".join(told).encode()

class Llama:
  def __init__(self, *, model_path, n_ctx, n_threads, n_threads_batch, **more):
    reader = gguf.GGUFReader(model_path)
    assert {t.tensor_type.name for t in reader.tensors} == {"F32"}
    told.append(f"{n_ctx} slots, threads {n_threads} and {n_threads_batch}")
    self.fresh = False

  def reset(self):
    self.fresh = True

  def generate(self, tokens, *, temp, **more):
    assert self.fresh and tokens and temp == 0
    self.fresh = False
    for _ in range(8):
      yield 7
    raise AssertionError("computed for nothing")
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory):
  """A file that is quantised in part."""
  folder = tmp_path_factory.mktemp("gguf")
  directory = files.make_checkpoint(folder / "model")
  blocks = lambda shape: Kind.F16 if shape[-1] % 32 else Kind.Q8_0
  kinds = lambda name, shape: blocks(shape) if len(shape) == 2 else Kind.F32
  return str(
    ggufs.write_directory(folder / "model.gguf", directory, kinds=kinds)
  )


@pytest.fixture
def package(tmp_path, monkeypatch):
  """Installs a `llama_cpp` of that source beside this Python."""

  def install(source):
    (tmp_path / "llama_cpp.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

  return install


def test_each_python_has_a_process_of_its_own(monkeypatch):
  started = []

  class Fake:
    versions: typing.ClassVar[dict] = {}

    def __init__(self, python, config, *, stop_tokens):
      started.append(python)
      self.python = python

    def run(self, batch, *, temperature):
      return self.python

    def close(self):
      started.remove(self.python)

  monkeypatch.setattr(llama_cpp_reference, "LlamaCpp", Fake)
  process = reference.Process(stop_tokens=(), vocab_size=3)
  systems = [
    types.SimpleNamespace(
      name=python, config=None, reference=types.SimpleNamespace(python=python)
    )
    for python in "abab"
  ]
  run = lambda system: process.run(system, None, temperature=0, seed=0)
  assert [run(system) for system in systems] == [*"abab"]
  assert started == ["a", "b"]
  process.close()
  assert not started


def test_llama_cpp_takes_turns_and_what_it_writes_is_compared(
  target, package, cli, tmp_path, monkeypatch
):
  package(PACKAGE)
  monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
  prompts = [{"prompt": "import os\n"}, {"prompt": "def f(x):\n  return"}]
  path, system = tmp_path / "e.json", f'llama_cpp("{sys.executable}")'
  code = cli(
    evaluate.run, f"--output={path}", "--rounds=2", f"--systems={system}",
    "--prompts=" + str(files.write_jsonl(tmp_path / "p.jsonl", prompts)),
    "--config.max_length=80", "--config.max_new_tokens=8",
    "--batch_sizes=1,2",
    config=f"configs/huggingface.py:target={target}",
  )  # fmt: skip
  assert code == 0
  result = json.loads(path.read_text())
  assert [g["batch_size"] for g in result["groups"]] == [1, 1, 2]
  for group in result["groups"][:2]:
    (turn,) = group["turns"]
    actual = turn["systems"][system]
    assert actual["tokens"] == actual["calls"] == [8]
    assert 0 < actual["first_seconds"] < actual["seconds"]
    assert actual["identical_to_plain"] == [False]
    assert turn["systems"]["plain"]["tokens"][0] <= 8
  assert system not in result["groups"][2]["turns"][0]["systems"]
  (left_out,) = result["left_out"]
  assert "at batch size 2, since it takes one prompt at a time" in left_out
  threads = len(os.sched_getaffinity(0))
  assert result["reference"] == {
    "llama_cpp": "9.1",
    "system": f"80 slots, threads {threads} and {threads}",
    "n_threads": threads,
    "n_ctx": 80,
    "omp_wait_policy": "passive",
  }


def test_completions_end_with_a_stop_token_or_the_budget():
  class Model:
    def reset(self):
      self.at = 0

    def generate(self, prompt, step):
      while True:
        self.at += step
        yield self.at

  ask = lambda **more: llama_cpp_program.complete(
    Model(), prompt=[1], sampling={"step": 2}, **more
  )
  assert ask(most=3, stops=[9])["token_ids"] == [2, 4, 6]
  assert ask(most=9, stops=[4])["token_ids"] == [2, 4]
  actual = ask(most=9, stops=[4])
  assert 0 < actual["first_seconds"] <= actual["seconds"]


def test_the_file_for_llama_cpp_is_the_same_model(target, tmp_path):
  path = str(tmp_path / "float32.gguf")
  llama_cpp_reference.write_float32(target, path)
  ours, theirs = (
    checkpoints.load(name, dtype=np.float32, mesh=None, sharding=None)
    for name in (target, path)
  )
  assert ours.config == theirs.config
  jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)
  headers = [gguf_file.read_header(name) for name in (target, path)]
  kinds = [{x.kind for x in head.tensors.values()} for head in headers]
  assert kinds == [{Kind.F32, Kind.F16, Kind.Q8_0}, {Kind.F32}]
  before, after = (head.metadata for head in headers)
  assert before.keys() == after.keys()
  for key, value in before.items():
    np.testing.assert_array_equal(after[key], value, err_msg=key)


@pytest.mark.parametrize(
  "source, words",
  [
    ("import nowhere_to_be_found", "No module named 'nowhere_to_be_found'"),
    ("def Llama(**_): raise ValueError('no\\n such')", "ValueError: no such"),
    ("import os; os._exit(3)", "ended: exit code 3"),
  ],
)
def test_an_environment_that_cannot_is_refused_in_a_line(
  target, package, source, words
):
  package(source)
  config = experiments.get_config(f"target={target}")
  with pytest.raises(ValueError, match=re.escape(words)) as error:
    llama_cpp_reference.LlamaCpp(sys.executable, config, stop_tokens=())
  (line,) = str(error.value).splitlines()
  assert line.startswith(f"llama.cpp of {sys.executable}: ")


@pytest.mark.parametrize(
  "flag, words",
  [
    ("--config.target=models/pretrained/target", "a GGUF file"),
    ("--config.dtype=bfloat16", "float32"),
  ],
)
def test_what_it_cannot_be_compared_on_is_refused_at_once(
  target, cli, tmp_path, capsys, flag, words
):
  code = cli(
    evaluate.run, '--systems=llama_cpp("python")', flag,
    f"--output={tmp_path / 'e.json'}",
    config=f"configs/huggingface.py:target={target}",
  )  # fmt: skip
  assert code == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert words in line
