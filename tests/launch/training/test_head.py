"""`launch.train` of heads: runs that resume, heads that draft."""

import shutil

import files
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import execute
from flax import nnx

from configs import huggingface, train_head
from launch import prompts, train
from launch.assembly import pair
from launch.training import head, head_loss
from launch.training.run import Run
from models import checkpoints, tokenizers
from specjax.runtime.requests import make_batches
from specjax.warp import make_sampling

V, WORDS, DEPTH = 4096, 64, 3


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
  if kind in ("dflash", "dflash2", "dspark"):
    config.head.num_layers, config.head.layers = 1, (1,)
    config.head.anchors = 8
  if kind == "dspark":
    config.head.markov, config.head.rank = "rnn", 4
  if kind == "dflash2":
    config.head.group, config.head.rank = 4, 3
  if kind == "p_eagle":
    config.head.num_layers, config.head.layers = 2, (0, 1)
  config.update(changes)
  return config


# ------------------------------------------------------------- the vocabulary


def test_draft_vocabulary_takes_frequent_tokens_then_low_ids():
  tokenizer = tokenizers.load(files.EMBEDDED)
  text = "x = 1\n" * 50
  used = sorted({*tokenizer.encode(text), tokenizer.eos_token_id})
  ids, covered = head.most_frequent([text], tokenizer, len(used) + 2)
  assert set(used) < {*ids.tolist()}
  assert covered == 1
  assert ids.tolist() == sorted(ids.tolist())
  unused = [i for i in range(V) if i not in used][:2]
  assert {*ids.tolist()} == {*used, *unused}
  one, share = head.most_frequent([text], tokenizer, 1)
  counts = np.bincount([*tokenizer.encode(text), tokenizer.eos_token_id])
  assert one[0] == counts.argmax()
  assert share == pytest.approx(counts.max() / counts.sum())


# ------------------------------------------------------------------- the runs


@pytest.fixture(scope="module")
def trained(texts, target, tmp_path_factory):
  """An EAGLE-3 head: trained at one go, and stopped and resumed; exported."""
  root = tmp_path_factory.mktemp("trained")
  return train_twice(tiny(texts, target), root)


@pytest.fixture(scope="module")
def blocks(texts, target, tmp_path_factory):
  """DFlash's, likewise."""
  root = tmp_path_factory.mktemp("blocks")
  config = tiny(texts, target, "dflash", export_dtype="float32")
  return train_twice(config, root)


def train_twice(config, root):
  whole, finished = Run(config, str(root / "whole")).train()
  assert finished
  shutil.copytree(root / "whole", root / "resumed")
  shutil.rmtree(root / "resumed" / "checkpoints" / "10")
  run = Run(config, str(root / "resumed"))
  resumed, finished = run.train()
  assert finished
  run.export(resumed, str(root / config.head.kind))
  return dict(root=root, whole=whole, resumed=resumed, config=config)


def assert_learned(folder, name):
  first, last = (x[name] for x in files.metrics(folder, name))
  assert last < first


def test_resumed_run_matches_an_uninterrupted_one(trained, texts, target):
  both = (nnx.state(trained[name]) for name in ("whole", "resumed"))
  jax.tree.map(np.testing.assert_array_equal, *both)
  assert_learned(trained["root"] / "resumed", "forward_kl_loss")
  first, last = files.metrics(
    trained["root"] / "resumed", "validation_accepted_1"
  )
  assert first["step"] == 0
  assert last["validation_accepted_1"] > first["validation_accepted_1"]
  # An exported head keeps its vocabulary where another training goes on.
  config = tiny(texts, target, init_from=str(trained["root"] / "eagle3"))
  config.head.draft_vocab_size = 0
  further = Run(config, str(trained["root"] / "on")).task.first
  ids = trained["whole"].target_ids[...]
  np.testing.assert_array_equal(further.target_ids[...], ids)


def test_resumed_block_training_matches_an_uninterrupted_run(blocks):
  """To the same bits, so at the same places; and they are learned from."""
  both = (nnx.state(blocks[name]) for name in ("whole", "resumed"))
  jax.tree.map(np.testing.assert_array_equal, *both)
  first, last = (
    [r[f"validation_accepted_{j}"] for j in range(1, DEPTH + 1)]
    for r in files.metrics(blocks["root"] / "resumed", "validation_accepted_1")
  )
  assert all(0 < x < 1 for x in first)
  assert last[0] > first[0]


