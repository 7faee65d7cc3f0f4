"""Decodes toy pairs on meshes, as a program that `several` starts.

  python mesh_decoding.py OUTPUT CASE:MESH...

OUTPUT gets `{"CASE:MESH": {"tokens", "num_steps", "num_accepted",
"own_state"}}`; a mesh is the sizes of its axes, as in 2x4, or `alone` for one
device without a mesh.
"""

import contextlib
import functools
import json
import os
import pathlib
import sys

import described
import forms
import jax
import jax.numpy as jnp
import mesh_models
import numpy as np
import toys
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from mesh_models import CONFIG, VOCAB

from models import head_shapes, sharding
from models.networks import stacked, t5
from models.networks.dflash import ParallelConfig
from models.networks.dflash2 import DFlash2Config
from models.networks.dspark import DSparkConfig
from models.networks.eagle import EagleConfig
from models.networks.medusa import MedusaConfig
from models.networks.mtp import MtpConfig
from models.networks.t5_config import T5Config
from models.networks.transformer import FINAL, SkippedLayers, Transformer
from specjax import decode, drafters, rules
from specjax import tree as tree_lib
from specjax.adaptive import policies
from specjax.adaptive.ladder import make_ladder
from specjax.runtime.mesh import MeshDecoder
from specjax.siblings import IID
from specjax.types import Draft, Drafter, Inputs, Params
from specjax.warp import make_sampling

ROWS = 8
LENGTHS = np.array([3, 7, 5, 6, 1, 2, 7, 4], np.int32)
PROMPTS = np.random.default_rng(0).integers(0, VOCAB, (ROWS, 7), np.int32)
# Rows stop at very different times, some of them at once.
BUDGETS = np.array([20, 3, 0, 11, 20, 1, 17, 9], np.int32)

PATHS = tree_lib.paths(2, 2)
TREE = tree_lib.Tree((-1, 0, 0, 1))

# A draft is laid out in another way on every other mesh.
DRAFTS = {
  "1x8": "as the target",
  "2x4": "as the target",
  "4x2": "replicated",
  "8x1": "as the target",
  "2x2x2": "on its own axis",
}


def _drafted(target, **toy):
  """A table-lookup model, and parameters with a draft that is a little off."""
  draft = toys.near(target, noise=0.7, seed=2)
  both = Params(target=jnp.asarray(target), draft=jnp.asarray(draft))
  return toys.table_model(VOCAB, **toy), both


def table_pair(mesh):
  """Table-lookup models, whole on every device."""
  del mesh
  model, params = _drafted(toys.table(VOCAB, seed=1))
  drafter = drafters.model(model, tree=PATHS, vocab_size=VOCAB)
  return decode.make_decoder(model, drafter=drafter, rule="recursive"), params


def _ladder():
  model = toys.table_model(VOCAB)
  return make_ladder(
    model,
    lambda tree: drafters.model(
      model, tree=tree, vocab_size=VOCAB,
      policy=policies.fixed(tree.max_depth),
    ),
    rule=rules.get("token"), vocab_size=VOCAB, lengths=(0, 1, 3),
  )  # fmt: skip


def ladder_pair(mesh):
  """The longest of several; see `decode_on`."""
  return _ladder().longest, table_pair(mesh)[1]


