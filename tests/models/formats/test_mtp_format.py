"""MTP heads in the files of their targets, beside a slow NumPy forward."""

import json

import jax
import jax.numpy as jnp
import mtp_heads
import numpy as np
import pytest
import references
import torch
from references import MODELS, TOKENS, fuse_experts

from models import checkpoints, sharding
from models.formats import mtp_format
from models.formats.head_files import Place
from models.formats.weights import CheckpointError

pytestmark = pytest.mark.usefixtures("quick_to_compile")


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


def loaded(path):
  network = checkpoints.load(
    str(path), dtype=jnp.float32, mesh=None, sharding=None
  )
  return network, checkpoints.load_head(
    str(path), network, dtype=jnp.float32, of_target=True
  )


def test_a_head_says_what_a_slow_forward_says(dense):
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
  run = references.jit(
    lambda params, tokens, hidden: model.apply(
      params, tokens, hidden, model.init_cache(len(tokens), 16)
    )[:2]
  )
  target = network.functions(checkpoints.SkippedLayers(), head.features)
  features = references.jit(
    lambda params, tokens: (
      target.apply(params, tokens, target.init_cache(len(tokens), 16))[
        0
      ].features
    )
  )(network.params, TOKENS[:, :-1])
  assert references.relative_error(features, hidden) < 1e-4
  said = run(params, TOKENS[:, 1:], features)
  for row, tokens in enumerate(TOKENS):
    expected = slow(tokens[1:], hidden[row])
    for found, wanted in zip(said, expected, strict=True):
      assert references.relative_error(found[row], wanted) < 1e-4


@pytest.mark.parametrize("edit", [lambda tensors: None, fuse_experts])
def test_a_head_with_a_mixture_has_its_files_experts(copied, edit):
  path = copied("qwen3-5-moe")
  tensors = mtp_heads.add(path, MODELS["qwen3-5-moe"][1])
  references.edit_tensors(path, edit)
  mlp = loaded(path)[1].module.layer.mlp
  for name in ("gate", "up", "down"):
    for i, found in enumerate(getattr(mlp.experts, name)[...]):
      wanted = tensors[f"layers.0.mlp.experts.{i}.{name}_proj.weight"].T
      np.testing.assert_array_equal(found, wanted)
    wanted = tensors[f"layers.0.mlp.shared_expert.{name}_proj.weight"]
    np.testing.assert_array_equal(getattr(mlp.shared, name)[...], wanted)


def test_experts_of_a_head_that_cannot_be_cut_are_refused(copied):
  path = copied("qwen3-5-moe")
  mtp_heads.add(path, MODELS["qwen3-5-moe"][1])
  file = path / "config.json"
  settings = json.loads(file.read_text()) | dict(num_experts=4, vocab_size=98)
  file.write_text(json.dumps(settings))
  place = Place(
    mesh=jax.sharding.AbstractMesh((2,), ("model",)),
    sharding=sharding.tensor_parallel(("model",)),
  )
  with pytest.raises(ValueError, match="experts of width 20 cannot be cut"):
    mtp_format.load(str(path), None, place=place)


def test_a_head_of_another_shape_is_refused_by_name(dense):
  path, _ = dense
  network, _ = loaded(path)

  def edit(tensors):
    del tensors["mtp.fc.weight"]
    tensors["mtp.layers.1.mlp.up_proj.weight"] = np.zeros((2, 2), "f4")
    tensors["mtp.norm.weight"] = np.zeros(3, "f4")

  references.edit_tensors(path, edit)
  with pytest.raises(CheckpointError) as error:
    checkpoints.load_head(str(path), network, dtype=jnp.float32, of_target=True)
  for said in (
    "missing: fc.weight", "unexpected: mtp.layers.1.mlp.up_proj",
    "wrong shape: mtp.norm.weight, expected (32,)",
  ):  # fmt: skip
    assert said in str(error.value)


def test_targets_without_a_head_are_refused_by_name(copied):
  path = copied("qwen3-5")
  with pytest.raises(ValueError, match="comes without an MTP head"):
    mtp_format.describe(str(path))
  file = path / "config.json"
  settings = json.loads(file.read_text()) | {"model_type": "llama"}
  file.write_text(json.dumps(settings))
  with pytest.raises(ValueError, match=r"read of targets of .*, and .*'llama'"):
    mtp_format.describe(str(path))
