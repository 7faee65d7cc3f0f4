"""`launch.train` of heads: the loss, runs that resume, heads that draft."""

import json

import files
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import flagsaver
from flax import nnx

from configs import huggingface, train_head
from launch import cli, pair, prompts, train
from launch.training import head_step, step, vocabulary
from launch.training.head_step import Loss, Words
from launch.training.run import Run
from models import checkpoints, head_starts, tokenizers
from specjax import engine

pytestmark = pytest.mark.usefixtures("quick_to_compile")
V, WORDS, DEPTH = 4096, 64, 3


@pytest.fixture(scope="module")
def target(tmp_path_factory):
  return files.make_checkpoint(tmp_path_factory.mktemp("target"))


def tiny(texts, target, kind="eagle3", **changes):
  config = train_head.get_config(kind)
  config.target, config.dataset = target, str(texts)
  config.sequence_length, config.batch_size = 24, 4
  config.num_steps, config.warmup_steps, config.learning_rate = 10, 1, 3e-3
  config.log_every = config.checkpoint_every = 5
  config.validate_every, config.validation_batches = 10, 1
  config.head.depth = DEPTH
  if kind == "eagle3":
    config.head.draft_vocab_size, config.head.layers = WORDS, (0, 1)
  config.update(changes)
  return config


def records(folder):
  lines = (folder / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]


# ------------------------------------------------------------------- the loss


@pytest.fixture(scope="module")
def case(target):
  """A head with a small vocabulary, a batch of two documents, and both laws."""
  module = checkpoints.load_module(target)
  rng = np.random.default_rng(0)
  ids = np.sort(rng.choice(V, WORDS, replace=False)).astype(np.int32)
  head = head_starts.eagle3(
    module, layers=(0, 1), draft_vocab=ids, rngs=nnx.Rngs(0)
  )
  length = 10
  segments = np.array([[1] * 11, [1] * 5 + [2] * 6], np.int32)
  batch = {
    # Half of the tokens are of the draft vocabulary.
    "tokens": np.where(
      rng.random((2, 11)) < 0.5, rng.choice(ids, (2, 11)),
      rng.integers(0, V, (2, 11)),
    ).astype(np.int32),
    "segments": segments,
    "positions": np.array([range(11), [*range(5), *range(6)]], np.int32),
  }  # fmt: skip
  watch = head_step.watcher(module, (0, 1))
  rows = lambda params: head_starts.output_rows(module)
  words = Words.of(ids, V)
  params = nnx.state(module)

  @jax.jit
  def laws(params):
    seen = watch(params, batch)
    said = [x for x, _ in head_step.says(head, seen, batch, DEPTH)]
    return said, seen.final @ rows(params)

  said, judged = laws(params)
  p = []  # as the shipped head says it: no mass outside
  for logits in said:
    law = np.zeros((*logits.shape[:2], V))
    law[..., ids] = jax.nn.softmax(logits)
    p.append(law)
  q = np.asarray(jax.nn.softmax(judged), np.float64)
  whole, _ = module(
    batch["tokens"][:, :-1], positions=batch["positions"][:, :-1],
    segments=segments[:, :-1],
  )  # fmt: skip
  np.testing.assert_allclose(judged, whole.logits, atol=1e-4)

  def places(depth):
    """Each place that counts, and that of the law which judges it."""
    return [
      (row, t, t + 1 + depth)
      for row in range(2) for t in range(length)
      if t + 2 + depth < 11
      and segments[row, t] == segments[row, t + 2 + depth]
    ]  # fmt: skip

  def losses_of(objective, **more):
    loss = Loss(
      **dict(
        objective=objective, depth=DEPTH, decay=0.5, feature_weight=0.0,
        first=0,
      ) | more
    )  # fmt: skip
    shared = (loss, watch, rows, words)
    one = jax.jit(lambda b: head_step.make_loss(*shared)(head, params, b))
    return float(one(batch))

  return dict(
    p=p, q=q, ids=ids, batch=batch, places=places, loss=losses_of,
    head=head, params=params, shared=(watch, rows, words),
  )  # fmt: skip


