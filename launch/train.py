"""Trains a small transformer on Python source, and exports it as Llama files.

  python -m launch.train --config=configs/train_embedded.py:target \
    --workdir=/tmp/specjax/target --export=models/pretrained/target

`--workdir` alone decides where a run stands: started again, it goes on from its
last checkpoint with the same batches it would have seen, and exports at the
end. Losses go to WORKDIR/metrics.jsonl, one object a line.
"""

import functools
import json
import pathlib
import time

import jax
import ml_collections
import numpy as np
import optax
import orbax.checkpoint as ocp
from absl import flags, logging
from flax import nnx

from launch import data, main
from models import huggingface, tokenizers
from models.transformer import Transformer, TransformerConfig

flags.adopt_module_key_flags(main)  # so that --help lists them
_EXPORT = flags.DEFINE_string(
  "export", None, "Where to write the trained model (Llama files)."
)


def load_rows(
  config: ml_collections.ConfigDict, tokenizer, split: str
) -> np.ndarray:
  """The packed token rows of a split, `i32[rows, sequence_length + 1]`."""
  files = data.python_files(tuple(config.packages), split=split)
  return data.pack(
    [tokenizer.encode(file.text) for file in files],
    length=config.sequence_length + 1,
    separator=tokenizer.eos_token_id,
    seed=config.seed,
  )


def batch_at(rows: np.ndarray, step: int, batch_size: int, seed: int):
  """The batch of a step: a fresh permutation of the rows every epoch."""
  per_epoch = len(rows) // batch_size
  epoch, index = divmod(step, per_epoch)
  order = np.random.default_rng((seed, epoch)).permutation(len(rows))
  return rows[order[index * batch_size : (index + 1) * batch_size]]


def cross_entropy(logits, tokens, teacher_logits=None):
  """Mean loss over positions: next-token, or forward KL to the teacher's law.

  Args:
    logits: `f32[B, T, V]`.
    tokens: `i32[B, T]`, the next tokens.
    teacher_logits: `f32[B, T, V]`, or None.

  Returns:
    `f32[]`, in nats per token: `-log p(token)`, or the cross-entropy of the
    student under the teacher, which differs from KL by a constant.
  """
  if teacher_logits is None:
    return optax.softmax_cross_entropy_with_integer_labels(
      logits, tokens
    ).mean()
  return optax.softmax_cross_entropy(
    logits, jax.nn.softmax(teacher_logits)
  ).mean()


def make_optimizer(config: ml_collections.ConfigDict):
  """AdamW with warm-up and cosine decay to a tenth, gradients clipped at 1."""
  schedule = optax.warmup_cosine_decay_schedule(
    0.0, config.learning_rate, config.warmup_steps, config.num_steps,
    config.learning_rate / 10,
  )  # fmt: skip
  decay = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
  return optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(
      schedule, b2=0.98, weight_decay=config.weight_decay, mask=decay
    ),
  )


def make_steps(graphdef, optimizer, teacher):
  """The jitted training and evaluation steps.

  Args:
    graphdef: the student's static part.
    optimizer: an optax transformation.
    teacher: `(graphdef, params)` of the target to distil from, or None.

  Returns:
    `train_step(state, rows) -> (state, loss)` with `state = (params, opt)`
    donated, and `eval_step(params, rows) -> nats per token`.
  """

  def forward(definition, params, tokens):
    return nnx.merge(definition, params)(tokens)[0].logits

  def loss_fn(params, rows):
    inputs, labels = rows[:, :-1], rows[:, 1:]
    teacher_logits = None
    if teacher is not None:
      teacher_logits = jax.lax.stop_gradient(forward(*teacher, inputs))
    logits = forward(graphdef, params, inputs)
    return cross_entropy(logits, labels, teacher_logits)

  @functools.partial(jax.jit, donate_argnums=0)
  def train_step(state, rows):
    params, opt = state
    loss, grads = jax.value_and_grad(loss_fn)(params, rows)
    updates, opt = optimizer.update(grads, opt, params)
    return (optax.apply_updates(params, updates), opt), loss

  @jax.jit
  def eval_step(params, rows):
    return cross_entropy(forward(graphdef, params, rows[:, :-1]), rows[:, 1:])

  return train_step, eval_step


