"""Heads from the command line."""

import re

import heads_on_disk
import jax
import jax.numpy as jnp
import pytest

from configs import huggingface
from launch import prompts
from launch.assembly import pair
from specjax.runtime.requests import make_batches


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  path = tmp_path_factory.mktemp("heads")
  heads_on_disk.write_all(path)
  return path


def settings(saved, head, drafter, **changes):
  config = huggingface.get_config(
    f"target={saved / 'target'},draft={saved / head}"
  )
  config.update({"max_new_tokens": 12, "drafter": drafter, **changes})
  return config


TREE = "tree=(-1, 0, 0, 1, 2, 3)"
RUNS = {
  "a chain": ("eagle3(tokens=3)", "token"),
  "a dynamic tree": ("eagle3(tokens=3, tree=dynamic(8, top_k=3))", "match"),
  "a certain tree": (f"medusa({TREE}, siblings=given)", "match"),
  "a drawn tree": ("medusa(tokens=3, tree=paths(2))", "kseq"),
  "typical acceptance": (f"medusa({TREE}, siblings=top_k)", "typical"),
  "a block": ("dflash(tokens=3)", "block"),
  "the best tree of a block": (
    "dflash(tokens=3, tree=dynamic(8, top_k=3))", "match"
  ),
  "blockwise": ("blockwise(tokens=3, siblings=given)", "match"),
  "a text that is read on": (
    "repeats(eagle3(tokens=2), tokens=3, min_match=1, max_ngram=3)", "token"
  ),
  "a ladder of chains": ("ladder(eagle3, lengths=(0, 1, 3))", "token"),
  "a ladder of marginals": ("ladder(medusa, lengths=(0, 1, 3))", "token"),
}  # fmt: skip


def head_of(drafter):
  """The folder of the head that a call drafts with."""
  return re.findall("eagle3|medusa|dflash|blockwise", drafter)[0]


@pytest.mark.parametrize(
  "name",
  [n if n in ("a ladder of chains", "a certain tree",
              "the best tree of a block")
   else pytest.param(n, marks=pytest.mark.slow) for n in RUNS],
)  # fmt: skip
def test_greedy_text_is_that_of_plain_decoding(saved, name):
  drafter, rule = RUNS[name]
  config = settings(saved, head_of(drafter), drafter, rule=rule)
  built = pair.build(config)
  items = prompts.built_in(built.tokenizer, max_tokens=60)[:2]
  (batch,) = make_batches(items, batch_size=2, max_width=60)
  texts = []
  for plain in (True, False):
    decodes = pair.engine_of(config, built, baseline=plain)
    if decodes.ladder is not None:  # whatever the clock says, all are tried
      decodes.ladder.every, decodes.ladder.patience = 2, 1
    done, _ = decodes.run(batch)
    texts.append([c.token_ids for c in done])
  assert texts[0] == texts[1]
  assert sum(c.num_drafted for c in done) > 0


@pytest.mark.parametrize(
  "head",
  ["eagle3", *(pytest.param(name, marks=pytest.mark.slow)
               for name in ("medusa", "dflash", "blockwise"))],
)  # fmt: skip
def test_a_head_in_eight_bits_drafts_and_the_text_is_the_targets(saved, head):
  """Its projections are the file's to half a step, and the target's whole."""
  certain = head == "blockwise"
  given, rule = (", siblings=given", "match") if certain else ("", "token")
  make = lambda more: pair.load(
    settings(saved, head, f"{head}(tokens=3{given}{more})", rule=rule)
  )
  whole, models = make(""), make(", weights=int8")
  leaves = lambda models, name: {
    jax.tree_util.keystr(path): leaf
    for path, leaf in jax.tree.leaves_with_path(models.draft.functions()[1])
    if name in jax.tree_util.keystr(path)
  }
  stored = leaves(models, "weight")
  for place, weight in leaves(whole, "weight").items():
    values, scale = (stored[f"{place}.{x}"] for x in ("values", "scales"))
    assert values.dtype == jnp.int8
    far = jnp.abs(values * scale - weight)
    assert (far <= 0.51 * scale).all()

  config = settings(
    saved, head, f"{head}(tokens=3{given}, weights=int8)", rule=rule
  )
  built = pair.assemble(config, models)
  kinds = {x.dtype.name for x in jax.tree.leaves(built.params.target)}
  assert kinds == {"float32"}
  items = prompts.built_in(built.tokenizer, max_tokens=60)[:1]
  (batch,) = make_batches(items, batch_size=1, max_width=60)
  drafted, plain = (
    pair.engine_of(config, built, baseline=x).run(batch)[0][0]
    for x in (False, True)
  )
  assert drafted.token_ids == plain.token_ids
  assert drafted.num_drafted > 0