def shared_pair(mesh):
  """A draft from a table that all rows share, and from what each row did."""
  del mesh
  chain = tree_lib.chain(2)

  def propose(params, state, target_cache, context):
    del params
    root = context.root
    first = state["table"][root, state["done"][1][:, None] % VOCAB]
    tokens = jnp.concatenate([root, first, first], axis=1)
    draft = Draft(tree=chain, siblings=IID, tokens=tokens, log_probs=None)
    return draft, state, target_cache

  def commit(params, state, commit):
    del params
    done = state["done"].at[1].add(commit.count)
    return state | {"done": done}

  target = toys.table(VOCAB, seed=1, contexts=1, scale=3)
  likely = np.argsort(-target[0])[:4]
  table = np.random.default_rng(0).choice(likely, (VOCAB, VOCAB))
  drafter = Drafter(
    name="shared",
    tree=chain,
    siblings=IID,
    init=lambda params, batch, slots, inputs: {
      "table": jnp.asarray(table), "done": jnp.zeros((2, batch), int)
    },
    propose=propose,
    commit=commit,
    row_axes=lambda state: {"table": None, "done": 1},
  )  # fmt: skip
  decoder = decode.make_decoder(toys.table_model(VOCAB), drafter=drafter)
  return decoder, Params(target=jnp.asarray(target))


def counted_pair(mesh):
  """A draft of what was commonest so far, counted over the rows of all."""
  del mesh
  decoder = decode.make_decoder(
    toys.table_model(VOCAB), drafter=forms.shared_counts(VOCAB), rule="match"
  )
  target = toys.table(VOCAB, seed=1, contexts=1, scale=5)
  return decoder, Params(target=jnp.asarray(target))


def lookahead_pair(mesh):
  """Certain trees from what the target guessed."""
  del mesh
  drafter = drafters.lookahead(
    window=3, tokens=2, num_guesses=3, pool_size=40, vocab_size=VOCAB
  )
  decoder = decode.make_decoder(
    toys.table_model(VOCAB), drafter=drafter, rule="recursive"
  )
  target = toys.table(VOCAB, seed=1, contexts=3, scale=3)
  return decoder, Params(target=jnp.asarray(target))


def inputs_pair(mesh):
  """A head on the features of a target that reads an input."""
  del mesh
  target = toys.table(VOCAB, seed=1)
  model, params = _drafted(target, layers=2, with_inputs=True)
  drafter = forms.feature_head(VOCAB)
  return decode.make_decoder(model, drafter=drafter), params


T5_CONFIG = T5Config(
  vocab_size=VOCAB, embed_dim=16, num_layers=2, num_encoder_layers=1,
  num_heads=8, head_dim=3, mlp_dim=24,
  gated_mlp=True,
)  # fmt: skip
T5_INPUTS = Inputs(
  tokens=np.random.default_rng(1).integers(0, VOCAB, (ROWS, 12), np.int32),
  lengths=np.array([12, 3, 1, 7, 9, 2, 11, 5], np.int32),
)


def t5_pair(mesh):
  """Encoder-decoders in float64, cut over all but the rows' axis."""
  axes = tuple(a for a in mesh.axis_names if a != "data") if mesh else ()
  rules = sharding.Sharding(axes) if mesh else None
  module = t5.T5(T5_CONFIG, dtype=jnp.float64, rngs=nnx.Rngs(3))
  model, params = t5.as_language_model(module, sharding=rules)
  drafter = drafters.model(model, tree=TREE, vocab_size=VOCAB)
  decoder = decode.make_decoder(model, drafter=drafter, rule="recursive")
  params = jax.tree.map(lambda x: 2 * x, params)
  both = Params(target=params, draft=jax.tree.map(lambda x: 1.1 * x, params))
  if mesh:
    specs = sharding.param_specs(params, rules)
    both = _placed(both, mesh, Params(target=specs, draft=specs))
  return decoder, both


def _placed(tree, mesh, specs):
  """Arrays of every process, cut by their specs."""
  put = lambda x, spec: jax.make_array_from_callback(
    x.shape, NamedSharding(mesh, spec), lambda i: np.asarray(x)[i]
  )
  return jax.tree.map(put, tree, specs)


def rules_on(mesh):
  """The target's rules, and the draft's as `DRAFTS` says."""
  axes = tuple(a for a in mesh.axis_names if a != "data") if mesh else ()
  rules = sharding.Sharding(axes)
  of_draft = {
    "replicated": sharding.Sharding(()),
    "as the target": rules,
    "on its own axis": sharding.Sharding(axes[-1:]),
  }[DRAFTS[name_of(mesh)] if mesh else "replicated"]
  return rules, of_draft


