"""The head of a depth policy: its formula, and its files."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.networks import acceptance_head
from models.networks.acceptance_head import AcceptanceHead, HeadConfig

WIDTH = 4


@pytest.fixture
def head():
  module = AcceptanceHead(HeadConfig(width=WIDTH), rngs=nnx.Rngs(0))
  rng = np.random.default_rng(0)
  for block in module.blocks:
    block.weight[...] = jnp.asarray(rng.normal(size=(7, 7)), jnp.float32)
    block.bias[...] = jnp.asarray(rng.normal(size=7), jnp.float32)
  return module


def inputs(rows=3):
  rng = np.random.default_rng(1)
  hidden = rng.normal(size=(rows, WIDTH)).astype(np.float32)
  top, confidence, temperature = rng.random((3, rows)).astype(np.float32)
  return hidden, top, confidence, temperature


def test_it_is_residual_blocks_and_one_number(head):
  hidden, top, confidence, temperature = inputs()
  confidence[0] = 0.0  # whose logarithm is cut
  x = np.concatenate(
    [
      hidden,
      np.stack(
        [np.log(top), np.log(np.maximum(confidence, 1e-6)), temperature], 1
      ),
    ],
    axis=1,
  )
  for block in head.blocks:
    y = x @ np.asarray(block.weight[...]).T + np.asarray(block.bias[...])
    x = x + y / (1 + np.exp(-y))
  expected = x @ np.asarray(head.out.weight[...]).T + np.asarray(
    head.out.bias[...]
  )
  actual = head(*map(jnp.asarray, (hidden, top, confidence, temperature)))
  np.testing.assert_allclose(actual, expected[:, 0], rtol=1e-4)


def test_what_is_saved_is_read_again(head, tmp_path):
  acceptance_head.save(head, str(tmp_path))
  again = acceptance_head.load(str(tmp_path))
  assert again.config == head.config
  given = tuple(map(jnp.asarray, inputs()))
  np.testing.assert_array_equal(again(*given), head(*given))


def test_what_is_no_such_head_is_refused(head, tmp_path):
  with pytest.raises(FileNotFoundError, match=r"no config\.json"):
    acceptance_head.load(str(tmp_path))
  acceptance_head.save(head, str(tmp_path))
  file = tmp_path / "config.json"
  settings = json.loads(file.read_text())
  for change, message in (
    ({"model_type": "llama"}, "must have model_type 'acceptance_head'"),
    ({"width": 0}, "width must be an integer >= 1, got 0"),
    ({"num_blocks": 4}, r"missing: blocks\.3\.bias"),
    ({"num_blocks": 2}, r"unexpected tensors .* blocks\.2\.bias"),
    ({"width": 5}, r"wrong shape: blocks\.0\.bias"),
  ):
    file.write_text(json.dumps(settings | change))
    with pytest.raises(ValueError, match=message):
      acceptance_head.load(str(tmp_path))