@pytest.mark.parametrize("head", ["dflash", "eagle3"])
def test_a_head_in_eight_bits_borrows_tables_as_the_target_stores_them(
  saved, head
):
  config = settings(
    saved,
    head,
    f"{head}(tokens=3, weights=int8)",
    weights="fp8(embedding=True)",
  )
  models = pair.load(config)
  target = jax.tree.leaves(models.target.params["embed"])
  assert {x.dtype.name for x in target} == {"float8_e4m3fn", "float32"}
  head_params = models.draft.functions()[1]
  lent = jax.tree.leaves(head_params["embed"])
  assert all(a is b for a, b in zip(lent, target, strict=True))
  own = {x.dtype.name for x in jax.tree.leaves(head_params["fc"])}
  assert own == {"int8", "float32"}


@pytest.mark.parametrize(
  "head, drafter, message",
  [
    ("eagle3", "medusa", "'medusa': the head in .* is 'eagle3'"),
    ("eagle3", "eagle3(siblings=given)", "tokens that are not drawn"),
    ("medusa", "medusa(tokens=4)", "says 3 tokens ahead.* depth 4"),
    ("eagle3", "eagle3(tree=dynamic(8, top_k=3))", "rule 'token'"),
    ("target", "eagle", "and .*/target is a model of its own"),
    ("eagle3", "model", "and .*/eagle3 is a head on the target's features"),
    ("eagle3", "eagle3(weights=published)", "projections are rounded, from"),
    ("eagle3", "eagle3(weights=int8(dense=False))", "got int8.dense=False"),
    ("eagle3", "online(eagle3(weights=int8))", "own .*, not quantized"),
    ("medusa", "medusa(tree=mc_sim)", "mc_sim.*did you mean 'mc_sim_7b_63'"),
  ],
)
def test_what_does_not_fit_is_one_line(saved, head, drafter, message):
  with pytest.raises(ValueError, match=message) as error:
    pair.build(settings(saved, head, drafter))
  assert "\n" not in str(error.value)


def test_no_text_is_longer_than_the_head_knows(saved):
  """The target knows 256 positions, its heads that have any 200."""

  def begin(built, length):
    prompts = jnp.zeros((1, 4), jnp.int32)
    return jax.eval_shape(
      lambda: built.decoder.init(
        built.params, prompts, jnp.array([4]), jax.random.key(0),
        buffer_length=length, max_new_tokens=8,
      )
    )  # fmt: skip

  for head, most in (("eagle3", 200), ("dflash", 200), ("medusa", 256)):
    config = settings(saved, head, f"{head}(tokens=3)", max_length=250)
    built = pair.build(config)
    assert built.max_length == min(most, 250)
    assert begin(built, most).tokens.shape[1] >= most
    with pytest.raises(ValueError, match=rf"model has {most} positions"):
      begin(built, most + 1)


def test_a_head_that_cannot_be_cut_so_is_one_line(saved, monkeypatch):
  monkeypatch.setattr(jax, "devices", lambda: real * 3)
  real = jax.local_devices()
  monkeypatch.setattr(jax, "device_count", lambda: 3)
  with pytest.raises(ValueError, match="cannot be cut over 3 devices"):
    pair.build(settings(saved, "eagle3", "eagle3", mesh="data:1,model:3"))
