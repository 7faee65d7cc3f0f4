"""Display of completions and summaries by `launch.decode`."""

import io
import re

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


def completed(ids, origin, reason):
  return Completion(
    token_ids=ids, origins=[origin] * len(ids), stop_reason=reason,
    num_target_calls=1, num_fed=4, num_drafted=3, num_accepted=3,
    expected_accepted=3.0, total_variation=0.0, accept_counts=[0, 0, 0, 1],
  )  # fmt: skip


def test_prompt_is_dim_and_completion_matches_legend_colors():
  tokenizer = tokenizers.load(EMBEDDED)
  ids = tokenizer.encode("x = 1")
  completion = completed(ids, Origin.ACCEPTED, "length")
  prompt = Prompt(0, "\x1b[2J", "def f():\x1b]0;x\x07", (1, 2))
  colors = dict(force_terminal=True, color_system="256")
  text = shown(display.show_completion, tokenizer, prompt, completion, **colors)
  assert "\x1b[2mdef f():␛]0;x␇\x1b[0m\x1b[32mx\x1b[0m" in text
  assert "prompt ␛[2J" in text
  legend = shown(display.show_legend, **colors)
  assert "\x1b[32mdrafted and accepted\x1b[0m" in legend


def test_sample_shows_its_number_and_ends_before_its_stop_string():
  tokenizer = tokenizers.load(EMBEDDED)
  ids = tokenizer.encode("x = 1\n\ndef f():")
  completion = completed(ids, Origin.RESIDUAL, "stop_string")
  prompt = Prompt(0, "a", "", (1,), sample=2, stop=("f()", "\ndef"))
  text = shown(display.show_completion, tokenizer, prompt, completion)
  head, *body = text.splitlines()
  assert head.startswith("prompt a, sample 2 ")
  body = "\n".join(body).replace("⟨", "").replace("⟩", "")
  assert body == "x = 1\n"


def test_svg_wraps_and_colors_tokens_by_origin():
  tokenizer = tokenizers.load(EMBEDDED)
  ids = tokenizer.encode("x = 1; " * 20)
  completion = completed(ids, Origin.RESIDUAL, "length")
  drawn = display.svg(tokenizer, [Prompt(0, "a", "y = 2", (1,))], [completion])
  text = "".join(re.findall(r"<text [^>]*>([^<]*)", drawn))
  text = text.replace("&#160;", "").replace("\n", "")
  assert text.count("x=1;") == 20
  legend = ("drafted&#160;and&#160;accepted", "corrected", "bonus")
  fills = [re.search(rf'class="(\S+)"[^>]*>{x}', drawn)[1] for x in legend]
  assert len({*fills}) == 3


def test_lossy_runs_are_labeled_next_to_their_speedup():
  rule = rules.get("typical(epsilon=0.3)")
  unit = intervals.Unit(
    num_tokens=16, num_target_calls=4, num_drafted=20, num_accepted=12,
    expected_accepted=11.5, seconds=1.0, total_variation=2.0,
    baseline_num_tokens=16, baseline_num_target_calls=16, baseline_seconds=2.0,
  )  # fmt: skip
  summary = intervals.summarize([unit] * 5)
  text = shown(display.show_summary, summary, rule)
  head, *_, last = text.strip().splitlines()
  assert head == "rule typical(epsilon=0.3): lossy, total variation 0.125"
  assert last.startswith("speed-up 2.00 (95% interval ")
  assert last.endswith(", paired), lossy, total variation 0.125")
