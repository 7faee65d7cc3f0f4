"""Files that tests make: tiny checkpoints and JSONL."""

import json

import jax
from flax import nnx

from models import tokenizers
from models.formats import huggingface
from models.networks.description import llama_config
from models.networks.transformer import Transformer

EMBEDDED = "models/pretrained/target"
CHATML = (
  "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
  "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_checkpoint(
  directory, *, seed=0, embed_dim=32, vocab_size=4096, num_layers=2, mlp_dim=48
):
  """A random Llama checkpoint with the embedded pair's tokenizer."""
  config = llama_config(
    vocab_size=vocab_size, embed_dim=embed_dim, num_layers=num_layers,
    num_heads=2, num_kv_heads=1, head_dim=16, mlp_dim=mlp_dim,
    max_positions=256,
  )  # fmt: skip
  module = Transformer(config, rngs=nnx.Rngs(seed))
  # Larger weights than at initialization, so that laws are far from uniform.
  params = jax.tree.map(lambda x: 4 * x, nnx.state(module))
  nnx.update(module, params)
  tokenizer = tokenizers.load(EMBEDDED)
  huggingface.save_llama(module, str(directory), tokenizer=tokenizer)
  tokenizers.save(tokenizer, str(directory))
  return str(directory)


def write_jsonl(path, records):
  """Writes one JSON object a line."""
  path.write_text("".join(json.dumps(r) + "\n" for r in records))
  return str(path)


def read_jsonl(path):
  """Reads one JSON object a line."""
  return [json.loads(line) for line in path.read_text().splitlines()]


def metrics(folder, name="step"):
  """What a run of training recorded where that name is among it."""
  return [x for x in read_jsonl(folder / "metrics.jsonl") if name in x]