def train(config: ml_collections.ConfigDict, workdir: str) -> Transformer:
  """Runs (or resumes) a training; returns the trained module."""
  path = pathlib.Path(workdir).absolute()
  path.mkdir(parents=True, exist_ok=True)
  (path / "config.json").write_text(config.to_json_best_effort(indent=2))
  tokenizer = tokenizers.load_or_train(
    config.tokenizer,
    vocab_size=config.model.vocab_size,
    texts=lambda: (
      f.text for f in data.python_files(tuple(config.packages), split="train")
    ),
  )
  rows = {s: load_rows(config, tokenizer, s) for s in ("train", "validation")}
  # Tokens to bytes, for a loss that does not depend on the tokenizer.
  sample = rows["validation"][: config.batch_size]
  bytes_per_token = len(
    tokenizer.decode(sample.reshape(-1)).encode()
  ) / sample.size  # fmt: skip

  model = Transformer(
    TransformerConfig(**config.model), rngs=nnx.Rngs(config.seed)
  )
  graphdef, params = nnx.split(model)
  teacher = None
  if config.teacher:
    teacher = nnx.split(huggingface.load(config.teacher))
  optimizer = make_optimizer(config)
  train_step, eval_step = make_steps(graphdef, optimizer, teacher)
  state = (params, optimizer.init(params))

  manager = ocp.CheckpointManager(
    path / "checkpoints",
    options=ocp.CheckpointManagerOptions(
      save_interval_steps=config.checkpoint_every, max_to_keep=2
    ),
  )
  step = manager.latest_step() or 0
  if step:
    state = manager.restore(step, args=ocp.args.StandardRestore(state))
    logging.info("resumed at step %d", step)
  parameters = sum(x.size for x in jax.tree.leaves(params))
  logging.info(
    "%d parameters, %d training rows of %d tokens",
    parameters, len(rows["train"]), config.sequence_length,
  )  # fmt: skip
  tokens_per_step = config.batch_size * config.sequence_length
  start, first = time.perf_counter(), step
  while step < config.num_steps:
    batch = batch_at(rows["train"], step, config.batch_size, config.seed)
    state, loss = train_step(state, batch)
    step += 1
    if step % config.log_every == 0 or step == config.num_steps:
      val = np.mean(
        [
          eval_step(state[0], batch_at(rows["validation"], i, 4, 0))
          for i in range(min(8, len(rows["validation"]) // 4))
        ]
      )
      record = {
        "step": step,
        "tokens": step * tokens_per_step,
        "loss": float(loss),
        "validation_loss": float(val),
        "validation_bits_per_byte": float(val / np.log(2) / bytes_per_token),
        "tokens_per_second": (step - first)
        * tokens_per_step
        / (time.perf_counter() - start),
      }
      logging.info("%s", json.dumps(record))
      with (path / "metrics.jsonl").open("a") as out:
        out.write(json.dumps(record) + "\n")
    manager.save(
      step,
      args=ocp.args.StandardSave(state),
      force=step == config.num_steps,
    )
  manager.wait_until_finished()
  return nnx.merge(graphdef, state[0])


def run(_) -> int:
  """The command."""
  module = train(main.CONFIG.value, main.WORKDIR.value)
  if _EXPORT.value:
    huggingface.save_llama(
      module,
      _EXPORT.value,
      tokenizer=tokenizers.load(main.CONFIG.value.tokenizer),
    )
    logging.info("exported to %s", _EXPORT.value)
  return 0


if __name__ == "__main__":
  main.run(run, required=("config", "workdir"))
