"""Text that models complete in training: as contexts, and to be looked at.

Contexts are text of the data, or sampled from target or draft.

DistillSpec (Zhou et al., ICLR 2024) distils on samples of the target or of the
draft that is being trained; so does the offline phase of online speculative
decoding (Liu et al., ICML 2024). A row keeps its first tokens as a prompt, and
a model completes it. Samples are drawn anew for every batch, from the weights
of that step: nothing but the step's key and weights decides them, so a resumed
run sees the same text.
"""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from jax import Array

from launch import prompts
from models.networks.transformer import Transformer, as_language_model
from models.tokenizers import Tokenizer
from specjax import decode
from specjax.types import LanguageModel, Params
from specjax.warp import make_sampling

SOURCES = ("data", "target", "draft")
_SHOWN = 48  # tokens of a completion to be looked at


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


def sampler(
  module: Transformer, tokenizer: Tokenizer, texts: tuple[str, ...]
) -> Callable[..., Iterator[tuple[str, str]]]:
  """A function that completes some prompts greedily, in one compiled program.

  Args:
    module: the model's definition.
    tokenizer: its tokenizer.
    texts: the prompts; some Python if there are none.

  Returns:
    `params -> (prompt, completion), ..` by these parameters.

  Raises:
    ValueError: for a prompt that is empty, or too long for the model.
  """
  texts = texts or prompts.BUILT_IN[:3]
  ids = [tokenizer.encode(text) for text in texts]
  width, longest = max(map(len, ids)), module.config.max_positions
  if not all(ids) or width + _SHOWN > longest:
    raise ValueError(
      f"a prompt of config.sample_prompts must have 1 to {longest - _SHOWN} "
      f"tokens ({_SHOWN} follow, and the model has {longest} positions), "
      f"got {[*map(len, ids)]}; config.sample_every=0 samples nothing"
    )
  fed = np.array([row + [0] * (width - len(row)) for row in ids], np.int32)
  model, _ = as_language_model(module)
  decoder = decode.make_decoder(model, vocab_size=tokenizer.vocab_size)

  @jax.jit
  def generate(params):
    both = Params(target=params, draft=None)
    start = decoder.init(
      both, fed, jnp.array([*map(len, ids)]), jax.random.key(0),
      buffer_length=width + _SHOWN, max_new_tokens=_SHOWN,
      sampling=make_sampling(len(ids), temperature=0.0),
      stop_tokens=(tokenizer.eos_token_id,),
    )  # fmt: skip
    return decoder.generate(both, start)

  def complete(params):
    state = jax.device_get(generate(params))
    for text, row, tokens, length in zip(
      texts, ids, state.tokens, state.length, strict=True
    ):
      new = tokens[len(row) : length]
      yield text, tokenizer.decode(new, after=row)

  return complete