def network_pair(mesh, how="paths", description=CONFIG, uneven=False):
  """Stacked transformers in float64."""
  rules, of_draft = rules_on(mesh)
  size = sharding.num_parts(rules, mesh) if mesh else 1
  config = sharding.kv_heads_for(description, size)
  params = _weights(description, uneven=uneven)
  params = mesh_models.with_kv_heads(params, description, config)
  rules, of_draft = (
    sharding.for_experts(
      description, x, sharding.num_parts(x, mesh) if mesh else 1
    )
    for x in (rules, of_draft)
  )
  model = lambda rules, **more: stacked.as_language_model(
    config, dtype=jnp.float64, sharding=rules, **more
  )
  decoder = decode.make_decoder(
    model(rules),
    drafter=_drafter(how, lambda **more: model(of_draft, **more)),
    rule="recursive" if how in ("paths", "tree") else "token",
    widths=(1, 2) if how == "depth" else (),
  )
  # The draft is the target, a little off.
  draft = jax.tree.map(lambda x: 1.2 * x, params)
  if mesh:
    params, draft = (
      _placed(x, mesh, sharding.param_specs(x, how_cut))
      for x, how_cut in ((params, rules), (draft, of_draft))
    )
  has_draft = how in ("paths", "tree", "chain", "depth")
  return decoder, Params(target=params, draft=draft if has_draft else None)


def head_pair(mesh, how):
  """A stacked target, and a head on its features."""
  rules, of_draft = rules_on(mesh)
  size = sharding.num_parts(rules, mesh) if mesh else 1
  config = sharding.kv_heads_for(CONFIG, size)
  features, of_head, form, rule = HEADS[how]
  if mesh:
    of_head, of_draft = of_head.cut(
      of_draft, sharding.num_parts(of_draft, mesh)
    )
  module = head_shapes.make(of_head, dtype=jnp.float64, rngs=nnx.Rngs(4))
  model, head = head_shapes.functions(module, sharding=mesh and of_draft)
  # Norms as they are; everything else larger, for laws that are no even ones.
  head = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, head)
  params = Params(
    target=mesh_models.with_kv_heads(_weights(), CONFIG, config), draft=head
  )
  if mesh:
    specs = Params(
      target=sharding.param_specs(params.target, rules),
      draft=sharding.param_specs(head, of_draft),
    )
    params = _placed(params, mesh, specs)
  target = stacked.as_language_model(
    config, dtype=jnp.float64, sharding=rules, features=features
  )
  drafter = form(model, vocab_size=VOCAB)
  return decode.make_decoder(target, drafter=drafter, rule=rule), params


HEAD = described.alter(CONFIG, num_kv_heads=8, num_layers=1)
BLOCK = dict(
  layers=described.alter(HEAD, num_layers=2, qk_norm="head"), num_fused=2,
  block_size=4, mask_token=5,
)  # fmt: skip
_bind = functools.partial
# The features that a head reads, what it is, how it drafts, and the rule.
HEADS = {
  "eagle3": (
    (0, 1),
    EagleConfig(layers=HEAD, generation=3, num_fused=2, draft_vocab_size=16),
    _bind(drafters.eagle, tree=TREE), "recursive",
  ),
  "eagle2": (
    (FINAL,), EagleConfig(layers=HEAD, generation=1),
    _bind(drafters.eagle, tree=tree_lib.bound(4, 2, 3)), "match",
  ),
  "mtp": (  # of two layers of latents
    (FINAL,), MtpConfig(layers=mesh_models.LATENTS, num_depths=2),
    _bind(drafters.mtp, tree=TREE), "recursive",
  ),
  "medusa": (
    (FINAL,),
    MedusaConfig(num_heads=2, num_layers=1, embed_dim=16, vocab_size=VOCAB),
    _bind(drafters.medusa, tree=PATHS), "kseq",
  ),
  "dflash": (
    (1, 2), ParallelConfig(**BLOCK),
    _bind(drafters.dflash, tree=tree_lib.chain(3)), "block",
  ),
  "dflash2": (
    (1, 2),
    DFlash2Config(taps=2, group=2, rank=4, num_candidates=5, **BLOCK),
    _bind(drafters.dflash2, tree=PATHS), "block_transport",
  ),
  "dspark": (
    (1, 2), DSparkConfig(markov="rnn", rank=4, confidence=True, **BLOCK),
    _bind(drafters.dspark, tree=TREE, threshold=0.3), "recursive",
  ),
}  # fmt: skip


