"""A draft that learns while it decodes: what it learns."""

import heads_on_disk
import jax
import numpy as np
import pytest
from files import read_jsonl, write_jsonl

from configs import common
from launch import decode, online
from launch.assembly import pair

TEXTS = ["def f(x):\n", "import os", "class A:\n  x = 1\n\n  def", "x", "for"]
FLAGS = (
  "--nobaseline", "--config.temperature=1.0", "--config.max_new_tokens=12",
  "--config.drafter=online(model(tokens=3), rounds=2, entries=24, rate=0.01)",
)  # fmt: skip


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
  records = [{"id": f"p{i}", "prompt": t} for i, t in enumerate(TEXTS)]
  folder = tmp_path_factory.mktemp("prompts")
  return write_jsonl(folder / "in.jsonl", records)


@pytest.fixture(scope="module")
def whole(cli, prompts, tmp_path_factory):
  """Result of a run that nobody stopped."""
  out = tmp_path_factory.mktemp("whole") / "out.jsonl"
  assert cli(decode.run, *FLAGS, f"--prompts={prompts}", f"--output={out}") == 0
  return out


def test_what_was_learned_changes_what_comes_after(
  cli, prompts, whole, tmp_path
):
  """The first batch is as without; an update compiles nothing anew."""
  frozen = tmp_path / "frozen.jsonl"
  flags = (*FLAGS[:-1], "--config.drafter=model(tokens=3)")
  assert (
    cli(decode.run, *flags, f"--prompts={prompts}", f"--output={frozen}") == 0
  )
  drafted = lambda path: [
    (r["token_ids"], r["num_accepted"]) for r in read_jsonl(path)
  ]
  assert drafted(frozen) != drafted(whole)


@pytest.fixture(scope="module")
def models(pair_config):
  return pair.build(pair_config)


@pytest.fixture(scope="module", params=["model", "eagle3"])
def pair_config(request, tmp_path_factory):
  """Of a draft model, and of a head with a vocabulary of its own."""
  if request.param == "model":
    target, draft = request.getfixturevalue("pair")
  else:
    folder = tmp_path_factory.mktemp("heads")
    heads_on_disk.write_all(folder)
    target, draft = folder / "target", folder / "eagle3"
  config = common.get_config()
  config.target, config.checkpoints.draft = str(target), str(draft)
  config.drafter = f"online({request.param}(tokens=2), entries=16, rate=2e-4)"
  return config


def test_what_is_the_targets_does_not_learn(pair_config, models):
  first = online.Learner(models.drafting.learning, models.params, models.lesson)
  decoder = models.decoder
  state = decoder.init(
    models.params, np.array([[5, 6, 7], [8, 9, 1]]), np.array([3, 2]),
    jax.random.key(0), buffer_length=24, max_new_tokens=16,
  )  # fmt: skip
  steps = jax.jit(decoder.steps)
  state = first.begin(state)
  for _ in range(3):
    state = steps(first.params, state, 3)
    first.learn(state, 3)
  assert first.updates == 1
  assert first.rounds == 8
  first.learn(state, first.rounds)
  assert first._update._cache_size() == 1
  same = lambda a, b: np.testing.assert_array_equal(a, b)
  moved = jax.tree.map(
    lambda a, b: float(np.abs(a - b).max()),
    first.params.draft, models.params.draft,
  )  # fmt: skip
  assert max(jax.tree.leaves(moved)) > 1e-4
  if models.drafting.name == "eagle3":  # the target's, so as in its training
    assert max(jax.tree.leaves(moved["embed"])) == 0
    learned = {name for name in moved if max(jax.tree.leaves(moved[name]))}
    assert {"attention", "lm_head"} <= learned
  jax.tree.map(same, first.params.target, models.params.target)
