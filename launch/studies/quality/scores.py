"""How good a completion is, by one number: behind one small interface.

A scorer is built from a directory and scores completions of a prompt; larger is
better.
"""

import pathlib
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from models import checkpoints
from models.networks.transformer import as_language_model
from models.tokenizers import Tokenizer

_ROWS = 16  # completions scored together, their logits all in memory


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
    theirs = checkpoints.load_tokenizer(directory)
    if theirs.fingerprint() != tokenizer.fingerprint():
      raise ValueError(
        f"the scorer in {directory} must have the pair's tokenizer"
      )
    self._vocab = tokenizer.vocab_size
    model, self._params = as_language_model(checkpoints.load_module(directory))

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
    parts = [
      self._score(
        self._params, tokens[i : i + _ROWS], len(prompt), last[i : i + _ROWS]
      )
      for i in range(0, len(tokens), _ROWS)
    ]
    return np.concatenate(parts).astype(np.float64)


class Reward:
  """The scalar of a Hugging Face sequence-classification model, with torch.

  Of a text longer than the model's tokenizer allows the end is scored. On a GPU
  if torch has one; in batches if the model names its padding token.

  Args:
    directory: the reward model, with its own tokenizer.
    tokenizer: of the pair, whose ids are turned into text.

  Raises:
    ValueError: if there is no such directory, the model in it is none with one
      trained output, or torch is missing.
  """

  def __init__(self, directory: str, tokenizer: Tokenizer):
    try:
      import torch
      import transformers
    except ImportError as error:
      raise ValueError(
        "a reward model needs torch and transformers: pip install -e "
        "'.[experiments,test]'"
      ) from error
    if not pathlib.Path(directory).is_dir():
      raise ValueError(f"no such folder of a reward model: {directory}")
    transformers.logging.set_verbosity_error()
    self._torch, self._ours = torch, tokenizer
    kind = transformers.AutoModelForSequenceClassification
    try:
      self._tokenizer = transformers.AutoTokenizer.from_pretrained(
        directory, truncation_side="left", padding_side="right"
      )
      model, loaded = kind.from_pretrained(directory, output_loading_info=True)
    except ValueError as error:
      raise ValueError(
        f"cannot read the reward model in {directory}: {error}"
      ) from error
    if model.config.num_labels != 1:
      raise ValueError(
        f"the reward model in {directory} must have one output, got "
        f"{model.config.num_labels}"
      )
    missing = sorted(loaded["missing_keys"])
    if missing:  # they would be drawn at random
      raise ValueError(
        f"the model in {directory} is no reward model: it has no {missing[0]}"
      )
    # Without a padding token of its own a model finds no text's end in a batch.
    padding = model.config.pad_token_id
    if padding is not None:
      self._tokenizer.pad_token_id = padding
    self._rows = 1 if padding is None else _ROWS
    device = "cuda" if torch.cuda.is_available() else "cpu"
    self._model = model.eval().to(device)

  def __call__(self, prompt, completions) -> np.ndarray:
    """See `Scorer`."""
    texts = [self._ours.decode([*prompt, *c]) for c in completions]
    scores = []
    for start in range(0, len(texts), self._rows):
      fed = self._tokenizer(
        texts[start : start + self._rows],
        return_tensors="pt", truncation=True, padding=self._rows > 1,
      ).to(self._model.device)  # fmt: skip
      with self._torch.inference_mode():
        scores.append(self._model(**fed).logits[:, 0].float().cpu().numpy())
    return np.concatenate(scores).astype(np.float64)


SCORERS = {"log_likelihood": LogLikelihood, "reward": Reward}