def _drafter(how, model):
  """The drafter; `model` makes the drafting model."""
  if how == "plain":
    return None
  if how == "ngram":
    return drafters.ngram(tokens=2, max_ngram=1)
  if how == "depth":
    return drafters.model(
      model(), tree=tree_lib.chain(3), vocab_size=VOCAB,
      policy=policies.survival(threshold=0.4),
    )  # fmt: skip
  if how == "layer_skip":
    return drafters.layer_skip(
      model(skipped=SkippedLayers(attention=(1,))),
      tree=tree_lib.paths(2, 1),
      vocab_size=VOCAB,
    )
  trees = {"paths": PATHS, "tree": TREE, "chain": tree_lib.chain(2)}
  return drafters.model(model(), tree=trees[how], vocab_size=VOCAB)


def name_of(mesh) -> str:
  """Sizes of the axes, as in "2x4"."""
  return "x".join(map(str, mesh.shape.values()))


def _weights(config=CONFIG, *, uneven=False):
  module = Transformer(config, dtype=jnp.float64, rngs=nnx.Rngs(3))
  params = jax.tree.map(lambda x: 8 * x, stacked.stack(module))
  if not uneven:
    return params
  # Biases and norms are else the same on all devices.
  rng = np.random.default_rng(6)
  noisy = lambda x: x + 0.2 * rng.normal(size=x.shape).astype(x.dtype)
  return jax.tree.map(noisy, params)


INPUTS = {"inputs": np.arange(8, dtype=np.int32), "t5": T5_INPUTS}
# Of these the text of a row goes on, and one begins as a row that is there.
EXTENDED = ("inputs", "counted", "t5", "hybrid")
SOURCES = {"counted": 1, "t5": 0, "paths": 0, "layer_skip": 0}
# The states of whose drafters are compared, beside the texts.
OWN = ("shared", "counted", "lookahead")
# Layers of several kinds, and such that have states.
FAMILIES = {
  name: functools.partial(
    network_pair, how=how, description=description, uneven=True
  )
  for name, how, description in (
    ("gemma4", "tree", mesh_models.GEMMA4),
    ("hybrid", "chain", mesh_models.HYBRID),
  )
}
# Lookup tables, and networks that draft in every way.
CASES = {
  "tables": table_pair,
  "ladder": ladder_pair,
  "shared": shared_pair,
  "counted": counted_pair,
  "inputs": inputs_pair,
  "t5": t5_pair,
  "lookahead": lookahead_pair,
  **{
    how: functools.partial(network_pair, how=how)
    for how in ("paths", "depth", "layer_skip", "ngram", "plain")
  },
  "mixture": functools.partial(network_pair, description=mesh_models.MIXED),
  **FAMILIES,
  **{how: functools.partial(head_pair, how=how) for how in HEADS},
}


