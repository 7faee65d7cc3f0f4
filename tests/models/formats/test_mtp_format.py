"""MTP heads beside transformers', or a slow NumPy forward where it has none."""

import functools
import json

import jax
import jax.numpy as jnp
import mtp_heads
import numpy as np
import pytest
import references
import safetensors.numpy
import torch
from flax import nnx
from references import MODELS, TOKENS, fuse_experts

from models import checkpoints
from models.formats import head_checkpoints, mtp_format
from models.networks.transformer import FINAL
from specjax import decode, drafters, tree
from specjax.types import Params
from specjax.warp import make_sampling


class Slow:
  """The head, for one row and all of its pairs at once."""

  def __init__(self, tensors, settings, embedding, output):
    self.tensors, self.settings = tensors, settings
    self.embedding, self.output = embedding, output

  def norm(self, x, name):
    scale = 1 + self.tensors[f"{name}.weight"]
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale

  def project(self, x, name):
    bias = self.tensors.get(f"layers.0.{name}.bias", 0)
    return x @ self.tensors[f"layers.0.{name}.weight"].T + bias

  def rotated(self, x):
    """Of `[T, H, C]`, at positions 0, 1, ..."""
    rope = self.settings["rope_parameters"]
    dim = int(x.shape[-1] * rope["partial_rotary_factor"])
    freq = rope["rope_theta"] ** -(np.arange(0, dim, 2) / dim)
    angle = np.arange(len(x))[:, None, None] * freq
    a, b, rest = np.split(x, [dim // 2, dim], axis=-1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)

  def attention(self, x):
    size, s = self.settings["head_dim"], self.settings
    both = self.project(x, "self_attn.q_proj")
    q, gate = np.split(both.reshape(len(x), -1, 2 * size), 2, axis=-1)
    heads = lambda y: y.reshape(len(x), -1, size)
    q = self.rotated(self.norm(q, "layers.0.self_attn.q_norm"))
    k = heads(self.project(x, "self_attn.k_proj"))
    k = self.rotated(self.norm(k, "layers.0.self_attn.k_norm"))
    v = heads(self.project(x, "self_attn.v_proj"))
    times = s["num_attention_heads"] // s["num_key_value_heads"]
    k, v = (np.repeat(y, times, axis=1) for y in (k, v))
    scores = np.einsum("thc,shc->hts", q, k) / np.sqrt(size)
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("hts,shc->thc", weights, v) / (1 + np.exp(-gate))
    return self.project(out.reshape(len(x), -1), "self_attn.o_proj")

  def __call__(self, tokens, hidden):
    """Logits and states after pairs (token t + 1, hidden t)."""
    both = [
      self.norm(self.embedding[tokens], "pre_fc_norm_embedding"),
      self.norm(hidden, "pre_fc_norm_hidden"),
    ]
    x = np.concatenate(both, axis=-1) @ self.tensors["fc.weight"].T
    x = x + self.attention(self.norm(x, "layers.0.input_layernorm"))
    read = self.norm(x, "layers.0.post_attention_layernorm")
    gate = self.project(read, "mlp.gate_proj")
    inner = gate / (1 + np.exp(-gate)) * self.project(read, "mlp.up_proj")
    x = x + self.project(inner, "mlp.down_proj")
    x = self.norm(x, "norm")
    return x @ self.output.T, x


@pytest.fixture
def dense(copied):
  """A target of one file with layers that have no experts, and its head."""
  path = copied("qwen3-5")
  return path, mtp_heads.add(path, MODELS["qwen3-5"][1])


def loaded(path, dtype=jnp.float32):
  network = checkpoints.load(str(path), dtype=dtype, mesh=None, sharding=None)
  return network, checkpoints.load_head(
    str(path), network, dtype=dtype, of_target=True
  )


def with_theirs(path, edit=lambda tensors: None, *, num_depths=1):
  """Adds a head of transformers' to a target of theirs, in float64."""
  target = references.read(path, dtype=torch.float64)
  theirs = mtp_heads.Theirs(target, num_depths=num_depths)
  if num_depths > 1:
    references.edit_config(path, num_nextn_predict_layers=num_depths)

  def added(tensors):
    tensors.update(theirs.tensors())
    edit(tensors)

  references.edit_tensors(path, added)
  return theirs


# Latents and a mixture, heads and a mixture, latents that are tied, and a layer
# whose projection reads the state first.
ORACLES = ("deepseek", "glm-moe", "glm-lite", "mimo")
EXACT = 2e-5  # float32, in which transformers takes norms and rotations


@pytest.mark.parametrize("name", ORACLES)
def test_head_matches_transformers(copied, name):
  """Of the target's states, and of its own state through the cache."""
  path = copied(name)
  theirs = with_theirs(path)
  with jax.enable_x64(True):
    network, head = loaded(path, jnp.float64)
    model, params = head.functions()
    target = network.functions(checkpoints.SkippedLayers(), (FINAL,))

    @jax.jit
    def run(of_target, params):
      rows = len(TOKENS)
      seen, _ = target.apply(
        of_target, TOKENS[:, :-2], target.init_cache(rows, 16)
      )
      actual, states, cache = model.apply(
        params, TOKENS[:, 1:-1], seen.features, model.init_cache(rows, 16)
      )
      more, fed, _ = model.apply(params, TOKENS[:, -1:], states[:, -1:], cache)
      join = lambda *parts: jnp.concatenate(parts, axis=1)
      return seen.features, join(actual, more), join(states, fed)

    features, *actual = run(network.params, params)
    hidden = theirs.features(TOKENS[:, :-2])
    _, first = theirs(TOKENS[:, 1:-1], hidden)
    fed_back = np.concatenate([hidden, first[:, -1:]], axis=1)
    expected = theirs(TOKENS[:, 1:], fed_back)
    assert references.relative_error(features, hidden) < EXACT
    for ours, wanted in zip(actual, expected, strict=True):
      assert references.relative_error(ours, wanted) < EXACT


def test_single_layer_drafts_match_transformers_after_rejections(copied):
  """Of its head applied again and again to all pairs, in rounds that reject."""
  path = copied("deepseek")
  theirs = with_theirs(path)

  def laws(text, drawn):
    hidden, pairs = theirs.features(text[:, :-1]), text[:, 1:]
    for token in drawn:
      logits, states = theirs(pairs, hidden)
      yield logits[0, -1]
      pairs = np.append(pairs, token)[None]
      hidden = np.concatenate([hidden, states[:, -1:]], axis=1)

  rounds_of_drafts(path, laws, 2, np.array([14, 6, 3]))


@pytest.mark.parametrize(
  "name", ["deepseek", pytest.param("mimo", marks=pytest.mark.slow)]
)
def test_multilayer_drafts_match_transformers_after_rejections(copied, name):
  """Each read whole for every law, at transformers' positions."""
  path, num_depths = copied(name), 3
  theirs = with_theirs(path, num_depths=num_depths)

  def laws(text, drawn):
    text, hidden = np.append(text, drawn)[None], theirs.features(text[:, :-1])
    count = hidden.shape[1]
    for k in range(num_depths):
      logits, hidden = theirs(
        text[:, k + 1 : k + 1 + count], hidden, layer=k, first=k + 1
      )
      yield logits[0, -1]

  rounds_of_drafts(path, laws, num_depths, np.array([14, 6, 2]))


def rounds_of_drafts(path, laws, depth, lengths):
  """Asserts of some rounds of chains that each token has its law.

  Args:
    path: of the target with its head.
    laws: `(text i32[1, T], drawn i32[G]) ->` the logits of all G.
    depth: G.
    lengths: of the prompts.
  """
  with jax.enable_x64(True):
    network, head = loaded(path, jnp.float64)
    model, head_params = head.functions()
    drafter = drafters.mtp(
      model, tree=tree.chain(depth), vocab_size=references.VOCAB
    )
    decoder = decode.make_decoder(
      network.functions(checkpoints.SkippedLayers(), head.features),
      drafter=drafter,
    )
    params = Params(target=network.params, draft=head_params)
    begin = functools.partial(
      decoder.init, prompts=TOKENS, lengths=lengths,
      rng_key=jax.random.key(0), buffer_length=40, max_new_tokens=20,
      sampling=make_sampling(3, temperature=0.5),
    )  # fmt: skip
    state = jax.jit(begin)(params)
    propose = jax.jit(decoder.propose)
    step = jax.jit(decoder.step)
    accepted = []
    for _ in range(4):
      draft, *_ = propose(params, state)
      for row, length in enumerate(state.length.tolist()):
        text = np.asarray(state.tokens[row : row + 1, :length])
        drawn = np.asarray(draft.tokens[row, 1:])
        for node, logits in enumerate(laws(text, drawn), 1):
          law = jax.nn.log_softmax(logits / 0.5)
          np.testing.assert_allclose(draft.log_probs[row, node], law, atol=1e-4)
      before = state.length
      state, _ = step(params, state)
      accepted += (state.length - before - 1).tolist()
  assert {0, *accepted} > {0}  # some were accepted, others not
  assert 0 in accepted


def test_head_matches_numpy_reference(dense):
  path, tensors = dense
  network, head = loaded(path)
  theirs = references.read(path, dtype=torch.float64)
  with torch.no_grad():
    hidden = theirs.model(torch.tensor(TOKENS[:, :-1])).last_hidden_state
  hidden = hidden.double().numpy()
  embedding = theirs.model.embed_tokens.weight.detach().double().numpy()
  output = theirs.lm_head.weight.detach().double().numpy()
  slow = Slow(tensors, MODELS["qwen3-5"][1], embedding, output)
  model, params = head.functions()
  run = jax.jit(
    lambda params, tokens, hidden: model.apply(
      params, tokens, hidden, model.init_cache(len(tokens), 16)
    )[:2]
  )
  target = network.functions(checkpoints.SkippedLayers(), head.features)
  read = lambda params, x: target.apply(params, x, target.init_cache(3, 16))[0]
  features = jax.jit(read)(network.params, TOKENS[:, :-1]).features
  assert references.relative_error(features, hidden) < 1e-4
  said = run(params, TOKENS[:, 1:], features)
  for row, tokens in enumerate(TOKENS):
    expected = slow(tokens[1:], hidden[row])
    for actual, wanted in zip(said, expected, strict=True):
      assert references.relative_error(actual[row], wanted) < 1e-4


@pytest.mark.parametrize("edit", [lambda tensors: None, fuse_experts])
def test_mixture_head_loads_experts_from_its_files(copied, edit):
  path = copied("qwen3-5-moe")
  tensors = mtp_heads.add(path, MODELS["qwen3-5-moe"][1])
  references.edit_tensors(path, edit)
  mlp = loaded(path)[1].module.layer.mlp
  for name in ("gate", "up", "down"):
    for i, actual in enumerate(getattr(mlp.experts, name)[...]):
      wanted = tensors[f"layers.0.mlp.experts.{i}.{name}_proj.weight"].T
      np.testing.assert_array_equal(actual, wanted)
    wanted = tensors[f"layers.0.mlp.shared_expert.{name}_proj.weight"]
    np.testing.assert_array_equal(getattr(mlp.shared, name)[...], wanted)


def test_head_accepts_copies_of_target_arrays(copied):
  """DeepSeek-V3's files hold its embedding and projection once more."""
  path = copied("deepseek")

  def edit(tensors):
    embedding = tensors["model.embed_tokens.weight"]
    tensors["model.layers.2.embed_tokens.weight"] = embedding.copy()
    output = tensors["lm_head.weight"].copy()
    tensors["model.layers.2.shared_head.head.weight"] = output

  with_theirs(path, edit)
  network, head = loaded(path)
  np.testing.assert_array_equal(
    head.module.embed.embedding[...], network.params["embed"]["embedding"][...]
  )


def test_standalone_head_matches_the_one_in_target_files(dense, tmp_path):
  """In speculators' form, of which names alone are others."""
  path, tensors = dense
  names = mtp_format.SPECULATORS.modules
  theirs = {v: names[k] for k, v in mtp_format.QWEN.modules.items()}

  def renamed(name):
    module, _, leaf = name.rpartition(".")
    module = theirs.get(module) or module.removeprefix("layers.0.")
    return f"mtp_layers.0.{module}.{leaf}"

  alone = tmp_path / "alone"
  alone.mkdir()
  made = {renamed(k): x.astype("f4") for k, x in tensors.items()}
  safetensors.numpy.save_file(made, alone / "model.safetensors")
  settings = {
    "speculators_model_type": "mtp", "num_nextn_predict_layers": 1,
    "transformer_layer_config": json.loads((path / "config.json").read_text()),
  }  # fmt: skip
  (alone / "config.json").write_text(json.dumps(settings))
  network, inside = loaded(path)
  assert head_checkpoints.is_head(str(alone))
  actual = checkpoints.load_head(str(alone), network, dtype=jnp.float32)
  assert actual.module.config == inside.module.config
  jax.tree.map(
    np.testing.assert_array_equal,
    nnx.state(actual.module), nnx.state(inside.module),
  )  # fmt: skip
