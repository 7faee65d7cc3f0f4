"""The figure of where drafting pays."""

from collections.abc import Mapping

from matplotlib.figure import Figure

_MARKERS = "os^D"


def pays(result: Mapping) -> Figure:
  """The best length's speed-up by batch size, a panel a target and slice."""
  lines = result["lines"]
  targets = list(dict.fromkeys(line["target"] for line in lines))
  slices = list(dict.fromkeys(line["topology"] for line in lines))
  figure = Figure(figsize=(8, 2.7 * len(targets)), layout="constrained")
  panels = figure.subplots(
    len(targets), len(slices), squeeze=False, sharex=True, sharey="row"
  )
  for line in lines:
    panel = panels[targets.index(line["target"])][
      slices.index(line["topology"])
    ]
    _curves(panel, line)
  for panel in panels.ravel():
    panel.axhline(1, color="black", linewidth=0.6)
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
  for panel in panels[-1]:
    panel.set_xlabel("rows")
  for panel in panels[:, 0]:
    panel.set_ylabel("over plain decoding")
  panels[0][0].legend(fontsize="small")
  return figure


def _curves(panel, line: Mapping) -> None:
  """Solid where drafts are free, dashed with a draft model."""
  panel.set_title(f"{line['target']}, {line['topology']}", fontsize="medium")
  rows = line["by_batch_size"]
  for index, one in enumerate(rows[0]["at"]):
    panel.plot(
      [row["batch_size"] for row in rows],
      [row["at"][index]["speedup"] for row in rows],
      color=f"C{index}", marker=_MARKERS[index], markersize=3, linewidth=1,
      linestyle="--" if line["draft"] else "-",
      label=None if line["draft"] else f"P = {one['acceptance']:g}",
    )  # fmt: skip
