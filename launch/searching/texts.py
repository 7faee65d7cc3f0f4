"""The texts that sets are scored on: what the target itself emits."""

import numpy as np

from launch import prompts
from launch.build import pair
from launch.evaluation import questions
from launch.searching.scorer import Texts
from specjax.runtime import engine

_OWN = 5  # of our own questions, one a task, if no prompts are given


def asked(models: pair.Pair, path: str | None, *, max_new_tokens: int):
  """The prompts of a file; or our own questions for a target that chats."""
  room = models.room(max_new_tokens)
  if path or models.tokenizer.chat_template is None:
    return prompts.all_of(path, models.tokenizer, max_tokens=room)
  every = questions.read(questions.OWN)
  some = questions.subset(every, _OWN, seed=0)
  items = [questions.ask(models.tokenizer, q, 0, []) for q in some]
  return [
    prompts.Prompt(i, i, "", item.token_ids)
    for i, item in enumerate(items)
    if len(item.token_ids) <= room
  ]


def completed(config, models: pair.Pair, items) -> Texts:
  """The prompts with the target's completions, by plain decoding."""
  plain = pair.engine_of(config, models, baseline=True)
  found = []
  for batch in engine.make_batches(
    items,
    batch_size=config.batch_size,
    max_width=models.room(config.max_new_tokens),
  ):
    done, _ = plain.run(batch)
    found += [
      (prompt.token_ids, completion.token_ids)
      for prompt, completion in zip(batch.prompts, done, strict=True)
    ]
  width = max(len(p) + len(c) for p, c in found)
  tokens = np.zeros((len(found), width), np.int32)
  judged = np.zeros((len(found), width), bool)
  for row, (prompt, completion) in enumerate(found):
    count = len(prompt) + len(completion)
    tokens[row, :count] = [*prompt, *completion]
    judged[row, len(prompt) - 1 : count - 1] = True
  return Texts(tokens=tokens, judged=judged)
