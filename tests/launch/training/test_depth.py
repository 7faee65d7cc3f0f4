"""`launch.train` of a depth policy's head: its loss, its runs, its decoding."""

import json
import types

import files
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import huggingface, train_depth
from launch import prompts
from launch.assembly import pair
from launch.assembly.policies import POLICIES
from launch.training import depth
from launch.training.run import Run
from models.networks.acceptance_head import AcceptanceHead, HeadConfig
from specjax.adaptive.estimates import Finished
from specjax.runtime.requests import make_batches

pytestmark = pytest.mark.usefixtures("quick_to_compile")
DEPTH, ROUNDS = 3, 4


@pytest.fixture(scope="module")
def models(tmp_path_factory):
  """Folders of a target and a draft that agree now and then."""
  return [
    files.make_checkpoint(
      tmp_path_factory.mktemp(name), seed=seed, embed_dim=width
    )
    for name, seed, width in (("target", 0, 32), ("draft", 1, 16))
  ]


def tiny(texts, models, **changes):
  config = train_depth.get_config()
  config.pair.target, config.pair.checkpoints.draft = models
  config.pair.drafter = f"model(tokens={DEPTH})"
  config.dataset = str(texts)
  config.sequence_length, config.rounds, config.batch_size = 8, ROUNDS, 4
  config.num_steps, config.warmup_steps, config.learning_rate = 10, 1, 1e-2
  config.log_every = config.checkpoint_every = 5
  config.validate_every, config.validation_batches = 5, 1
  config.export_dtype = "float32"
  config.update(changes)
  return config


# ------------------------------------------------------------------- the loss


def test_tokens_count_for_the_survival_before_them_and_rejections_for_more():
  """By hand, on one round of two rows, of which one is done."""
  accept = np.array([[0.5, 0.2], [1.0, 1.0]], np.float32)
  finished = Finished(
    top=jnp.full((2, 2), 0.5), confidence=jnp.full((2, 2), 0.25),
    hidden=jnp.zeros((2, 2, 1)), accept=jnp.asarray(accept),
    drafted=jnp.full(2, 2), kept=jnp.zeros(2, int),
    active=jnp.array([True, False]),
  )  # fmt: skip
  rounds = depth.seen(finished, jnp.array([0.5, 1.0]))
  np.testing.assert_allclose(rounds.weight, [[1, 0.5], [0, 0]])
  np.testing.assert_allclose(rounds.temperature, [[0.5, 0.5], [1, 1]])
  head = AcceptanceHead(HeadConfig(width=1), rngs=nnx.Rngs(0))
  logit = float(depth._logits(head, rounds)[0, 0])
  chance = 1 / (1 + np.exp(-logit))
  each = [
    -(a * np.log(chance) + 6 * (1 - a) * np.log(1 - chance)) for a in accept[0]
  ]
  expected = (each[0] + 0.5 * each[1]) / 1.5
  actual = depth.mean_loss(head, rounds, 6.0)
  assert float(actual) == pytest.approx(expected, rel=1e-5)


def test_the_report_takes_the_weight_out_again():
  """The best answer under a weight is as good as the truth."""
  rng = np.random.default_rng(0)
  accept = rng.random((1, 50, 2)).astype(np.float32)
  weight = np.ones_like(accept)
  best = np.log(accept / (6 * (1 - accept)))
  rounds = types.SimpleNamespace(
    hidden=None, top=None, confidence=None, temperature=None,
    accept=jnp.asarray(accept), weight=jnp.asarray(weight),
  )  # fmt: skip
  for logits, explained in ((best, 1.0), (np.zeros_like(best) - np.log(6), 0)):
    head = lambda *_, logits=logits: jnp.asarray(logits)
    actual = depth.report(depth.sums(head, rounds, 6.0))
    assert actual["validation_explained"] == pytest.approx(explained, abs=0.1)
    assert actual["validation_acceptance"] == pytest.approx(0.5, abs=0.1)
    mean = accept.mean() if explained else 0.5
    assert actual["validation_predicted"] == pytest.approx(mean, abs=1e-4)


