"""llama.cpp beside ours, by a package that stands in for it."""

import json
import os
import re
import sys

import files
import ggufs
import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from configs import huggingface as experiments
from launch import benchmark, llama_cpp_program, llama_cpp_reference, rates
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


def test_llama_cpp_takes_turns_and_what_it_writes_is_compared(
  target, package, cli, tmp_path, monkeypatch, capsys
):
  package(PACKAGE)
  monkeypatch.setattr(benchmark, "_WIDTHS", (1,))
  monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
  turns = []
  whole = rates.measure_rates
  monkeypatch.setattr(
    rates, "measure_rates",
    lambda *args, **more: turns.append(whole(*args, **more)) or turns[0],
  )  # fmt: skip
  prompts = [{"prompt": "import os\n"}, {"prompt": "def f(x):\n  return"}]
  path = tmp_path / "b.json"
  code = cli(
    benchmark.run, f"--output={path}", "--rounds=2", "--noreference",
    "--prompts=" + str(files.write_jsonl(tmp_path / "p.jsonl", prompts)),
    "--config.drafter=plain", "--config.max_new_tokens=48",
    "--new_tokens=8", f"--llama_cpp={sys.executable}",
    config=f"configs/huggingface.py:target={target}",
  )  # fmt: skip
  assert code == 0
  result, (found,) = json.loads(path.read_text()), turns
  rate = {who: found.tokens[who] / found.seconds[who] for who in found.tokens}
  assert result["ratios"] == {
    "llama_cpp": {
      who: np.median(rate[who] / rate["llama_cpp"])
      for who in ("autoregressive", "speculative")
    }
  }
  assert (found.tokens["llama_cpp"] == 8).all()
  assert (found.tokens["autoregressive"] <= 8).all()
  assert result["new_tokens"] == 8
  assert result["llama_cpp_identical_completions"] == 0
  assert result["hf_identical_completions"] is None
  err = capsys.readouterr().err
  assert "llama.cpp wrote the same text for 0% of the prompts" in err
  threads = len(os.sched_getaffinity(0))
  assert result["llama_cpp"] == {
    "llama_cpp": "9.1",
    "system": f"{32 + 48} slots, threads {threads} and {threads}",
    "n_threads": threads,
    "n_ctx": 80,
    "omp_wait_policy": "passive",
  }


def test_equal_texts_are_alike():
  ours = [[Completed([1, 2])], [Completed([3])]]
  last = {("autoregressive", n): row for n, row in enumerate(ours)}
  turns = rates.Turns(
    tokens={}, seconds={}, groups=[0, 1],
    last=last | {("a", 0): [[1, 2]], ("a", 1): [[3]], ("b", 0): [[1, 2]],
                 ("b", 1): [[3, 4]]},
  )  # fmt: skip
  assert turns.alike("a") == 1
  assert turns.alike("b") == 0.5


class Completed:
  def __init__(self, token_ids):
    self.token_ids = token_ids


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
  assert ask(most=9, stops=[4])["seconds"] > 0


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
    llama_cpp_reference.LlamaCpp(
      sys.executable, config, stop_tokens=(), slots=64
    )
  (line,) = str(error.value).splitlines()
  assert line.startswith(f"llama.cpp of {sys.executable}: ")


@pytest.mark.parametrize(
  "flag, words",
  [
    ("--config.target=models/pretrained/target", "a GGUF file"),
    ("--config.dtype=bfloat16", "float32"),
    ("--config.batch_size=2", "one prompt at a time"),
    ("--new_tokens=129", "at most --config.max_new_tokens"),
  ],
)
def test_what_it_cannot_be_compared_on_is_refused_at_once(
  target, cli, capsys, flag, words
):
  code = cli(
    benchmark.run, "--llama_cpp=python", "--config.drafter=ngram", flag,
    config=f"configs/huggingface.py:target={target}",
  )  # fmt: skip
  assert code == 2
  (line,) = capsys.readouterr().err.splitlines()
  assert words in line
