"""`transformers` on the same files, prompts, dtype and threads, for comparison.

Ids beyond the tokenizer's vocabulary get no mass there either.
Optional: needs torch and transformers, and accelerate for GGUF files. Assisted
generation there takes one prompt at a time, so it is only measured at batch
size 1.
"""

import dataclasses
import importlib.util
import os
import pathlib
import time
from typing import Any

from models import checkpoints
from models.formats import huggingface, trained
from specjax.runtime.requests import Batch


def is_available(*paths: str) -> bool:
  """True if torch and transformers are installed and read the checkpoints.

  They cannot read the folders of training runs, nor every GGUF file.
  """
  needed = ["torch", "transformers"]
  if any(map(checkpoints.is_file, paths)):
    needed.append("accelerate")
  if any(map(trained.is_run, paths)) or any(
    map(checkpoints.reads_inputs, paths)
  ):
    return False
  return all(map(importlib.util.find_spec, needed)) and all(
    map(_is_understood, filter(checkpoints.is_file, paths))
  )


def _is_understood(path: str) -> bool:
  """True if transformers reads a GGUF file as the model that it is.

  It leaves out what it does not know, such as the rescaling of Llama 3's rotary
  frequencies and biases, and refuses GPT-NeoX.
  """
  import transformers

  try:
    theirs = transformers.AutoConfig.from_pretrained(**_where(path))
    config = huggingface.config_from_json(theirs.to_dict())
  except (ValueError, KeyError):
    return False
  return config == checkpoints.read_config(path)


def _where(path: str) -> dict[str, Any]:
  """The arguments of `from_pretrained` for a checkpoint."""
  if not checkpoints.is_file(path):
    return {"pretrained_model_name_or_path": path}
  file = pathlib.Path(path).absolute()
  return {
    "pretrained_model_name_or_path": str(file.parent),
    "gguf_file": file.name,
  }


class _Support:
  """`suppress_tokens`, made fast, for target and assistant.

  That option looks every id up in the list of those suppressed, at every step:
  with tens of thousands of them transformers would be timed doing that.
  """

  def __init__(self, vocab_size: int):
    self._vocab_size = vocab_size

  def __call__(self, input_ids, scores):
    scores[:, self._vocab_size :] = -float("inf")
    return scores


class _Filling:
  """Ends the rows that only fill a batch up after their first token."""

  def __init__(self, num_prompts: int):
    self._num_prompts = num_prompts

  def __call__(self, input_ids, scores, **_):
    del scores
    import torch

    return torch.arange(len(input_ids)) >= self._num_prompts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generated:
  """Completions of a batch by another library.

  Attributes:
    token_ids: emitted tokens of every prompt (an end-of-text token included,
      what follows it left out).
    seconds: until all were there.
    first_seconds: until the target's first pass was over, from which the first
      token follows.
    num_target_calls: passes of the target, the first one included: it gives a
      token too.
  """

  token_ids: list[list[int]]
  seconds: float
  first_seconds: float
  num_target_calls: int


class Reference:
  """`generate` of transformers with the settings of a config."""

  def __init__(
    self,
    config,
    *,
    stop_tokens: tuple[int, ...],
    vocab_size: int,
    draft: str = "",
    tokens: int = 0,
  ):
    """Loads the target, and perhaps an assistant, on the CPU.

    Args:
      config: of the experiment, whose dtype is the same here.
      draft: the assistant's checkpoint; "" for none.
      tokens: that it drafts at a time.
      stop_tokens: ids that end a completion.
      vocab_size: V, the number of real tokens.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(len(os.sched_getaffinity(0)))

    def load(path):
      model = transformers.AutoModelForCausalLM.from_pretrained(
        **_where(path), dtype=getattr(torch, config.dtype)
      )
      # A checkpoint may ask for a penalty of repetitions, which is another law.
      model.generation_config = transformers.GenerationConfig()
      return model.eval()

    self._torch = torch
    self._target = load(config.target)
    self._draft = None
    if draft:
      self._draft = load(draft)
      generation = self._draft.generation_config
      generation.num_assistant_tokens = tokens
      generation.num_assistant_tokens_schedule = "constant"
      generation.assistant_confidence_threshold = 0.0
    self._options = dict(
      max_new_tokens=config.max_new_tokens,
      do_sample=config.temperature > 0,
      eos_token_id=list(stop_tokens) or None,
      pad_token_id=stop_tokens[0] if stop_tokens else 0,
      logits_processor=[_Support(vocab_size)],
    )
    self._stop_tokens = frozenset(stop_tokens)
    if config.temperature > 0:
      self._options.update(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p or None,
      )
    self.versions = {
      "torch": torch.__version__,
      "transformers": transformers.__version__,
      "torch_num_threads": torch.get_num_threads(),
    }

  @property
  def can_assist(self) -> bool:
    """True if there is a draft model that transformers accepts."""
    if self._draft is None:
      return False
    sizes = {m.config.vocab_size for m in (self._target, self._draft)}
    return len(sizes) == 1  # it refuses embeddings padded differently

  def generate(
    self,
    batch: Batch,
    *,
    assisted: bool = False,
    prompt_lookup: tuple[int, int] | None = None,
  ) -> Generated:
    """Completes a batch, plainly or with drafts.

    Rows that fill the batch up end after one token, as ours do at once.

    Args:
      batch: the prompts; one, if anything is drafted.
      assisted: with the draft model as assistant.
      prompt_lookup: tokens to draft by prompt lookup, and the longest n-gram
        that is looked up; None for none.

    Returns:
      The completions.
    """
    torch = self._torch
    pad = self._options["pad_token_id"]
    ids = [list(p.token_ids) for p in batch.filled()]
    width = max(map(len, ids))
    left = [[pad] * (width - len(row)) + row for row in ids]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in ids]
    extra: dict[str, Any] = {}
    if assisted:
      extra["assistant_model"] = self._draft
    if prompt_lookup:
      extra["prompt_lookup_num_tokens"] = prompt_lookup[0]
      extra["max_matching_ngram_size"] = prompt_lookup[1]
    if len(ids) > len(batch.prompts):
      extra["stopping_criteria"] = [_Filling(len(batch.prompts))]
    ends: list[float] = []
    hook = self._target.register_forward_hook(
      lambda *_: ends.append(time.perf_counter())
    )
    start = time.perf_counter()
    try:
      with torch.no_grad():
        out = self._target.generate(
          torch.tensor(left),
          attention_mask=torch.tensor(mask),
          **self._options,
          **extra,
        )
      seconds = time.perf_counter() - start
    finally:
      hook.remove()
    rows = out[: len(batch.prompts), width:].tolist()
    return Generated(
      token_ids=[self._until_end(row) for row in rows],
      seconds=seconds,
      first_seconds=ends[0] - start,
      num_target_calls=len(ends),
    )

  def _until_end(self, row: list[int]) -> list[int]:
    ends = (i for i, token in enumerate(row) if token in self._stop_tokens)
    return row[: next(ends, len(row)) + 1]