def test_where_all_is_accepted_no_share_of_a_variance_is_told():
  totals = dict(
    tokens=3.0, loss=1.0, acceptance=3.0, predicted=3.0, squared_acceptance=3.0,
    squared_error=0.0,
  )  # fmt: skip
  actual = depth.report(totals)
  assert actual["validation_acceptance"] == 1
  assert "validation_explained" not in actual


# ------------------------------------------------------------------- the runs


@pytest.fixture(scope="module")
def trained(texts, models, tmp_path_factory):
  """The folder of a head's run; in it the exported head."""
  root = tmp_path_factory.mktemp("trained")
  run = Run(tiny(texts, models), str(root))
  head, finished = run.train()
  assert finished
  run.export(head, str(root / "head"))
  return root


def test_a_head_learns_and_what_it_explains_is_written(trained):
  lines = (trained / "metrics.jsonl").read_text()
  actual = [json.loads(line) for line in lines.splitlines()]
  assert sum("weighted_cross_entropy_loss" in r for r in actual) == 2
  losses = [r["validation_loss"] for r in actual if "validation_loss" in r]
  assert len(losses) == 2
  assert losses[1] < losses[0]
  last = actual[-1]
  assert 0 < last["validation_acceptance"] < 1
  assert last["validation_explained"] < 1


def test_the_trained_head_ends_drafts_and_nothing_is_lost(trained, models):
  target, draft = models
  config = huggingface.get_config(f"target={target},draft={draft}")
  head = trained / "head"
  # Acceptances are low: SpecDec++'s own threshold would end every draft at 1.
  config.update(
    max_new_tokens=16,
    drafter=f"model(tokens={DEPTH}, "
    f"policy=predicted('{head}', threshold=0.97))",
  )
  built = pair.build(config)
  items = prompts.built_in(built.tokenizer, max_tokens=60)[:2]
  (batch,) = make_batches(items, batch_size=2, max_width=60)
  tokens = []
  for plain in (False, True):
    done, _ = pair.engine_of(config, built, baseline=plain).run(batch)
    tokens.append([c.token_ids for c in done])
    if not plain:
      drafted = sum(c.num_drafted for c in done)
      assert 0 < drafted < DEPTH * sum(c.num_target_calls for c in done)
  assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"rejection_weight": 0.0}, "rejection_weight must be > 0"),
    ({"rounds": 0}, "rounds must be >= 1"),
    ({"temperatures": (-1.0,)}, "temperatures must be >= 0"),
    ({"pair": {"drafter": "ngram"}}, "depths are decided for chains"),
  ],
)
def test_what_cannot_be_trained_is_refused(
  texts, models, tmp_path, changes, message
):
  config = tiny(texts, models)
  config.update(changes)
  with pytest.raises(ValueError, match=message):
    Run(config, str(tmp_path))


# -------------------------------------------------------------- how it is named


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("predicted", "missing a required argument: 'head'"),
    ("predicted(threshold=0.5)", "missing a required argument: 'head'"),
    ("predicted('HEAD', level=2)", "no parameter 'level'"),
    ("predicted('HEAD', threshold=2)", "threshold must be in"),
    ("predicted(nowhere)", r"no config\.json in nowhere"),
  ],
)
def test_what_names_no_head_is_refused(trained, text, message):
  text = text.replace("HEAD", str(trained / "head"))
  with pytest.raises((ValueError, FileNotFoundError), match=message):
    POLICIES.make(text)


def test_a_head_of_another_draft_is_refused(trained, models):
  target, _ = models
  config = huggingface.get_config(f"target={target},draft={target}")
  head = trained / "head"
  config.drafter = f"model(tokens={DEPTH}, policy=predicted('{head}'))"
  built = pair.build(config)
  items = prompts.built_in(built.tokenizer, max_tokens=60)[:1]
  (batch,) = make_batches(items, batch_size=1, max_width=60)
  with pytest.raises(ValueError, match="of width 16, and the draft gives 32"):
    pair.engine_of(config, built).run(batch)
