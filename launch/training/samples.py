"""Greedy completions during training, by the present weights."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from launch import prompts
from models.networks.transformer import Transformer, as_language_model
from models.tokenizers import Tokenizer
from specjax import decode
from specjax.types import Params
from specjax.warp import make_sampling

_TOKENS = 48


class Sampler:
  """Completes some prompts, in one compiled program.

  Args:
    module: the model's definition.
    tokenizer: its tokenizer.
    texts: the prompts; some Python if there are none.

  Raises:
    ValueError: for a prompt that is empty, or too long for the model.
  """

  def __init__(
    self, module: Transformer, tokenizer: Tokenizer, texts: tuple[str, ...]
  ):
    self._tokenizer = tokenizer
    self._texts = texts or prompts.BUILT_IN[:3]
    self._ids = [tokenizer.encode(text) for text in self._texts]
    width = max(map(len, self._ids))
    longest = module.config.max_positions
    if not all(self._ids) or width + _TOKENS > longest:
      raise ValueError(
        f"a prompt of config.sample_prompts must have 1 to {longest - _TOKENS} "
        f"tokens ({_TOKENS} follow, and the model has {longest} positions), "
        f"got {[*map(len, self._ids)]}; config.sample_every=0 samples nothing"
      )
    fed = np.array(
      [row + [0] * (width - len(row)) for row in self._ids], np.int32
    )
    model, _ = as_language_model(module)
    decoder = decode.make_decoder(model, vocab_size=tokenizer.vocab_size)

    @jax.jit
    def generate(params):
      both = Params(target=params, draft=None)
      start = decoder.init(
        both, fed, jnp.array([len(row) for row in self._ids]),
        jax.random.key(0), buffer_length=width + _TOKENS,
        max_new_tokens=_TOKENS,
        sampling=make_sampling(len(self._ids), temperature=0.0),
        stop_tokens=(tokenizer.eos_token_id,),
      )  # fmt: skip
      return decoder.generate(both, start)

    self._generate = generate

  def __call__(self, params) -> Iterator[tuple[str, str]]:
    """Prompts and their completions by these parameters."""
    state = jax.device_get(self._generate(params))
    for row, ids in enumerate(self._ids):
      new = state.tokens[row, len(ids) : state.length[row]]
      yield self._texts[row], self._tokenizer.decode(new, after=ids)
