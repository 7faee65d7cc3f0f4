"""How good a completion is, by one number: behind one small interface.

A scorer is built from a directory and scores completions of a prompt; larger is
better.
"""

from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from launch import networks
from models.tokenizers import Tokenizer
from models.transformer import as_language_model


class Scorer(Protocol):
  """Scores completions of one prompt."""

  def __call__(
    self, prompt: Sequence[int], completions: Sequence[Sequence[int]]
  ) -> np.ndarray:
    """Scores.

    Args:
      prompt: token ids of the pair's tokenizer.
      completions: token ids each, at least one.

    Returns:
      `f64[len(completions)]`.
    """


class LogLikelihood:
  """Mean log-probability of a completion's tokens, nats, at temperature 1.

  Args:
    directory: a causal checkpoint.
    tokenizer: of the pair; the checkpoint's must be the same.

  Raises:
    ValueError: if the tokenizers differ.
  """

  def __init__(self, directory: str, tokenizer: Tokenizer):
    theirs = networks.load_tokenizer(directory)
    if theirs.fingerprint() != tokenizer.fingerprint():
      raise ValueError(
        f"the scorer in {directory} must have the pair's tokenizer"
      )
    self._vocab = tokenizer.vocab_size
    model, self._params = as_language_model(networks.load_module(directory))

    @jax.jit
    def score(params, tokens, first, last):
      output, _ = model.apply(params, tokens, model.init_cache(*tokens.shape))
      logits = output.logits[:, :-1, : self._vocab].astype(jnp.float32)
      law = jax.nn.log_softmax(logits, axis=-1)
      each = jnp.take_along_axis(law, tokens[:, 1:, None], axis=-1)[..., 0]
      place = jnp.arange(1, tokens.shape[1])
      inside = (place >= first) & (place < last[:, None])
      return jnp.sum(jnp.where(inside, each, 0), 1) / jnp.sum(inside, 1)

    self._score = score

  def __call__(self, prompt, completions) -> np.ndarray:
    """See `Scorer`."""
    longest = len(prompt) + max(map(len, completions))
    width = 32 * (-(-longest // 32))  # few shapes
    tokens = np.zeros((len(completions), width), np.int32)
    last = np.zeros(len(completions), np.int32)
    for row, completion in enumerate(completions):
      text = [*prompt, *completion]
      tokens[row, : len(text)], last[row] = text, len(text)
    found = self._score(self._params, tokens, len(prompt), last)
    return np.asarray(found, np.float64)


class Reward:
  """The scalar of a Hugging Face sequence-classification model, with torch.

  Args:
    directory: the reward model, with its own tokenizer.
    tokenizer: of the pair, whose ids are turned into text.

  Raises:
    ValueError: if the model has more than one output, or torch is missing.
  """

  def __init__(self, directory: str, tokenizer: Tokenizer):
    try:
      import torch
      import transformers
    except ImportError as error:
      raise ValueError(
        "a reward model needs torch and transformers: pip install "
        "'.[experiments,test]'"
      ) from error
    self._torch, self._ours = torch, tokenizer
    self._tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    self._model = (
      transformers.AutoModelForSequenceClassification.from_pretrained(
        directory
      ).eval()
    )
    if self._model.config.num_labels != 1:
      raise ValueError(
        f"the reward model in {directory} must have one output, got "
        f"{self._model.config.num_labels}"
      )

  def __call__(self, prompt, completions) -> np.ndarray:
    """See `Scorer`."""
    scores = []
    for completion in completions:  # one by one: no padding token is needed
      text = self._ours.decode([*prompt, *completion])
      fed = self._tokenizer(text, return_tensors="pt", truncation=True)
      with self._torch.no_grad():
        scores.append(float(self._model(**fed).logits[0, 0]))
    return np.array(scores)


SCORERS = {"log_likelihood": LogLikelihood, "reward": Reward}
