"""Prints the observed order of the rules in docs/optimum.md.

python tests/order_report.py
"""

import pathlib
import sys

import jax
import numpy as np

FOLDER = pathlib.Path(__file__).parent
# The root first: tests/ has a folder of the library's name.
sys.path[:0] = map(str, (FOLDER.parent, FOLDER, FOLDER / "specjax" / "rules"))

import instances  # noqa: E402
import test_order  # noqa: E402

from specjax import rules  # noqa: E402
from specjax.siblings import (  # noqa: E402
  GREEDY,
  IID,
  TOP_K,
  WITHOUT_REPLACEMENT,
)

ROWS = {
  "match": ("match", IID),
  "multipath_block": ("multipath_block", IID),
  "recursive": ("recursive", IID),
  "kseq": ("kseq", IID),
  "transport": ("transport", IID),
  "match, top_k": ("match", TOP_K),
  "recursive, without_replacement": ("recursive", WITHOUT_REPLACEMENT),
  "greedy_draft, greedy": ("greedy_draft", GREEDY),
}
PAIRS = (
  ("recursive", "kseq"),
  ("recursive, without_replacement", "transport"),
  ("greedy_draft, greedy", "transport"),
  ("match, top_k", "transport"),
  ("multipath_block", "recursive"),
  ("recursive", "multipath_block"),
)


def main() -> None:
  """Mean acceptance, and on how many instances one is above another."""
  jax.config.update("jax_enable_x64", True)
  for count, vocab in ((2, 4), (3, 3)):
    p, q = test_order.laws(vocab)
    values = {
      name: instances.at_one_position(rules.get(rule), p, q, count, how)[0]
      for name, (rule, how) in ROWS.items()
    }
    print(f"V={vocab} K={count}")
    for name, value in values.items():
      print(f"  {name}: {value.mean():.4f}")
    for one, other in PAIRS:
      above = np.sum(values[one] > values[other] + 1e-9)
      print(f"  {one} above {other}: {above} of {len(p)}")


if __name__ == "__main__":
  main()