def test_block_training_logits_match_decoding_drafts(blocks, target):
  """The loss along a text is of the laws that the shipped pair draws from.

  The head is the exported one, the rounds are those of the decoder: features,
  positions and what a block may see are the same in both, or laws differ.
  """
  config = huggingface.get_config(
    f"target={target},draft={blocks['root'] / 'dflash'}"
  )
  config.drafter = f"dflash(tokens={DEPTH})"
  models = pair.load(config)
  built = pair.assemble(config, models)
  module, head = checkpoints.load_module(target), models.draft
  watch = head_loss.make_pass(module, head.features)
  propose, step = jax.jit(built.decoder.propose), jax.jit(built.decoder.step)

  @jax.jit
  def trained(params, batch):
    seen = watch(params, batch)
    return jnp.stack([x for x, *_ in head_loss.head_logits(
      head.module, seen, batch, DEPTH)], axis=2)[:, 0]  # fmt: skip

  text = np.random.default_rng(1).integers(0, V, (2, 12))
  state = jax.jit(built.decoder.init, static_argnames="buffer_length")(
    built.params, text, np.array([12, 7]), jax.random.key(0),
    buffer_length=40, max_new_tokens=20, sampling=make_sampling(2),
  )  # fmt: skip
  seen = set()
  for _ in range(3):
    draft, *_ = propose(built.params, state)
    rows, length = state.tokens.shape
    batch = {
      "tokens": state.tokens,
      "segments": jnp.ones((rows, length), jnp.int32),
      "positions": jnp.broadcast_to(jnp.arange(length), (rows, length)),
      "places": state.length[:, None] - 2,
    }
    laws = jax.nn.log_softmax(trained(nnx.state(module), batch)[..., :V])
    np.testing.assert_allclose(draft.log_probs[:, 1:], laws, atol=2e-4)
    assert np.ptp(laws, axis=-1).min() > 0.5
    seen.add(tuple(state.length.tolist()))
    state, _ = step(built.params, state)
  assert len(seen) == 3


def decoded(target, drafter):
  """The tokens of two prompts."""
  config = huggingface.get_config(f"target={target}")
  config.update({"max_new_tokens": 16, "drafter": drafter})
  built = pair.build(config)
  items = prompts.built_in(built.tokenizer, max_tokens=60)[:2]
  (batch,) = make_batches(items, batch_size=2, max_width=60)
  done, _ = pair.engine_of(config, built, baseline=False).run(batch)
  return [c.token_ids for c in done]


@pytest.fixture(scope="module")
def plain(target):
  """The same tokens without a draft."""
  return decoded(target, "plain")


def test_trained_blocks_decode_losslessly_and_resume_training(
  blocks, target, plain, texts, tmp_path
):
  head = str(blocks["root"] / "dflash")
  assert decoded(target, f"dflash('{head}', tokens={DEPTH})") == plain
  config = tiny(
    texts, target, "dflash", init_from=head, num_steps=1,
    objective="acceptance", contexts="target", prompt_length=8,
  )  # fmt: skip
  run = Run(config, str(tmp_path / "on"))
  both = (nnx.state(head) for head in (run.task.first, blocks["resumed"]))
  jax.tree.map(np.testing.assert_array_equal, *both)
  _, finished = run.train()
  assert finished
  config.head.depth = 2
  with pytest.raises(ValueError, match="drafts 3 tokens, not dflash and 2"):
    Run(config, str(tmp_path / "other"))


@pytest.mark.parametrize("kind", ["p_eagle", "dflash2", "dspark"])
def test_recent_head_kinds_train_and_draft_losslessly(
  kind, texts, target, plain, tmp_path
):
  """DSpark's confidence too: it ends the paths of drafts."""
  config = tiny(texts, target, kind, export_dtype="float32")
  run = Run(config, str(tmp_path / "run"))
  trained, finished = run.train()
  assert finished
  assert_learned(tmp_path / "run", f"{config.objective}_loss")
  before, after = (
    dict(nnx.to_flat_state(nnx.state(x))) for x in (run.task.first, trained)
  )
  own = {"candidate_selector", "confidence_head"}
  for path in (x for x in before if x[0] in own | {"mask_hidden", "embed"}):
    moved = not np.array_equal(after[path][...], before[path][...])
    assert moved is (kind == "p_eagle" or path[0] in own)
  run.export(trained, head := str(tmp_path / "head"))
  for more in ("", ", threshold=0.1") if kind == "dspark" else ("",):
    assert decoded(target, f"{kind}('{head}', tokens={DEPTH}{more})") == plain
  if kind != "dspark":
    config.objective = "acceptance"
    with pytest.raises(ValueError, match=f"{kind} heads cannot be trained for"):
      Run(config, str(tmp_path / "other"))


def test_exported_head_decodes_losslessly_and_keeps_its_weights(
  trained, target, plain
):
  head = str(trained["root"] / "eagle3")
  assert decoded(target, f"eagle3('{head}', tokens={DEPTH})") == plain
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
    saved = getattr(trained["resumed"], name).weight[...].astype(jnp.bfloat16)
    actual = getattr(loaded.module, name).weight[...]
    np.testing.assert_array_equal(actual, saved.astype(jnp.float32))


@pytest.mark.parametrize(
  "kind",
  ["medusa", "mtp",
   pytest.param("eagle", marks=pytest.mark.slow),
   pytest.param("eagle3", marks=pytest.mark.slow)],
)  # fmt: skip
def test_train_command_trains_every_head_kind(
  kind, texts, target, plain, tmp_path
):
  config = tiny(texts, target, kind, compute_dtype="bfloat16")
  if kind == "eagle3":  # it can say all that the target can
    usual = train_head.get_config(kind).head.draft_vocab_size
    config.head.draft_vocab_size = usual
  folder = tmp_path / "w"
  folder.mkdir()
  (folder / "config.json").write_text(config.to_json_best_effort())
  export = tmp_path / "head"
  assert execute(train.run, f"--workdir={folder}", f"--export={export}") == 0
  assert_learned(folder, "forward_kl_loss")
  assert decoded(target, f"{kind}('{export}', tokens={DEPTH})") == plain
