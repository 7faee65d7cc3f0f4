"""transformers' `generate` as a system, in its own process.

It gets the same files, prompts, dtype and threads, and ids beyond the
tokenizer's vocabulary have zero probability here too. Optional: needs torch and
transformers, and accelerate for GGUF files. Assisted generation takes one
prompt at a time, so it is only measured at batch size 1.
"""

import concurrent.futures
import dataclasses
import functools
import importlib.util
import multiprocessing
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax

from launch import cli, processes
from launch.evaluation.systems import Reference, System
from models import checkpoints, hub
from specjax.runtime.requests import Batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generated:
  """Completions of a batch, including stop tokens.

  `first_seconds` is the time until the end of the target's first pass, which
  gives the first token; `num_target_calls` includes it.
  """

  token_ids: list[list[int]]
  seconds: float
  first_seconds: float
  num_target_calls: int


def check(system: System) -> None:
  """Raises UserError if a transformers system cannot be measured here."""
  reference = system.reference
  packages = ("torch", "transformers")
  missing = [x for x in packages if not importlib.util.find_spec(x)]
  if missing:
    reason = f"needs the package {missing[0]}"
  elif processes.several() or jax.default_backend() != "cpu":
    reason = "needs a single process on the CPU"
  elif reference.kind == "hf_assisted" and not reference.draft:
    reason = 'needs a draft model: hf_assisted("DIR")'
  else:
    return
  raise cli.UserError(f"system {system.name!r} {reason}")


class Process:
  """The process for transformers, started on first use."""

  def __init__(self, *, stop_tokens: tuple[int, ...], vocab_size: int):
    """Does not start the process yet."""
    self._shared = {"stop_tokens": stop_tokens, "vocab_size": vocab_size}
    self._pool: concurrent.futures.Executor | None = None
    self._warm: set[str] = set()

  def run(
    self, system: System, batch: Batch, *, temperature: float, seed: int
  ) -> Generated:
    """Decodes a batch; a system's first call does so twice, once to warm up."""
    if self._pool is None:
      self._pool = concurrent.futures.ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), _end_with_parent
      )
    config = system.config
    sampling = {n: config[n] for n in ("top_k", "top_p", "min_p")}
    submit = functools.partial(
      self._pool.submit, generate, system.reference, config.target,
      [list(one.token_ids) for one in batch.row_requests()], len(batch.prompts),
      sampling | {"temperature": temperature} if temperature else {},
      dtype=config.dtype, seed=seed, max_new_tokens=config.max_new_tokens,
      **self._shared,
    )  # fmt: skip
    try:
      if system.name not in self._warm:
        submit().result()
        self._warm.add(system.name)
      return submit().result()
    except concurrent.futures.BrokenExecutor:
      raise
    except Exception as error:  # transformers may raise anything
      reason = " ".join(str(error).split()) or type(error).__name__
      raise cli.UserError(
        f"system {system.name!r}: transformers: {reason}"
      ) from error

  def close(self) -> None:
    """Ends the process, if there is one."""
    if self._pool is not None:
      self._pool.shutdown()
      self._pool = None


def _end_with_parent() -> None:
  """Ends this process when its parent is killed."""
  parent = multiprocessing.parent_process()
  assert parent is not None

  def wait():
    parent.join()
    os._exit(1)

  threading.Thread(target=wait, daemon=True).start()


@functools.cache
def _load(path: str, dtype: str):
  """Loads a model on the CPU, in transformers' process."""
  os.environ.setdefault("HF_HUB_OFFLINE", "1")
  import torch
  import transformers

  transformers.utils.logging.set_verbosity_error()
  transformers.utils.logging.disable_progress_bar()
  torch.set_num_threads(len(os.sched_getaffinity(0)))
  where, more = hub.local(path), {}
  if checkpoints.is_file(where):
    where, more["gguf_file"] = os.path.split(os.path.abspath(where))
  model = transformers.AutoModelForCausalLM.from_pretrained(
    where, dtype=getattr(torch, dtype), **more
  )
  # A checkpoint's repetition penalty would change the distribution.
  model.generation_config = transformers.GenerationConfig()
  return model.eval()


def generate(
  reference: Reference, target: str, rows: Sequence[Sequence[int]],
  num_prompts: int, sampling: dict[str, Any], *, dtype: str,
  max_new_tokens: int, seed: int, stop_tokens: tuple[int, ...],
  vocab_size: int,
) -> Generated:  # fmt: skip
  """Completes a batch with transformers, with or without drafting.

  Rows after the first `num_prompts` are padding and end after one token.
  `sampling` has `temperature`, `top_k`, `top_p` and `min_p`, or is empty for
  greedy decoding; `vocab_size` is V, without padding.
  """
  import torch
  import transformers

  model = _load(target, dtype)
  pad = stop_tokens[0] if stop_tokens else 0

  def support(input_ids, scores):  # `suppress_tokens` is slower
    del input_ids
    scores[:, vocab_size:] = -float("inf")
    return scores

  def filling(input_ids, scores, **_):
    del scores
    return torch.arange(len(input_ids)) >= num_prompts

  options: dict[str, Any] = dict(
    max_new_tokens=max_new_tokens, do_sample=bool(sampling),
    eos_token_id=list(stop_tokens) or None, pad_token_id=pad,
    logits_processor=[support], stopping_criteria=[filling],
  )  # fmt: skip
  if sampling:
    options |= sampling | {"min_p": sampling["min_p"] or None}
  if reference.kind == "hf_assisted":
    options["assistant_model"] = draft = _load(reference.draft, dtype)
    draft.generation_config = transformers.GenerationConfig(
      num_assistant_tokens=reference.tokens,
      num_assistant_tokens_schedule="constant",
      assistant_confidence_threshold=0.0,
    )
  if reference.kind == "hf_prompt_lookup":
    options["prompt_lookup_num_tokens"] = reference.tokens
    options["max_matching_ngram_size"] = reference.max_ngram
  width = max(map(len, rows))
  left = [[pad] * (width - len(row)) + list(row) for row in rows]
  mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
  ends: list[float] = []
  torch.manual_seed(seed)
  end_of_pass = lambda *_: ends.append(time.perf_counter())
  start = time.perf_counter()
  with model.register_forward_hook(end_of_pass), torch.no_grad():
    out = model.generate(
      torch.tensor(left), attention_mask=torch.tensor(mask), **options
    )
  seconds = time.perf_counter() - start

  def until_end(row):
    places = (i for i, token in enumerate(row) if token in stop_tokens)
    return row[: next(places, len(row)) + 1]

  return Generated(
    token_ids=[until_end(row) for row in out[:num_prompts, width:].tolist()],
    seconds=seconds,
    first_seconds=ends[0] - start,
    num_target_calls=len(ends),
  )
