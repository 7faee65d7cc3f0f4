"""The embedded pair: its files, and greedy equality on held-out prompts."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from configs import embedded
from launch import prompts
from launch.assembly import pair
from launch.training import corpus
from models import head_shapes, tokenizers
from models.formats import head_checkpoints, head_saving, huggingface, loading
from models.networks.transformer import as_language_model
from specjax.runtime.requests import make_batches

PATHS = {
  "target": "models/pretrained/target",
  "draft": "models/pretrained/draft",
}
NEW_TOKENS = 24
# Two logits closer than this may change places between a pass over one token
# and a pass over several: float32 sums are then taken in another order.
MARGIN = 1e-3
# Logits of bfloat16 models are sums in bfloat16: those between 8 and 16 are
# multiples of 1/16, so this lets them be two such steps apart.
BFLOAT16_MARGIN = 0.13


@pytest.mark.parametrize("name", PATHS)
def test_checkpoint_logits_match_transformers(name):
  model = transformers.AutoModelForCausalLM.from_pretrained(
    PATHS[name], dtype=torch.float32
  )
  module = loading.load(huggingface.source(PATHS[name]))
  ours, params = as_language_model(module)
  tokenizer = tokenizers.load(PATHS[name])
  ids = tokenizer.encode("def main(argv):\n  return [x for x in argv]\n")
  theirs = transformers.AutoTokenizer.from_pretrained(PATHS[name])
  assert theirs(theirs.decode(ids))["input_ids"] == ids
  with torch.no_grad():
    expected = model(torch.tensor([ids])).logits.numpy()
  cache = ours.init_cache(1, len(ids))
  output, _ = jax.jit(ours.apply)(params, np.array([ids]), cache)
  error = np.abs(output.logits - expected).max() / np.abs(expected).max()
  assert error < 1e-4


def test_checkpoints_are_small_and_the_pair_shares_a_tokenizer():
  size = lambda name: sum(
    f.stat().st_size for f in pathlib.Path("models/pretrained", name).iterdir()
  )
  assert size("target") + size("draft") <= 36 * 2**20
  heads = ("eagle3", "medusa", "smollm2-eagle3")
  assert sum(map(size, heads)) <= 60 * 10**6
  target, draft = (tokenizers.load(p) for p in PATHS.values())
  assert target.fingerprint() == draft.fingerprint()


@pytest.mark.parametrize(
  "name, sizes",
  [("eagle3", (6, 384, 4096)), ("medusa", (6, 384, 4096)),
   ("smollm2-eagle3", (30, 576, 49152))],
)  # fmt: skip
def test_saving_a_shipped_head_reproduces_its_files(name, sizes, tmp_path):
  """So that whatever reads what is saved reads these."""
  folder = pathlib.Path("models/pretrained", name)
  layers, width, vocab = sizes
  nothing = np.zeros((vocab, width), jnp.bfloat16)
  target = head_shapes.Target(
    num_layers=layers, embed_dim=width, vocab_size=vocab,
    embedding=nothing, output=nothing,
  )  # fmt: skip
  head = head_checkpoints.load(str(folder), target, dtype=jnp.bfloat16)
  head_saving.save(
    head.module, str(tmp_path), features=head.features, target=target
  )
  read = lambda path: json.loads((path / "config.json").read_text())
  assert read(tmp_path) == read(folder)
  tensors = lambda path: (path / "model.safetensors").read_bytes()
  assert tensors(tmp_path) == tensors(folder)


@functools.cache
def held_out():
  tokenizer = tokenizers.load(PATHS["target"])
  return tuple(
    prompts.first_tokens(corpus.held_out_prompts(100), tokenizer, num_tokens=96)
  )


def complete(count=100, **settings):
  """Greedy completions of the first held-out prompts."""
  config = embedded.get_config()
  config.update(max_new_tokens=NEW_TOKENS, **settings)
  models = pair.build(config)
  run = pair.engine_of(config, models)
  asked = held_out()[:count]
  batches = make_batches(asked, batch_size=20, max_width=96)
  done = {}
  for batch in batches:
    completions, _ = run.run(batch)
    done |= {
      p.stream: c.token_ids
      for p, c in zip(batch.prompts, completions, strict=True)
    }
  return [done[i] for i in range(count)], models


def near_ties(models, actual, expected, *, margin) -> int:
  """Completions of the first prompts that differ, each from a near-tie on.

  A pass over one token and a pass over several add in another order, so two
  logits that are nearer than `margin` may change places.
  """
  longest = 128  # of a prompt with its completion
  apply = jax.jit(models.target.apply)
  cache = models.target.init_cache(1, longest)
  ties = 0
  asked = held_out()[: len(actual)]
  for prompt, ours, theirs in zip(asked, actual, expected, strict=True):
    if ours == theirs:
      continue
    at = next(
      i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b
    )
    context = np.array([[*prompt.token_ids, *theirs[:at]]])
    padded = np.pad(context, ((0, 0), (0, longest - context.shape[1])))
    output, _ = apply(models.params.target, padded, cache)
    logits = np.asarray(output.logits[0, context.shape[1] - 1])
    assert abs(logits[ours[at]] - logits[theirs[at]]) < margin
    ties += 1
  return ties


@functools.cache
def plain(count):
  return complete(drafter="plain", count=count)


SLOW = (
  dict(drafter="model(tokens=4)"),
  dict(drafter="model(tokens=4, tree=paths(2))", rule="match"),
  dict(drafter="ngram"),
  dict(drafter="eagle3(tokens=4)"),
  dict(drafter="layer_skip"),
  dict(drafter="eagle3(tokens=4, tree=dynamic(12, top_k=4))", rule="match"),
  dict(drafter="medusa"),
)


@pytest.mark.parametrize(
  "settings",
  [
    dict(drafter="model(tokens=4)", count=20),
    *(pytest.param(settings, marks=pytest.mark.slow) for settings in SLOW),
  ],
  ids=lambda s: "-".join(str(x) for x in s.values()),
)
def test_greedy_speculation_matches_greedy_autoregression(settings):
  """Token for token; a difference must start at a near-tie of the target."""
  expected, models = plain(settings.get("count", 100))
  got, _ = complete(**settings)
  assert near_ties(models, got, expected, margin=MARGIN) <= 2


@pytest.mark.gpu
def test_bfloat16_greedy_speculation_matches_plain_decoding():
  """Nothing is float32 but the logits, and speculation changes nothing."""
  settings = dict(dtype="bfloat16", count=20)
  expected, models = complete(**settings, drafter="plain")
  got, both = complete(**settings, drafter="model(tokens=4)")
  dtypes = {x.dtype for x in jax.tree.leaves(both.params)}
  assert dtypes == {jnp.dtype(jnp.bfloat16)}
  cache = models.target.init_cache(1, 4)
  assert cache.keys[0].dtype == cache.values[0].dtype == jnp.bfloat16
  output, _ = jax.eval_shape(
    models.target.apply, models.params.target, np.array([[1]]), cache
  )
  assert output.logits.dtype == jnp.float32
  assert near_ties(models, got, expected, margin=BFLOAT16_MARGIN) <= 3
