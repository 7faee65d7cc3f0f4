"""A draft that learns while it decodes: what it learns."""

import heads_on_disk
import jax
import numpy as np
import pytest
from files import read_jsonl, write_jsonl

from configs import common
from launch import decode, online
from launch.assembly import pair as pair_lib


def test_online_learning_changes_later_drafts(cli, tmp_path):
  texts = ["def f(x):\n", "import os", "class A:\n  x = 1\n\n  def", "x", "for"]
  asked = [{"id": i, "prompt": text} for i, text in enumerate(texts)]
  prompts = write_jsonl(tmp_path / "in.jsonl", asked)
  drafted = []
  model = "model(tokens=3)"
  learning = f"online({model}, rounds=2, entries=24, rate=0.01)"
  for number, drafter in enumerate((model, learning)):
    out = tmp_path / f"{number}.jsonl"
    assert cli(
      decode.run, "--nobaseline", "--config.temperature=1.0",
      "--config.max_new_tokens=12", f"--config.drafter={drafter}",
      f"--prompts={prompts}", f"--output={out}",
    ) == 0  # fmt: skip
    rows = read_jsonl(out)
    drafted.append([(r["token_ids"], r["num_accepted"]) for r in rows])
  assert drafted[0] != drafted[1]


@pytest.mark.parametrize(
  "kind", ["model", pytest.param("eagle3", marks=pytest.mark.slow)]
)
def test_online_learning_leaves_target_weights_unchanged(kind, pair, tmp_path):
  """Of a draft model, and of a head with a vocabulary of its own."""
  target, draft = pair
  if kind == "eagle3":
    heads_on_disk.write_all(tmp_path)
    target, draft = str(tmp_path / "target"), str(tmp_path / "eagle3")
  config = common.get_config()
  config.target, config.checkpoints.draft = target, draft
  config.drafter = f"online({kind}(tokens=2), entries=16, rate=2e-4)"
  models = pair_lib.build(config)
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
  if kind == "eagle3":  # the target's, so as in its training
    assert max(jax.tree.leaves(moved["embed"])) == 0
    learned = {name for name in moved if max(jax.tree.leaves(moved[name]))}
    assert {"attention", "lm_head"} <= learned
  jax.tree.map(same, first.params.target, models.params.target)
