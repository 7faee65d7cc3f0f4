"""The tables of a study of drafts that learn, and acceptance over time."""

import numpy as np
from matplotlib.figure import Figure

from launch import report

_STYLES = {
  "offline": dict(color="C2", linestyle="--"),
  "frozen": dict(color="C0", linewidth=1.2),
  "online": dict(color="C3", linewidth=1.5),
}
_WINDOW = 4  # batches a point is the acceptance of


def acceptance(records: list[dict]) -> float:
  """Share of tokens that were accepted, of those that came to be verified.

  Expected tokens that were accepted over tokens that were offered, of some
  batches together.
  """
  total = lambda name: sum(record[name] for record in records)
  return total("taken") / total("offered")


def _interval(estimate: list[float | None]) -> str:
  value, low, high = estimate
  if low is None:
    return f"{value:+.3f}"
  return f"{value:+.3f} ({low:+.3f} to {high:+.3f})"


def table(results: dict[str, dict]) -> str:
  """Of each stream a table of its blocks, and one of the whole."""
  (result,) = results.values()
  after, parts = result["config"]["after"], []
  for name, stream in result["streams"].items():
    late = lambda draft: lambda block: f"{block['late'][draft]:.3f}"
    above = lambda key: lambda block: _interval(block[f"{key}_above"])
    blocks = {
      f"{name}: block": lambda block: block["domain"],
      **{draft: late(draft) for draft in ("frozen", "online", "offline")},
      f"online above frozen, after {after:,} tokens": above("online"),
      "offline above frozen": above("offline"),
      f"online above frozen, first {after:,}": above("early"),
    }
    whole = {
      f"{name}: draft": lambda item: item[0],
      "tokens": lambda item: f"{item[1]['num_tokens']:,}",
      "acceptance": lambda item: f"{item[1]['acceptance']:.3f}",
      "tokens a target call": lambda item: f"{item[1]['block_efficiency']:.2f}",
      "tokens/s": lambda item: f"{item[1]['tokens_per_second']:.0f}",
      "of it updates": lambda item: f"{item[1]['update_share']:.1%}",
    }
    parts.append(report.columns(stream["blocks"], blocks))
    parts.append(report.columns(stream["whole"].items(), whole))
  return "\n\n".join(parts)


def figure(streams: dict[str, dict]) -> Figure:
  """Acceptance over time, a panel a stream of `launch.studies.online`."""
  made, panels = report.panels(8, 2.9 * len(streams), len(streams))
  for panel, (name, stream) in zip(panels.flat, streams.items(), strict=True):
    for draft, style in _STYLES.items():
      records = [r for block in stream["runs"][draft] for r in block]
      smooth = [
        acceptance(records[max(i - _WINDOW + 1, 0) : i + 1])
        for i in range(len(records))
      ]
      emitted = np.cumsum([r["tokens"] for r in records])
      panel.plot(emitted, smooth, label=draft, **style)
    ends = np.cumsum(
      [sum(r["tokens"] for r in b) for b in stream["runs"]["online"]]
    )
    starts = [0, *ends[:-1]]
    for start, end, domain in zip(starts, ends, stream["domains"], strict=True):
      panel.axvline(end, color="0.6", linewidth=0.6)
      panel.text(
        (start + end) / 2, 1.01, domain, ha="center", va="bottom",
        fontsize="small", transform=panel.get_xaxis_transform(),
      )  # fmt: skip
    panel.set_ylabel("acceptance")
    panel.set_xlabel(f"emitted tokens ({name})")
  panels[0, 0].legend(loc="lower right")
  return made
