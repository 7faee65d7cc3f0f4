r"""Batch sizes at which drafting pays on published mixtures, by a roofline.

  python -m launch.studies.mixtures --workdir=docs/mixtures

Plans Qwen3-30B-A3B and gpt-oss-20b in bfloat16 on v5e-8 and v6e-8, rows of
1,024 tokens, at batches of 1 to 256, as `launch.plan` does: for drafts that
cost nothing, than which none is better at the same acceptance, and for
Qwen3-0.6B. Routing is uniform; an evaluation that counted experts
(`launch.evaluate --count_experts`) takes its place in `launch.plan --experts`.
WORKDIR gets pays.json and pays.svg; `launch.tables mixtures` prints the table.
"""

from collections.abc import Mapping

from configs import shapes
from launch import cli, hardware, provenance, report, results
from launch.planning import answer, memory, mixtures, program
from models.formats.huggingface import translate
from models.meshes import Layout
from specjax.tree import chain

cli.reads(cli.WORKDIR)

TARGETS = {"qwen3-30b-a3b": (None, "qwen3-0.6b"), "gpt-oss-20b": (None,)}
TOPOLOGIES = ("v5e-8", "v6e-8")
LENGTH = 1024


def question(target: str, draft: str | None, batch_size: int = 1):
  """The question of a plan; without a draft model, drafts cost nothing."""
  shape = lambda name: translate(shapes.SHAPES[name])
  small = draft and shape(draft)
  return program.Question(
    target=shape(target), draft=small, tree=chain(4), siblings="iid",
    rule="token", batch_size=batch_size, max_length=LENGTH, prompt_length=128,
    layout=Layout(data=1, model=8, draft=8 if small else 1),
  )  # fmt: skip


def study() -> list[dict]:
  """A line for each target, draft and slice: `launch.plan`'s `mixture`.

  With `target`, `draft` (None for free drafts), `topology`, and of each batch
  size whether weights and caches alone `fit`.
  """
  lines = []
  for target, drafts in TARGETS.items():
    for draft in drafts:
      for name in TOPOLOGIES:
        topology = hardware.topology(name)
        plan = answer.of_mixture(topology, question(target, draft))["mixture"]
        for row in plan["by_batch_size"]:
          held = memory.held(question(target, draft, row["batch_size"]))
          row["fits"] = held <= topology.chip.hbm_bytes
        lines.append(
          {"target": target, "draft": draft, "topology": name} | plan
        )
  return lines


def table(results: dict[str, Mapping]) -> str:
  """By target, draft and batch size; slices that answer alike share a row."""
  rows: dict[tuple[str, ...], list[str]] = {}
  for line in next(iter(results.values()))["lines"]:
    draft = f"`{line['draft']}`" if line["draft"] else "free"
    for row in line["by_batch_size"]:
      cells = mixtures.cells(row)
      here = rows.setdefault((f"`{line['target']}`", draft, *cells), [])
      name = line["topology"]
      here.append(name if row["fits"] else f"{name} (does not fit)")
  return report.table(
    ["target", "draft", "slice", *mixtures.HEAD],
    [
      [target, draft, ", ".join(slices), *cells]
      for (target, draft, *cells), slices in rows.items()
    ],
  )


def pays(result: Mapping):
  """The best length's speed-up by batch size, a panel a target and slice.

  Solid where drafts are free, dashed with a draft model.
  """
  lines = result["lines"]
  targets = list(dict.fromkeys(line["target"] for line in lines))
  slices = list(dict.fromkeys(line["topology"] for line in lines))
  figure, panels = report.panels(
    8, 2.7 * len(targets), len(targets), len(slices), sharex=True, sharey="row"
  )
  for line in lines:
    place = targets.index(line["target"]), slices.index(line["topology"])
    panels[place].set_title(f"{line['target']}, {line['topology']}")
    rows = line["by_batch_size"]
    for index, one in enumerate(rows[0]["at"]):
      panels[place].plot(
        [row["batch_size"] for row in rows],
        [row["at"][index]["speedup"] for row in rows],
        color=f"C{index}", marker=report.MARKERS[index],
        linestyle="--" if line["draft"] else "-",
        label=None if line["draft"] else f"P = {one['acceptance']:g}",
      )  # fmt: skip
  for panel in panels.flat:
    panel.axhline(1, color="black", linewidth=0.6)
    report.octaves(panel)
  for panel in panels[-1]:
    panel.set_xlabel("rows")
  for panel in panels[:, 0]:
    panel.set_ylabel("over plain decoding")
  panels[0, 0].legend()
  return figure


def run(_) -> int:
  """The command."""
  folder = results.check_folder("--workdir", cli.WORKDIR.value)
  path = folder / "pays.json"
  if folder.is_dir():
    results.check({"--workdir": str(path)})
  result = {"length": LENGTH, "lines": study(), **provenance.record()}
  folder.mkdir(parents=True, exist_ok=True)
  results.write_json(path, result)
  report.save(lambda: pays(result), folder / "pays.svg")
  return 0


if __name__ == "__main__":
  cli.run(run, required=("workdir",))
