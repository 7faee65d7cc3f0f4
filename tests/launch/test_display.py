"""Display of completions and summaries by `launch.decode`."""

import dataclasses
import io

import fallback
import rich.console
from files import EMBEDDED

from launch import display
from launch.evaluation import intervals
from launch.prompts import Prompt
from models import tokenizers
from specjax import rules
from specjax.runtime.engine import Completion
from specjax.state import Origin


def shown(show, *arguments, **options):
  console = rich.console.Console(file=io.StringIO(), width=100, **options)
  show(console, *arguments)
  return console.file.getvalue()


def test_the_prompt_is_dim_and_its_completion_as_bright_as_the_legend():
  tokenizer = tokenizers.load(EMBEDDED)
  ids = tokenizer.encode("x = 1")
  completion = Completion(
    token_ids=ids, origins=[Origin.ACCEPTED] * len(ids), stop_reason="length",
    num_target_calls=1, num_fed=4, num_drafted=3, num_accepted=3,
    expected_accepted=3.0,
    total_variation=0.0, accept_counts=[0, 0, 0, 1],
  )  # fmt: skip
  prompt = Prompt(0, "\x1b[2J", "def f():\x1b]0;x\x07", (1, 2))
  colors = dict(force_terminal=True, color_system="256")
  text = shown(display.show_completion, tokenizer, prompt, completion, **colors)
  assert "\x1b[2mdef f():␛]0;x␇\x1b[0m\x1b[32mx\x1b[0m" in text
  assert "prompt ␛[2J" in text
  legend = shown(display.show_legend, **colors)
  assert "\x1b[32mdrafted and accepted\x1b[0m" in legend


def test_a_sample_has_its_number_and_ends_before_its_stop_string():
  tokenizer = tokenizers.load(EMBEDDED)
  ids = tokenizer.encode("x = 1\n\ndef f():")
  completion = Completion(
    token_ids=ids, origins=[Origin.RESIDUAL] * len(ids),
    stop_reason="stop_string", num_target_calls=1, num_fed=4, num_drafted=3,
    num_accepted=0, expected_accepted=0.0, total_variation=0.0,
    accept_counts=[1],
  )  # fmt: skip
  prompt = Prompt(0, "a", "", (1,), sample=2, stop=("f()", "\ndef"))
  text = shown(display.show_completion, tokenizer, prompt, completion)
  head, *body = text.splitlines()
  assert head.startswith("prompt a, sample 2 ")
  body = "\n".join(body).replace("⟨", "").replace("⟩", "")
  assert body == "x = 1\n"


def summary_of(total_variation):
  unit = intervals.Unit(
    num_tokens=16, num_target_calls=4, num_drafted=20, num_accepted=12,
    expected_accepted=11.5, seconds=1.0,
    total_variation=None if total_variation is None else 16 * total_variation,
    baseline_num_tokens=16, baseline_num_target_calls=16, baseline_seconds=2.0,
  )  # fmt: skip
  return intervals.summarize([unit] * 5)


def test_a_lossy_run_says_so_beside_its_speedup():
  rule = rules.get("typical(epsilon=0.3)")
  text = shown(display.show_summary, summary_of(0.125), rule)
  head, *_, last = text.strip().splitlines()
  assert head == "rule typical(epsilon=0.3): lossy, total variation 0.125"
  assert last.startswith("speed-up 2.00 (95% interval ")
  assert last.endswith(", paired), lossy, total variation 0.125")


def test_what_a_rule_of_ones_own_says_is_its_own_word():
  """It is no 0 where nothing was reported, and no proof where it declares."""
  rule = dataclasses.replace(rules.get("token"), name="mine")
  text = shown(display.show_summary, summary_of(0.0), rule)
  assert text.startswith("rule mine: lossless (declared)")
  lossy = dataclasses.replace(rule, lossless=False)
  text = shown(display.show_summary, summary_of(None), lossy)
  assert text.startswith("rule mine: lossy, distance not reported")
  assert "0.000" not in text


def test_a_completion_begins_with_its_space():
  tokenizer = fallback.numbered(20)
  ids = tokenizer.encode("w3 w4")
  completion = Completion(
    token_ids=ids, origins=[Origin.ACCEPTED] * 2, stop_reason="length",
    num_target_calls=1, num_fed=4, num_drafted=3, num_accepted=3,
    expected_accepted=3.0, total_variation=0.0, accept_counts=[0, 0, 0, 1],
  )  # fmt: skip
  prompt = Prompt(0, 0, "w7", (7,))
  text = shown(display.show_completion, tokenizer, prompt, completion)
  assert text.endswith("\nw7 w3 w4\n")
