"""Draws acceptance over time, one panel a stream."""

import numpy as np
from matplotlib.figure import Figure

from launch.studies.online.summary import acceptance

_STYLES = {
  "offline": dict(color="C2", linewidth=1, linestyle="--"),
  "frozen": dict(color="C0", linewidth=1.2),
  "online": dict(color="C3", linewidth=1.5),
}
_WINDOW = 4  # batches a point is the acceptance of


def figure(streams: dict[str, dict]) -> Figure:
  """The figure of all streams, as `launch.studies.online` writes them."""
  made = Figure(figsize=(8, 2.9 * len(streams)), layout="constrained")
  panels = made.subplots(len(streams), 1, squeeze=False)[:, 0]
  for panel, (name, stream) in zip(panels, streams.items(), strict=True):
    for draft, style in _STYLES.items():
      records = [r for block in stream["runs"][draft] for r in block]
      emitted = np.cumsum([r["tokens"] for r in records])
      smooth = [
        acceptance(records[max(i - _WINDOW + 1, 0) : i + 1])
        for i in range(len(records))
      ]
      panel.plot(emitted, smooth, label=draft, **style)
    ends = np.cumsum(
      [sum(r["tokens"] for r in b) for b in stream["runs"]["online"]]
    )
    for start, end, domain in zip(
      [0, *ends[:-1]], ends, stream["domains"], strict=True
    ):
      panel.axvline(end, color="0.6", linewidth=0.6)
      panel.text(
        (start + end) / 2, 1.01, domain, ha="center", va="bottom",
        fontsize="small", transform=panel.get_xaxis_transform(),
      )  # fmt: skip
    panel.grid(linewidth=0.3)
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_ylabel("acceptance")
    panel.set_xlabel(f"emitted tokens ({name})")
  panels[0].legend(fontsize="small", loc="lower right")
  return made
