"""Contexts to train on: text of the data, or sampled from target or draft.

DistillSpec (Zhou et al., ICLR 2024) distils on samples of the target or of the
draft that is being trained; so does the offline phase of online speculative
decoding (Liu et al., ICML 2024). A row keeps its first tokens as a prompt, and
a model completes it. Samples are drawn anew for every batch, from the weights
of that step: nothing but the step's key and weights decides them, so a resumed
run sees the same text.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_collections
from jax import Array

from specjax import decode
from specjax.types import LanguageModel, Params
from specjax.warp import make_sampling

SOURCES = ("data", "target", "draft")


def check(config: ml_collections.ConfigDict, sources: tuple[str, ...]) -> None:
  """Raises ValueError unless a config's contexts are some of these sources."""
  if config.contexts not in sources:
    raise ValueError(
      f"contexts must be one of {sources}, got {config.contexts!r}"
    )
  if config.contexts != "data" and not (
    0 < config.prompt_length < config.sequence_length
  ):
    raise ValueError(
      f"prompt_length must be in [1, sequence_length), here "
      f"[1, {config.sequence_length}), got {config.prompt_length}"
    )


def completer(
  model: LanguageModel, *, prompt_length: int
) -> Callable[..., dict[str, Array]]:
  """A jitted function that replaces the ends of rows by a model's samples.

  Args:
    model: what samples, with the library's own loop.
    prompt_length: tokens of every row that stay.

  Returns:
    `(params, batch, key) -> batch`: of `{"tokens", "segments", "positions"}`,
    `i32[B, T]` each. Prompts are read as one document, whatever they were cut
    from, and nothing stops a sample.
  """
  decoder = decode.make_decoder(model)

  @jax.jit
  def complete(params, batch, key):
    tokens = batch["tokens"]
    rows, length = tokens.shape
    both = Params(target=params, draft=None)
    state = decoder.init(
      both,
      tokens[:, :prompt_length],
      jnp.full((rows,), prompt_length, jnp.int32),
      key,
      buffer_length=length,
      max_new_tokens=length - prompt_length,
      sampling=make_sampling(rows),
    )
    sampled = decoder.generate(both, state).tokens[:, :length]
    return {
      "tokens": sampled,
      "segments": jnp.ones_like(tokens),
      "positions": jnp.broadcast_to(jnp.arange(length), tokens.shape),
    }

  return complete
