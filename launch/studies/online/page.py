"""The tables of a study of drafts that learn."""

from launch import tables


def _interval(found: list[float | None]) -> str:
  value, low, high = found
  if low is None:
    return f"{value:+.3f}"
  return f"{value:+.3f} ({low:+.3f} to {high:+.3f})"


def table(results: dict[str, dict]) -> str:
  """Of each stream a table of its blocks, and one of the whole."""
  (result,) = results.values()
  after, parts = result["config"]["after"], []
  for name, stream in result["streams"].items():
    rows = [
      [
        block["domain"],
        *(f"{block['late'][x]:.3f}" for x in ("frozen", "online", "offline")),
        _interval(block["online_above"]),
        _interval(block["offline_above"]),
        _interval(block["early_above"]),
      ]
      for block in stream["blocks"]
    ]
    head = [
      f"{name}: block", "frozen", "online", "offline",
      f"online above frozen, after {after:,} tokens", "offline above frozen",
      f"online above frozen, first {after:,}",
    ]  # fmt: skip
    parts.append(tables.table(head, rows))
    rows = [
      [
        draft,
        f"{found['num_tokens']:,}",
        f"{found['acceptance']:.3f}",
        f"{found['block_efficiency']:.2f}",
        f"{found['tokens_per_second']:.0f}",
        f"{found['update_share']:.1%}",
      ]
      for draft, found in stream["whole"].items()
    ]
    head = [
      f"{name}: draft", "tokens", "acceptance", "tokens a target call",
      "tokens/s", "of it updates",
    ]  # fmt: skip
    parts.append(tables.table(head, rows))
  return "\n\n".join(parts)
