"""Training of T5s and block drafters."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import execute
from flax import nnx

from launch import decode, train
from launch.training import t5
from models.networks import specdec
from models.networks.specdec import BlockConfig, BlockDrafter
from models.networks.t5_config import T5Config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """Pairs of both splits, and answers to those of one."""
  folder = tmp_path_factory.mktemp("pairs")
  for split, first in (("train", 100), ("validation", 160)):
    lines = [
      {"id": i, "input": f"back: {first + i}", "output": str(first + i)[::-1]}
      for i in range(60)
    ]
    path = folder / f"{split}.jsonl"
    path.write_text("".join(json.dumps(x) + "\n" for x in lines))
  return folder


def test_trained_t5_decodes_with_its_trained_block_drafter(folder, tmp_path):
  for name in ("tiny", "tiny_block"):
    assert execute(
      train.run, f"--config=configs/train_t5.py:{name},{folder}",
      f"--workdir={tmp_path / name}-run", f"--export={tmp_path / name}",
    ) == 0  # fmt: skip
  assert specdec.is_block(tmp_path / "tiny_block")
  rows = {}
  for name, more in (
    ("plain", ["--config.drafter=plain"]),
    ("token", ["--config.rule=token"]),
    ("greedy", ["--config.drafter=specdec(tokens=4, siblings=given)",
                "--config.temperature=1",
                "--config.rule=top_beta(beta=1, tau=3.0)"]),
  ):  # fmt: skip
    out = tmp_path / f"{name}.jsonl"
    assert execute(
      decode.run, f"--config=configs/t5.py:target={tmp_path / 'tiny'},"
      f"draft={tmp_path / 'tiny_block'}", "--config.drafter=specdec(tokens=4)",
      "--config.max_new_tokens=8", "--config.batch_size=30", *more,
      "--nobaseline", f"--prompts={folder / 'validation.jsonl'}",
      f"--output={out}",
    ) == 0  # fmt: skip
    rows[name] = [json.loads(x)["token_ids"] for x in out.open()]
  assert rows["token"] == rows["plain"]
  assert rows["greedy"] == rows["plain"]


SHAPE = T5Config(
  vocab_size=17, embed_dim=16, num_layers=1, num_encoder_layers=1, num_heads=2,
  head_dim=8, mlp_dim=24,
)  # fmt: skip


def test_block_loss_covers_k_tokens_minus_glanced_ones(folder):
  module = BlockDrafter(BlockConfig(t5=SHAPE, num_masks=3), rngs=nnx.Rngs(0))
  lengths = jnp.array([1 + 6, 1 + 2])
  batch = {
    "inputs": jnp.ones((2, 4), jnp.int32), "input_lengths": jnp.array([4, 2]),
    "tokens": jnp.arange(16).reshape(2, 8), "lengths": lengths,
  }  # fmt: skip
  counts = set()
  for seed in range(12):
    key = jax.random.key(seed)
    nats, tokens = t5.block(module, batch, key, glance=0.0, smoothing=0.0)
    # Of row 0 one to three tokens are ahead, of row 1 one or two.
    assert 2 <= int(tokens) <= 5
    counts.add(int(tokens))
    _, left = t5.block(module, batch, key, glance=1.0, smoothing=0.0)
    # A random network is wrong nearly everywhere: what is told is not asked.
    assert int(left) <= 1
    assert np.isfinite(nats)
  assert len(counts) > 2
  # What stands beyond the answer's end is never asked for.
  other = batch | {"tokens": batch["tokens"].at[0, 7].set(3).at[1, 3:].set(5)}
  for seed in range(4):
    key = jax.random.key(seed)
    actual = [
      float(t5.block(module, b, key, glance=0.5, smoothing=0.1)[0])
      for b in (batch, other)
    ]
    assert actual[0] == actual[1]
