"""Pages show rows and figures that are made anew of committed results."""

import io
import pathlib

import pytest
import shown

from launch import report, tables
from launch.studies import mixtures, online_plots
from launch.studies.depth import plots as depth
from launch.studies.drafts import plots as drafts
from launch.studies.rules import plots as rules
from launch.studies.theory import plots as theory

DOCS = pathlib.Path("docs")
# Table, page (from a heading on), results, and the least number of rows that
# the page shows.
TABLES = [
  ("audit", "audit", "measurements/audit/audit.json", 10),
  ("power", "audit", "measurements/audit/audit.json", 2),
  ("costs", "rule-costs", "measurements/rules/costs.json", 11),
  ("costs", "rule-costs", "measurements/rules/several_paths.json", 2),
  *[
    ("drafts", "drafts", f"measurements/drafts/{name}.jsonl", 4)
    for name in ("shapes", "objectives", "heads")
  ],
  ("efficiency", "rules", "measurements/rules/smollm2_head.json", 3),
  ("efficiency", "rules", "measurements/rules/shapes.json", 4),
  ("efficiency", "rules", "measurements/rules/smollm2_itself.json", 3),
  (
    "settings",
    "rule-costs",
    "measurements/rules/settings.json measurements/rules/several_paths.json",
    7,
  ),
  ("joint", "joint", "measurements/rules/joint.json", 9),
  ("loads", "serving", "measurements/serving/*.json", 13),
  ("mixtures", "mixtures", "mixtures/pays.json", 12),
  ("optimality", "transport", "measurements/rules/optimality.json", 2),
  ("passes", "measured", "measurements/passes/*.json", 2),
  ("layers", "self_speculation", "self_speculation/smollm2*.json", 4),
  ("precision", "precision", "precision/[es]*.json", 8),
  ("precision", "precision## As its own draft", "precision/[es]*.json", 4),
  (
    "rejections",
    "theory",
    "theory/single.json theory/batch.json theory/drafts.json",
    3,
  ),
  *[
    (name, "theory", f"theory/{name}.json", 2)
    for name in ("tradeoff", "throughput", "acceptance", "mixture", "quality")
  ],
  ("explained", "theory", "reports/*.json", 2),
]
# By figure, what draws it of which results.
FIGURES = {
  "figures/rule-costs": (rules.costs, "measurements/rules/costs.json"),
  "figures/rule-efficiency": (
    rules.efficiency, "measurements/rules/embedded.json"
  ),
  "figures/optimality": (
    rules.optimality, "measurements/rules/optimality.json"
  ),
  "figures/rule-front": (rules.front, "measurements/rules/front*.json"),
  "figures/joint": (rules.joint, "measurements/rules/joint.json"),
  "figures/acceptance-by-position": (
    drafts.by_position, "measurements/drafts/heads.jsonl"
  ),
  "mixtures/pays": (mixtures.pays, "mixtures/pays.json"),
  **{
    f"theory/{name}": (draw, f"theory/{name}.json")
    for name, draw in theory.FIGURES.items()
  },
  **{
    f"adaptive/temperature-{t}/depth": (
      depth.figure, f"adaptive/temperature-{t}/depth.json"
    )
    for t in ("0.0", "1.0")
  },
  **{
    f"online/{name}": (
      lambda result: online_plots.figure(result["streams"]),
      f"online/{name}.json",
    )
    for name in ("early", "prose", "tasks")
  },
}  # fmt: skip


def drawn(name: str) -> bytes:
  """A figure, made anew."""
  draw, sources = FIGURES[name]
  results = [report.read(str(path)) for path in sorted(DOCS.glob(sources))]
  image, figures = io.BytesIO(), []
  report.save(lambda: figures.append(draw(*results)) or figures[0], image)
  assert shown.is_whole(figures[0])
  return image.getvalue()


def printed(table: str, files: str, capsys) -> str:
  paths = [str(p) for one in files.split() for p in sorted(DOCS.glob(one))]
  assert tables.main(["tables", table, *paths]) == 0
  return capsys.readouterr().out


@pytest.mark.parametrize(
  ("table", "page", "files", "least"), TABLES, ids=lambda x: str(x)
)
def test_the_page_shows_rows_of_the_committed_result(
  table, page, files, least, capsys
):
  page, _, heading = page.partition("#")
  text = (DOCS / f"{page}.md").read_text("utf-8")
  text = text[text.index(heading) :]
  rows = shown.rows_of(printed(table, files, capsys), text)
  assert len(rows) >= least


@pytest.mark.parametrize("name", FIGURES)
def test_the_committed_figure_is_drawn_anew(name):
  assert drawn(name) == (DOCS / f"{name}.svg").read_bytes()


def test_every_figure_of_these_folders_is_among_them():
  actual = {
    str(path.relative_to(DOCS).with_suffix(""))
    for folder in ("figures", "theory", "adaptive", "online", "mixtures")
    for path in (DOCS / folder).rglob("*.svg")
  }
  assert actual == {*FIGURES}
