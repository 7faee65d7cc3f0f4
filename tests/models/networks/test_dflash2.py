"""DFlash 2's heads against a slow forward in NumPy, by published names."""

import jax
import jax.numpy as jnp
import numpy as np
import published_blocks
import pytest
import safetensors.numpy
from published_blocks import BLOCK, LAYERS, LAYERS_JSON, MASK
from published_heads import TARGET, H, V

from models.formats import head_checkpoints, head_saving

random = published_blocks.numbers(2)
GROUP, TAPS, RANK, TOP, SCALE, CAP = 2, 2, 3, 4, 0.7, 3.0
OF_HEAD = {
  "block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": [1, 4, 6],
  "conv_kernel_size": TAPS, "conv_group_size": GROUP, "selector_rank": RANK,
  "selector_top_k": TOP, "output_multiplier": SCALE,
  "final_logit_softcapping": CAP,
}  # fmt: skip
# As the published fixture: windows, and a block that sees itself both ways.
CONFIG = {k: v for k, v in LAYERS_JSON.items() if k != "rope_theta"} | dict(
  architectures=["DFlash2DraftModel"], is_causal=False, dflash_config=OF_HEAD,
  rope_parameters={
    "rope_theta": LAYERS_JSON["rope_theta"], "rope_type": "default"
  },
  sliding_window=32, use_sliding_window=True,
  layer_types=["sliding_attention"] * LAYERS,
)  # fmt: skip
CONV = {
  f"{name}_conv.{x}": shape
  for name in ("attention", "mlp")
  for x, shape in (
    ("base_kernel", (2, TAPS, H)),
    ("kernel_projection.weight", (2 * TAPS * H // GROUP, H)),
  )
}
SELECTOR = {
  "candidate_selector.hidden_projection.weight": random(RANK, H),
  "candidate_selector.predecessor_codebook": random(V, RANK),
  "candidate_selector.successor_codebook": random(V, RANK),
}
CONVS = {
  f"layers.{i}.{name}": random(*shape)
  for i in range(LAYERS)
  for name, shape in CONV.items()
}
TENSORS = published_blocks.TENSORS | CONVS | SELECTOR
# As speculators' embeddings are.
NAMED = {
  k + ".weight" if k.endswith("_codebook") else k: v for k, v in TENSORS.items()
}
OF = lambda **changes: CONFIG | dict(dflash_config=OF_HEAD | changes)


def load(path, *, config=CONFIG, tensors=TENSORS):
  directory = published_blocks.write(path, config, tensors)
  return head_checkpoints.load(directory, TARGET)


class Block(published_blocks.Block):
  """With convolutions."""

  def around(self, name, x, part):
    before = self.convolved(x, x, 0, name)
    return self.convolved(part(before), x, 1, name)

  def convolved(self, x, read, side, name):
    """Row i, channel c: of itself and the row before, by kernels of `read`."""
    base = self.w[f"{name}.base_kernel"]
    projection = self.w[f"{name}.kernel_projection.weight"]
    y = np.zeros_like(x)
    for i in range(len(x)):
      change = (projection @ read[i]).reshape(2, TAPS, H // GROUP)
      for tap in range(min(TAPS, i + 1)):
        for c in range(H):
          kernel = base[side, tap, c] + change[side, tap, c // GROUP]
          y[i, c] += kernel * x[i - tap, c]
    return y


states = Block(TENSORS).states


def selected(hidden, before, cap):
  """Logits after a token: the candidates' are chosen before all else."""
  plain = TARGET.output @ hidden
  scaled = SCALE * plain
  if cap:
    scaled = cap * np.tanh(scaled / cap)
  code = TENSORS["candidate_selector.hidden_projection.weight"] @ hidden
  code = code * TENSORS["candidate_selector.predecessor_codebook"][before]
  out = np.full(V, -np.inf)
  for token in np.argsort(-plain)[:TOP]:
    edge = code @ TENSORS["candidate_selector.successor_codebook"][token]
    out[token] = scaled[token] + edge
  return out


@pytest.mark.parametrize(("cap", "tensors"), [(CAP, TENSORS), (0, NAMED)])
def test_block_logits_match_numpy_reference(cap, tensors, tmp_path):
  """Of two rows of two lengths; tokens before need not be candidates."""
  config = OF(final_logit_softcapping=cap)
  head = load(tmp_path / "h", config=config, tensors=tensors)
  assert (head.kind, head.features) == ("dflash2", (2, 5, 7))
  model, params = head.functions()
  assert (model.num_depths, model.markov.estimates) == (BLOCK - 1, False)
  features, newest, counts = random(2, 6, 3 * H), jnp.array([[3], [7]]), (6, 4)
  cache = jax.jit(model.read)(params, features, model.init_cache(2, 16))
  cache = cache.replace(length=jnp.array(counts))
  block, _ = jax.jit(model.predict)(params, newest, cache)
  apply = jax.jit(model.markov.apply)
  before = jnp.array([[0, 5, 12], [1, 7, 9]])
  for k in range(BLOCK - 1):
    place = jax.tree.map(lambda x, k=k: x[:, k, None], block)
    logits, *_ = apply(params, place, before, jnp.zeros((2, 3, 0)))
    for row, count in enumerate(counts):
      hidden = states(features[row, :count], int(newest[row, 0]))[1 + k]
      for w in range(3):
        expected = selected(hidden, int(before[row, w]), cap)
        np.testing.assert_allclose(
          logits[row, w], expected, atol=2e-3, rtol=2e-3
        )


def test_saved_head_has_published_tensor_names(tmp_path):
  head = load(tmp_path / "h")
  head_saving.save(
    head.module, str(tmp_path / "again"), features=head.features,
    dtype=jnp.float32, target=TARGET,
  )  # fmt: skip
  saved = safetensors.numpy.load_file(tmp_path / "again" / "model.safetensors")
  assert {*saved} == {*TENSORS}
  again = head_checkpoints.load(str(tmp_path / "again"), TARGET)
  assert again.module.config == head.module.config
  assert again.features == head.features


WITHOUT = {k: v for k, v in OF_HEAD.items() if k != "selector_top_k"}


@pytest.mark.parametrize(
  ("config", "message"),
  [
    (OF(input_embedding_scale=0.5), "input_embedding_scale must be 1"),
    (OF(conv_group_size=3), "groups of 3 channels"),
    (OF(selector_top_k=V + 1), "14 candidates are more than the 13"),
    (OF(selector_bias=True), "settings: selector_bias"),
    (CONFIG | dict(dflash_config=WITHOUT), "selector_top_k must be an int"),
    (CONFIG | dict(use_swa=True), "settings: use_swa"),
    (
      {k: v for k, v in CONFIG.items() if k != "dflash_config"}
      | dict(speculators_model_type="dflash2"),
      "speculators_model_type 'dflash2' is not known",
    ),
  ],
)  # fmt: skip
def test_unsupported_settings_are_rejected_by_name(config, message, tmp_path):
  with pytest.raises(ValueError, match=message):
    load(tmp_path / "h", config=config)


@pytest.mark.parametrize(
  ("said", "both_ways"), [({"is_causal": False}, True), ({}, False)]
)
def test_windowed_block_is_causal_by_default(said, both_ways):
  config = {k: v for k, v in CONFIG.items() if k != "is_causal"} | said
  shape = head_checkpoints.shape(config, TARGET)
  assert shape.config.causal_windows is not both_ways
