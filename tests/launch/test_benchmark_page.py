"""What the README's table says of a run beside its rates."""

import json
import pathlib

import pytest

from launch import benchmark_page


@pytest.mark.parametrize(
  "changes, words",
  [
    (
      dict(prediction_error=-0.0125, prediction_error_ci=[-0.03, 0.006]),
      ", -1.2% (-3.0% to +0.6%)",
    ),
    (dict(prediction_error=0.05, prediction_error_ci=None), ", +5.0% |"),
    (
      dict(
        predicted_speedup=None,
        prediction_error=None,
        prediction_error_ci=None,
        doubts=["laws took -1.00 ms", "b"],
      ),
      "| none: laws took -1.00 ms; b |",
    ),
    (dict(lossless=True, total_variation=0.0), "), `token`: lossless |"),
    (
      dict(lossless=True, total_variation=0.0, rule="mine:RULE"),
      "), `mine:RULE`: lossless (declared) |",
    ),
    (
      dict(lossless=False, total_variation=0.1254),
      "), `token`: lossy, total variation 0.125 |",
    ),
    (dict(hf_identical_completions=0.5), "(**other texts**: 50% alike)"),
    (dict(hf_identical_completions=1.0), None),
    (dict(hf_identical_completions=None), None),
  ],
)
def test_a_row_says_what_its_numbers_are_worth(changes, words):
  result = committed() | changes
  rate = f"| {result['hf_autoregressive_tokens_per_second']:.0f} |"
  text = benchmark_page.table({"run": result})
  assert (words or rate) in text
  assert ("lossy" in text) == (not result["lossless"])
  assert ("other texts" in text) == ("other" in (words or ""))


def committed():
  source = pathlib.Path("docs/measurements/embedded-greedy.json")
  return json.loads(source.read_text("utf-8"))


def test_the_commands_of_the_rows_stand_under_the_table():
  old = committed()
  old.pop("provenance", None)
  rows = benchmark_page.table({"old": old}).count("\n")
  command = "python -m launch.benchmark --config=a.py '--config.rule=x y'"
  made_by = {"command": f"{command} --output=B.json --overwrite"}
  new = old | {"provenance": made_by}
  lines = benchmark_page.table({"old": old, "new": new}).splitlines()
  assert lines[-2:] == ["", f"- new: `{command}`"]
  assert len(lines) == rows + 4


@pytest.mark.parametrize(
  "changes, cell",
  [
    ({}, "45 (plain ×0.85, speculative ×1.20)"),
    (
      dict(acceptance_rate=None, draft_forwards_seconds=None),
      "45 (plain ×0.85)",
    ),
    (
      dict(llama_cpp_identical_completions=0.5),
      "45 (plain ×0.85, speculative ×1.20) (**other texts**: 50% alike)",
    ),
  ],
)
def test_the_table_tells_our_rates_over_llama_cpp_where_it_was_measured(
  changes, cell
):
  without = committed()
  without.pop("provenance", None)
  assert "llama.cpp" not in benchmark_page.table({"a": without})
  ratios = {"autoregressive": 0.85, "speculative": 1.2}
  found = {
    "llama_cpp": {"n_threads": 2},
    "llama_cpp_tokens_per_second": 45.1,
    "llama_cpp_identical_completions": 1.0,
    "ratios": {"llama_cpp": ratios},
  }
  results = {"a": without, "b": without | found | changes}
  table = benchmark_page.table(results).splitlines()
  header, _, *rows = (line.strip("| ").split(" | ") for line in table)
  assert header[-1] == "llama.cpp tok/s"
  assert [row[-1] for row in rows] == ["–", cell]
  both = {"ratios": {"hf_autoregressive": ratios, "llama_cpp": ratios}}
  text = benchmark_page.table({"b": without | found | both})
  assert text.count("(plain ×0.85, speculative ×1.20)") == 2


def test_the_table_tells_the_share_of_bandwidth_where_one_was_measured():
  found = {"share": 0.62, "device_bandwidth_source": "spec sheet"}
  on_a_mesh = committed() | {"memory_bandwidth": None}
  on_a_mesh.pop("provenance", None)
  assert "bandwidth" not in benchmark_page.table({"a": on_a_mesh})
  measured = on_a_mesh | {"memory_bandwidth": found}
  table = benchmark_page.table({"a": on_a_mesh, "b": measured}).splitlines()
  header, _, without, row = table
  place = header.split(" | ").index("memory bandwidth")
  assert without.split(" | ")[place] == "–"
  assert row.split(" | ")[place] == "62% (spec sheet)"
  assert len({line.count("|") for line in table}) == 1