def restricted(q, ids):
  inside = np.zeros_like(q)
  inside[..., ids] = q[..., ids]
  return inside / inside.sum(-1, keepdims=True)


def expected(case, of_place):
  """The weighted mean over depths of the mean over places."""
  means = [
    np.mean([of_place(j, *place) for place in case["places"](j)])
    for j in range(DEPTH)
  ]
  return np.average(means, weights=[1, 0.5, 0.25])


def test_forward_kl_is_to_the_targets_law_on_the_draft_vocabulary(case):
  ids, q = case["ids"], restricted(case["q"], case["ids"])

  def kl(j, row, t, judge):
    a, b = q[row, judge, ids], case["p"][j][row, t, ids]
    return np.sum(a * np.log(a / b))

  assert case["loss"]("forward_kl") == pytest.approx(expected(case, kl), 1e-4)


def test_total_variation_is_to_the_targets_whole_law(case):
  away = lambda j, row, t, judge: (
    1 - np.minimum(case["q"][row, judge], case["p"][j][row, t]).sum()
  )
  found = case["loss"]("total_variation")
  assert found == pytest.approx(expected(case, away), 1e-5)
  assert 0.3 < found < 0.999


def test_acceptance_is_of_the_whole_draft_from_every_place(case):
  tokens, shares = case["batch"]["tokens"], []
  for row, t, _ in case["places"](DEPTH - 1):
    stands, total = 1.0, 0.0
    for j in range(DEPTH):
      token = tokens[row, t + 2 + j]
      p, q = case["p"][j][row, t, token], case["q"][row, t + 1 + j, token]
      stands *= min(1, p / q)
      total += stands
    shares.append(-total / DEPTH)
  found = case["loss"]("acceptance")
  assert found == pytest.approx(np.mean(shares), 1e-4)
  assert found < -0.001


def test_text_that_cannot_be_said_is_not_learned(case):
  tokens, ids = case["batch"]["tokens"], {*case["ids"].tolist()}
  means = []
  for j in range(DEPTH):
    told = [
      (row, t, tokens[row, t + 2 + j]) for row, t, _ in case["places"](j)
      if tokens[row, t + 2 + j] in ids
    ]  # fmt: skip
    means.append(
      np.mean([-np.log(case["p"][j][row, t, x]) for row, t, x in told])
    )
  whole = np.average(means, weights=[1, 0.5, 0.25])
  assert case["loss"]("next_token") == pytest.approx(whole, 1e-4)


def test_tokens_before_the_first_that_counts_do_not(case):
  """As where a prompt is the data's, and what follows the target's."""
  place = case["places"]
  first = 7
  case = case | dict(
    places=lambda j: [x for x in place(j) if x[1] + 2 + j >= first]
  )
  away = lambda j, row, t, judge: (
    1 - np.minimum(case["q"][row, judge], case["p"][j][row, t]).sum()
  )
  found = case["loss"]("total_variation", first=first)
  assert found == pytest.approx(expected(case, away), 1e-5)


def test_what_is_validated(case):
  loss = Loss(
    objective="forward_kl", depth=DEPTH, decay=1.0, feature_weight=0, first=0
  )
  measure = head_step.make_measure(loss, *case["shared"])
  found = jax.jit(lambda b: measure(case["head"], case["params"], b))(
    case["batch"]
  )
  for j in range(DEPTH):
    places = case["places"](j)
    both = [(case["q"][r, judge], case["p"][j][r, t]) for r, t, judge in places]
    assert float(found[f"tokens_{j + 1}"]) == len(places)
    accepted = sum(np.minimum(q, p).sum() for q, p in both)
    assert float(found[f"accepted_{j + 1}"]) == pytest.approx(accepted, 1e-4)
    agreed = sum(q.argmax() == p.argmax() for q, p in both)
    assert float(found[f"agreed_{j + 1}"]) == agreed


