"""What is accepted at each position of a draft, counted in completions."""

from collections.abc import Sequence

import numpy as np

from specjax import intervals
from specjax.runtime.engine import Completion
from specjax.state import Origin


def tries(completion: Completion, num_tokens: int) -> np.ndarray:
  """`i64[2, N]`: how often each drafted position was judged, and accepted."""
  tried, passed = counts = np.zeros((2, num_tokens), int)
  place = 0
  for origin in completion.origins:
    if origin == Origin.ACCEPTED:
      tried[place] += 1
      passed[place] += 1
      place += 1
    else:
      if origin == Origin.RESIDUAL:
        tried[place] += 1
      place = 0
  return counts


def summary(completions: Sequence[Completion], num_tokens: int) -> dict:
  """Acceptance by position and tokens a target call; intervals over prompts.

  Args:
    completions: one a prompt, of drafts that are chains.
    num_tokens: N, drafted tokens a round.

  Returns:
    `tried`, how often position 1 .. N was judged: all before it were accepted,
    and nothing had ended the text. `accepted`, the share of those that were
    accepted, 0 where none was judged, and `accepted_ci`, its 95% interval or
    None. `block_efficiency` and `block_efficiency_ci`, tokens a target call.
  """
  tried, passed = np.stack(
    [tries(one, num_tokens) for one in completions], axis=1
  )  # [prompts, N] each
  tokens = [len(one.token_ids) for one in completions]
  calls = [one.num_target_calls for one in completions]
  return {
    "tried": tried.sum(0).tolist(),
    "accepted": (passed.sum(0) / np.maximum(tried.sum(0), 1)).tolist(),
    "accepted_ci": [
      intervals.ratio_interval(passed[:, i], tried[:, i], limits=(0, 1))
      for i in range(num_tokens)
    ],
    "block_efficiency": sum(tokens) / sum(calls),
    "block_efficiency_ci": intervals.ratio_interval(
      tokens, calls, limits=(1, num_tokens + 1)
    ),
  }
