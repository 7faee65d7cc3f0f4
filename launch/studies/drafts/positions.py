"""What is accepted at each position of a draft, counted in completions."""

from collections.abc import Sequence

import numpy as np

from launch.studies.report import findings
from specjax import intervals
from specjax.runtime.engine import Completion


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
    [findings.tries(one, num_tokens) for one in completions], axis=1
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