# ------------------------------------------------------------- the vocabulary


def test_the_most_frequent_tokens_are_chosen_then_those_of_low_ids():
  tokenizer = tokenizers.load(files.EMBEDDED)
  text = "x = 1\n" * 50
  used = sorted({*tokenizer.encode(text), tokenizer.eos_token_id})
  ids, covered = vocabulary.most_frequent([text], tokenizer, len(used) + 2)
  assert set(used) < {*ids.tolist()}
  assert covered == 1
  assert ids.tolist() == sorted(ids.tolist())
  unused = [i for i in range(V) if i not in used][:2]
  assert {*ids.tolist()} == {*used, *unused}
  one, share = vocabulary.most_frequent([text], tokenizer, 1)
  counts = np.bincount([*tokenizer.encode(text), tokenizer.eos_token_id])
  assert one[0] == counts.argmax()
  assert share == pytest.approx(counts.max() / counts.sum())


# ------------------------------------------------------------------- the runs


class KilledError(Exception):
  """What a test kills a run with."""


@pytest.fixture(scope="module")
def trained(texts, target, tmp_path_factory):
  """An EAGLE-3 head: trained at one go, and killed and resumed; exported."""
  root = tmp_path_factory.mktemp("trained")
  config = tiny(texts, target)
  whole, finished = Run(config, str(root / "whole")).train()
  assert finished
  real, count = step.place_batch, [0]

  def place(batch, mesh):
    count[0] += 1
    if count[0] == 10:  # of which one is the validation's
      raise KilledError
    return real(batch, mesh)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(step, "place_batch", place)
    with pytest.raises(KilledError):
      Run(config, str(root / "killed")).train()
  assert (root / "killed" / "checkpoints" / "5").is_dir()
  run = Run(config, str(root / "killed"))
  resumed, finished = run.train()
  assert finished
  run.export(resumed, str(root / "eagle3"))
  return dict(root=root, whole=whole, resumed=resumed, config=config)


def test_a_killed_run_goes_on_to_the_same_head(trained):
  both = (nnx.state(trained[name]) for name in ("whole", "resumed"))
  jax.tree.map(np.testing.assert_array_equal, *both)
  found = records(trained["root"] / "killed")
  losses = [r["forward_kl_loss"] for r in found if "forward_kl_loss" in r]
  assert len(losses) == 2
  assert losses[1] < losses[0]
  first, last = (r for r in found if "validation_accepted_1" in r)
  assert first["step"] == 0
  assert last["validation_accepted_1"] > first["validation_accepted_1"]
  assert last["validation_agreed_1"] > 0


def test_the_target_and_its_embedding_are_not_trained(trained, target):
  module = checkpoints.load_module(target)
  own = trained["whole"].embed.embedding[...]
  np.testing.assert_array_equal(own, module.embed.embedding[...])
  folder = trained["root"] / "whole" / "checkpoints" / "10" / "state"
  names = " ".join(str(p) for p in folder.rglob("*"))
  text = names + (folder / "_METADATA").read_text()
  assert "lm_head" in text
  assert "embedding" not in text


def test_the_folder_knows_the_vocabulary(trained, texts, target):
  ids = vocabulary.read(trained["root"] / "whole")
  found = trained["whole"].target_ids[...]
  np.testing.assert_array_equal(ids, found)
  run = Run(trained["config"], str(trained["root"] / "whole"))
  np.testing.assert_array_equal(run.task.first.target_ids[...], found)


