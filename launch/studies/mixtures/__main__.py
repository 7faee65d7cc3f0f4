r"""Where drafting pays on published mixtures: a roofline, nothing is compiled.

  python -m launch.studies.mixtures --workdir=docs/mixtures

Plans Qwen3-30B-A3B and gpt-oss-20b in bfloat16 on v5e-8 and v6e-8, rows of
1,024 tokens, at batches of 1 to 256, as `launch.plan` does: for drafts that
cost nothing, than which none is better at the same acceptance, and for
Qwen3-0.6B. Routing is uniform; an evaluation that counted experts
(`launch.evaluate --count_experts`) takes its place in `launch.plan --experts`.
WORKDIR gets pays.json and pays.svg; `launch.tables mixtures` prints the table.
"""

import pathlib

from configs import shapes
from launch import cli, figures, hardware, provenance, results
from launch.planning import answer, memory, program
from launch.studies.mixtures import plots
from models.formats.huggingface import translate
from models.meshes import Layout
from specjax.tree import chain

cli.reads(cli.WORKDIR)

TARGETS = {"qwen3-30b-a3b": (None, "qwen3-0.6b"), "gpt-oss-20b": (None,)}
TOPOLOGIES = ("v5e-8", "v6e-8")
LENGTH = 1024


def question(target: str, draft: str | None, batch_size: int = 1):
  """What is planned; without a draft model, drafts cost nothing."""
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
        found = answer.of_mixture(topology, question(target, draft))["mixture"]
        for row in found["by_batch_size"]:
          held = memory.held(question(target, draft, row["batch_size"]))
          row["fits"] = held <= topology.chip.hbm_bytes
        lines.append(
          {"target": target, "draft": draft, "topology": name} | found
        )
  return lines


def run(_) -> int:
  """The command."""
  folder = pathlib.Path(cli.WORKDIR.value)
  path = folder / "pays.json"
  results.check({"the result": str(path)})
  found = {"length": LENGTH, "lines": study(), **provenance.record()}
  results.write_json(str(path), found)
  figures.save(lambda: plots.pays(found), folder / "pays.svg")
  return 0


if __name__ == "__main__":
  cli.run(run, required=("workdir",))
