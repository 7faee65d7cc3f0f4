"""Checkpoints written: Llama files that come back, here and in transformers."""

import pathlib

import described
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
import transformers
from flax import nnx
from references import TOKENS, VOCAB

from models import tokenizers
from models.formats import huggingface, loading
from models.networks.description import llama_config
from models.networks.rope import Rope, RopeScaling

SMALL = llama_config(
  vocab_size=VOCAB, embed_dim=32, num_layers=2, num_heads=4, num_kv_heads=2,
  head_dim=8, mlp_dim=48, max_positions=64,
)  # fmt: skip


def make_module(**changes):
  """A Llama whose biases and scales are random too."""
  return described.random_module(described.alter(SMALL, **changes))


def contents(directory):
  return {f.name: f.read_bytes() for f in pathlib.Path(directory).iterdir()}


LLAMAS = {
  "plain": {},
  "all-switches": dict(
    qkv_bias=True, out_bias=True, bias=True, tied_embeddings=True,
    head_dim=12, num_kv_heads=1, norm_eps=1e-3,
    rope=Rope(
      theta=1000.0, dim=12,
      scaling=RopeScaling(
        factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_positions=16,
      ),
    ),
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", LLAMAS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_llama_round_trips_here_and_in_transformers(
  tmp_path, name, dtype
):
  module, path = make_module(**LLAMAS[name]), tmp_path / "new" / "model"
  huggingface.save_llama(module, path, dtype=dtype)
  back = loading.load(huggingface.source(path))
  assert back.config == module.config
  rounded = lambda x: x.astype(dtype).astype(jnp.float32)
  jax.tree.map(
    np.testing.assert_array_equal,
    nnx.state(back), jax.tree.map(rounded, nnx.state(module)),
  )  # fmt: skip
  if dtype == "float32":
    model, report = references.read(path, output_loading_info=True)
    assert not any(report.values()), report
    assert type(model) is transformers.LlamaForCausalLM
    expected = references.logits(model, TOKENS)
    actual = references.module_logits(module)
    assert references.relative_error(actual, expected) < 1e-4


@pytest.fixture(scope="module")
def tokenizer():
  texts = ["def f(x):\n  return x + 1\n"] * 20
  return tokenizers.train(texts, vocab_size=280)


def test_tokenizer_is_saved_with_the_model(tmp_path, tokenizer):
  module = make_module(vocab_size=300)
  huggingface.save_llama(module, str(tmp_path), tokenizer=tokenizer)
  assert sorted(contents(tmp_path)) == [
    "config.json", "model.safetensors", "tokenizer.json",
    "tokenizer_config.json",
  ]  # fmt: skip
  back = tokenizers.load(str(tmp_path))
  assert back.fingerprint() == tokenizer.fingerprint()
  config = transformers.AutoConfig.from_pretrained(tmp_path)
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
  ends = {config.eos_token_id, config.bos_token_id, theirs.eos_token_id}
  assert ends == {tokenizer.eos_token_id}
  text = "def g(y):\n  return y"
  assert theirs(text).input_ids == tokenizer.encode(text)


@pytest.mark.parametrize(
  "changes", [dict(norm="layer"), dict(activation="gelu"), dict(qkv_bias=True)]
)
def test_models_llama_cannot_express_are_not_saved(tmp_path, changes):
  path = tmp_path / "model"
  with pytest.raises(ValueError, match="Llama's format cannot express"):
    huggingface.save_llama(make_module(**changes), str(path))
  assert not path.exists()


def test_interrupted_overwrite_leaves_no_valid_checkpoint(
  tmp_path, monkeypatch
):
  huggingface.save_llama(make_module(), str(tmp_path))

  def refuse(self, target):
    raise OSError("interrupted")

  with monkeypatch.context() as patch:
    patch.setattr(pathlib.Path, "replace", refuse)
    with pytest.raises(OSError, match="interrupted"):
      huggingface.save_llama(make_module(), str(tmp_path))
  assert sorted(contents(tmp_path)) == ["model.safetensors"]
  with pytest.raises(FileNotFoundError, match=r"there is no config\.json"):
    loading.load(huggingface.source(tmp_path))