def decode_on(case: str, mesh) -> dict:
  """Runs one case on a mesh, or on one device without."""
  decoder, params = CASES[case](mesh)
  if mesh:
    decoder = MeshDecoder.of(decoder, mesh=mesh)

  inputs = INPUTS.get(case)
  more = {}
  if case == "tables":  # every row counts its own text, and ends where it ends
    more = dict(
      sampling=make_sampling(
        8, frequency_penalty=np.linspace(-1, 1, 8), logit_bias={1: 2.0},
        stop_token_ids=[[row] for row in range(8)], min_tokens=2,
      ),
      stop_tokens=(3,), ignore_stop=np.arange(8) % 2 == 0,
    )  # fmt: skip

  def init(params):
    return decoder.init(
      params, PROMPTS, LENGTHS, jax.random.key(5), buffer_length=32,
      max_new_tokens=BUDGETS, inputs=inputs, **more,
    )  # fmt: skip

  def replaced(params, state):
    """Gives the first row that ends another prompt."""
    state = decoder.steps(params, state, 100, num_idle=1)
    return decoder.admit(
      params, state, jnp.argmax(state.done), PROMPTS[6], LENGTHS[6],
      jax.random.key(8), max_new_tokens=9,
      inputs=jax.tree.map(lambda x: x[6:7], inputs),
    )  # fmt: skip

  def extended(params, state):
    return decoder.extend(
      params, state, 5, PROMPTS[0], LENGTHS[0], max_new_tokens=4
    )

  def admitted(params, state):
    """Admits a row with a prefix of another of its group, or of itself."""
    return decoder.admit(
      params, state, 1, PROMPTS[1], LENGTHS[1], jax.random.key(9),
      max_new_tokens=4, source=SOURCES[case], keep=3,
      inputs=jax.tree.map(lambda x: x[1:2], inputs),
    )  # fmt: skip

  def read(state):
    committed = np.arange(state.tokens.shape[1]) < state.length[:, None]
    return {
      "tokens": jnp.where(committed, state.tokens, -1),  # others are stale
      "num_steps": state.num_steps,
      "num_accepted": state.counters.num_accepted,
      # Caches lie as their models do.
      "own_state": jax.tree.leaves(state.drafter_state) if case in OWN else (),
    }

  generate = jax.jit(decoder.generate)  # dear to compile, and called thrice
  whole = NamedSharding(mesh, P()) if mesh else None
  with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
    state = jax.jit(init)(params)
    if case in INPUTS:
      state = jax.jit(replaced)(params, state)
    if case == "ladder":
      on_mesh = lambda one: MeshDecoder.of(one, mesh=mesh) if mesh else one
      steps = {
        n: jax.jit(on_mesh(one).steps) for n, one in _ladder().decoders.items()
      }
      for length in (3, 0, 1, 0, 3):
        state = steps[length](params, state, 2)
    state = generate(params, state)
    if case in EXTENDED:
      state = generate(params, jax.jit(extended)(params, state))
    if case in SOURCES:
      state = generate(params, jax.jit(admitted)(params, state))
    gathered = jax.jit(read, out_shardings=whole)(state)
  return jax.tree.map(
    lambda x: np.asarray(x.addressable_data(0)).tolist(), gathered
  )


def main(output, *runs):
  """See the module."""
  jax.config.update("jax_enable_x64", True)
  count = int(os.environ["JAX_NUM_PROCESSES"])
  if count > 1:
    jax.distributed.initialize(
      num_processes=count, process_id=int(os.environ["JAX_PROCESS_ID"])
    )
  gathered = {}
  for run in runs:
    case, sizes = run.split(":")
    mesh = None
    if sizes != "alone":
      sizes = tuple(map(int, sizes.split("x")))
      axes = ("data", "model", "draft")[: len(sizes)]
      auto = (AxisType.Auto,) * len(sizes)
      mesh = jax.make_mesh(sizes, axes, axis_types=auto)
    gathered[run] = decode_on(case, mesh)
  if jax.process_index() == 0:
    pathlib.Path(output).write_text(json.dumps(gathered))
  if count > 1:
    multihost_utils.sync_global_devices("done")


if __name__ == "__main__":
  main(*sys.argv[1:])