def decoded(target, head, texts, **changes):
  """Tokens by the head, by the target alone, and the rounds it took."""
  config = huggingface.get_config(f"target={target},draft={head}")
  config.update(
    {"max_new_tokens": 16, "num_speculative_tokens": DEPTH, **changes}
  )
  config = pair.settled(config)
  found = pair.build(config)
  items = prompts.built_in(found.tokenizer, max_tokens=60)[:2]
  (batch,) = engine.make_batches(items, batch_size=2, max_width=60)
  results = []
  for plain in (False, True):
    done, _ = pair.engine_of(config, found, baseline=plain).run(batch)
    results.append(done)
  tokens = [[c.token_ids for c in done] for done in results]
  return *tokens, sum(c.num_accepted for c in results[0])


def test_the_trained_head_decodes_and_nothing_is_lost(trained, target, texts):
  head = str(trained["root"] / "eagle3")
  ours, plain, _ = decoded(target, head, texts, drafter="eagle3")
  assert ours == plain
  loaded = checkpoints.load_head(
    head,
    checkpoints.load(target, dtype=jnp.float32, mesh=None, sharding=None),
    dtype=jnp.float32,
  )
  assert loaded.features == (0, 1)
  np.testing.assert_array_equal(
    loaded.module.target_ids[...], trained["whole"].target_ids[...]
  )
  for name in ("fc", "lm_head"):
    saved = getattr(trained["resumed"], name).kernel[...].astype(jnp.bfloat16)
    found = getattr(loaded.module, name).kernel[...]
    np.testing.assert_array_equal(found, saved.astype(jnp.float32))


def test_a_run_goes_on_with_a_head_that_was_exported(trained, texts, target):
  config = tiny(
    texts, target, init_from=str(trained["root"] / "eagle3"), num_steps=1,
    objective="acceptance", contexts="target", prompt_length=8,
  )  # fmt: skip
  run = Run(config, str(trained["root"] / "on"))
  ids = trained["whole"].target_ids[...]
  np.testing.assert_array_equal(run.task.first.target_ids[...], ids)
  _, finished = run.train()
  assert finished
  (last,) = [r for r in records(trained["root"] / "on") if "mfu" not in r][-1:]
  assert 0 < last["validation_accepted_1"] < 1


def command_line(*args):
  with flagsaver.flagsaver():
    return cli.execute(train.run, ["train", *args])


@pytest.mark.parametrize("kind", ["medusa", "eagle", "blockwise"])
def test_every_kind_is_trained_by_the_command(kind, texts, target, tmp_path):
  config = tiny(texts, target, kind)
  folder = tmp_path / "w"
  folder.mkdir()
  (folder / "config.json").write_text(config.to_json_best_effort())
  export = tmp_path / "head"
  assert command_line(f"--workdir={folder}", f"--export={export}") == 0
  found = records(folder)
  losses = [r["forward_kl_loss"] for r in found if "forward_kl_loss" in r]
  assert losses[-1] < losses[0]
  if kind == "blockwise":
    assert json.loads((export / "config.json").read_text())["num_heads"] == 3
    return
  ours, plain, _ = decoded(target, str(export), texts, drafter=kind)
  assert ours == plain


@pytest.mark.parametrize(
  "changes, message",
  [
    (dict(head=dict(layers=(0, 2))), "of 2 layers cannot be read at .* 0,2"),
    (dict(head=dict(layers=())), "give config.head.layers"),
    (dict(head=dict(draft_vocab_size=5000)), r"must be in 1\.\.4096, got 5000"),
    (dict(head=dict(kind="hydra")), "head.kind must be one of .*'hydra'"),
    (dict(head=dict(depth=0)), "head.depth must be >= 1"),
    (dict(head=dict(depth=23)), "nothing to train on in rows of 24"),
    (dict(head=dict(depth_decay=0.0)), r"depth_decay must be in \(0, 1\]"),
    (dict(contexts="draft"), "must be 'data' or 'target'"),
    (dict(objective="best"), "unknown objective 'best'"),
  ],
)
def test_mistakes_in_the_config(texts, target, tmp_path, changes, message):
  with pytest.raises(ValueError, match=message):
    Run(tiny(texts, target, **changes), str(tmp_path / "w"))
  assert not (tmp_path / "w").exists()
