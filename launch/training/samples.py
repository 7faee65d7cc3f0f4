"""What the weights of the moment complete: greedy, of built-in prompts."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from launch.decoding import prompts
from models.tokenizers import Tokenizer
from models.transformer import Transformer, as_language_model
from specjax import decode
from specjax.types import Params
from specjax.warp import make_sampling

_PROMPTS, _TOKENS = 3, 48


class Sampler:
  """Completes the first built-in prompts, in one compiled program.

  Args:
    module: the model's definition.
    tokenizer: its tokenizer.
  """

  def __init__(self, module: Transformer, tokenizer: Tokenizer):
    self._tokenizer = tokenizer
    self._ids = [tokenizer.encode(text) for text in prompts.BUILT_IN[:_PROMPTS]]
    width = max(map(len, self._ids))
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
    found = jax.device_get(self._generate(params))
    for row, ids in enumerate(self._ids):
      new = found.tokens[row, len(ids) : found.length[row]]
      yield prompts.BUILT_IN[row], self._tokenizer.decode(new.tolist())
