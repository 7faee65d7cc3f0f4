"""What streams of batches say: acceptance by block, and differences.

Acceptance is the probability that a drafted token stands which came to be
verified: expected tokens that stood over tokens that were offered. Times are
left to the whole stream.
"""

import numpy as np

from specjax import intervals

_SAMPLES = 10_000


def acceptance(records: list[dict]) -> float:
  """Of some batches together."""
  total = lambda name: sum(record[name] for record in records)
  return total("taken") / total("offered")


def late(records: list[dict], after: int) -> list[dict]:
  """The batches of a block that begin when so many tokens were emitted."""
  before = np.cumsum([0, *(record["tokens"] for record in records)])[:-1]
  return [r for r, b in zip(records, before, strict=True) if b >= after]


def above(
  some: list[dict], others: list[dict], *, seed: int = 0
) -> tuple[float, float | None, float | None]:
  """How far acceptance is above that of others, with a 95% interval.

  By the percentile bootstrap over batches, of both independently: they were
  asked the same prompts, and drew other texts. Of fewer than `intervals.LEAST`
  batches there is none.
  """
  difference = acceptance(some) - acceptance(others)
  if min(len(some), len(others)) < intervals.LEAST:
    return difference, None, None
  rng = np.random.default_rng(seed)

  def drawn(records):
    taken, offered = (
      np.array([record[name] for record in records])
      for name in ("taken", "offered")
    )
    chosen = rng.integers(len(records), size=(_SAMPLES, len(records)))
    return taken[chosen].sum(axis=1) / offered[chosen].sum(axis=1)

  low, high = np.quantile(drawn(some) - drawn(others), [0.025, 0.975])
  return difference, float(low), float(high)


def blocks_of(
  domains: list[str], runs: dict[str, list[list[dict]]], after: int
) -> list[dict]:
  """A row for each block of a stream.

  Args:
    domains: of the blocks.
    runs: batches by block, of each draft: "frozen", "online", "offline".
    after: tokens of a block that are left out as "late".

  Returns:
    For each block its `domain`, and for each draft `early` and `late`
    acceptance; `online_above` and `offline_above` say how far the late one is
    above the frozen draft's, `early_above` how far the online one's early one.
  """
  rows = []
  for place, domain in enumerate(domains):
    here = {name: blocks[place] for name, blocks in runs.items()}
    beyond = {name: late(records, after) for name, records in here.items()}
    first = {n: r[: len(r) - len(beyond[n])] for n, r in here.items()}
    rows.append(
      {
        "domain": domain,
        "early": {name: acceptance(r) for name, r in first.items()},
        "late": {name: acceptance(r) for name, r in beyond.items()},
        "early_above": above(first["online"], first["frozen"]),
        "online_above": above(beyond["online"], beyond["frozen"]),
        "offline_above": above(beyond["offline"], beyond["frozen"]),
      }
    )
  return rows


def whole(runs: dict[str, list[list[dict]]]) -> dict[str, dict]:
  """Of each draft over a whole stream: acceptance, tokens a call, speed."""
  found = {}
  for name, blocks in runs.items():
    records = [record for block in blocks for record in block]
    total = lambda what: sum(record[what] for record in records)  # noqa: B023
    found[name] = {
      "acceptance": acceptance(records),
      "num_tokens": total("tokens"),
      "block_efficiency": total("tokens") / total("calls"),
      "tokens_per_second": total("tokens") / total("seconds"),
      "update_share": total("update_seconds") / total("seconds"),
    }
  return found
