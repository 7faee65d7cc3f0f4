"""Console output of completions and summaries.

Each token shows its origin: accepted from the draft, drawn from the residual
after a rejection, or the bonus after a fully accepted block. In color these are
green, orange and blue; without color, the two rarer ones are bracketed.
"""

import io
import unicodedata

import rich.box
import rich.console
import rich.table
import rich.text

from launch import stops
from launch.evaluation import intervals
from launch.prompts import Prompt
from launch.report import loss_in_words
from models.tokenizers import Tokenizer
from specjax.runtime.engine import Completion
from specjax.state import Origin
from specjax.types import Rule

STYLES = {
  Origin.ACCEPTED: "green",
  Origin.RESIDUAL: "bold dark_orange",
  Origin.BONUS: "bold dodger_blue1",
}
_MARKS = {Origin.RESIDUAL: ("⟨", "⟩"), Origin.BONUS: ("«", "»")}


def _in_color(console: rich.console.Console) -> bool:
  return console.color_system is not None and not console.no_color


def visible(text: str) -> str:
  """Escapes control characters but newlines, tabs and the joiners in emoji."""
  hidden = ("Cc", "Cf", "Cs", "Zl", "Zp")
  return "".join(
    c
    if c in "\n\t\u200c\u200d" or unicodedata.category(c) not in hidden
    else chr(0x2400 + ord(c))
    if c < " "
    else c.encode("unicode_escape").decode()
    for c in text
  )


def svg(
  tokenizer: Tokenizer, prompts: list[Prompt], completions: list[Completion]
) -> str:
  """Draws completions as a color terminal would show them."""
  console = rich.console.Console(
    record=True, file=io.StringIO(), width=80, force_terminal=True,
    color_system="256",
  )  # fmt: skip
  show_completions(console, tokenizer, prompts, completions)
  return console.export_svg(title="launch.decode")


def show_completions(
  console: rich.console.Console,
  tokenizer: Tokenizer,
  prompts: list[Prompt],
  completions: list[Completion],
) -> None:
  """Prints prompts with their completions, then the legend."""
  for prompt, completion in zip(prompts, completions, strict=True):
    show_completion(console, tokenizer, prompt, completion)
  show_legend(console)


def show_completion(
  console: rich.console.Console,
  tokenizer: Tokenizer,
  prompt: Prompt,
  completion: Completion,
) -> None:
  """Prints a prompt and its completion, with the origin of each token."""
  given = "" if prompt.input is None else f"{prompt.input}\n"
  given += prompt.text
  text = rich.text.Text().append(visible(given), style="dim")
  room = len(stops.text_of(prompt, vars(completion), tokenizer))
  detokenizer = stops.Detokenizer(tokenizer, prompt.token_ids)
  texts = [detokenizer.add(token) for token in completion.token_ids]
  texts[-1:] = [x + detokenizer.rest() for x in texts[-1:]]
  for piece, code in zip(texts, completion.origins, strict=True):
    piece, room = piece[:room], max(room - len(piece), 0)
    origin = Origin(code)
    if not _in_color(console) and origin in _MARKS and piece:
      before, after = _MARKS[origin]
      piece = before + piece + after
    text.append(visible(piece), style=STYLES[origin])
  number = "" if prompt.sample is None else f", sample {prompt.sample}"
  name = visible(f"prompt {prompt.id}{number}")
  console.rule(rich.text.Text(name), align="left")
  console.print(text, soft_wrap=not console.record)


def show_legend(console: rich.console.Console) -> None:
  """Prints the legend of colors or marks."""
  in_color = _in_color(console)
  text = rich.text.Text("tokens: ")
  for origin, words in (
    (Origin.ACCEPTED, "drafted and accepted"),
    (Origin.RESIDUAL, "corrected (residual)"),
    (Origin.BONUS, "bonus"),
  ):
    before, after = ("", "") if in_color else _MARKS.get(origin, ("", ""))
    text.append(f"{before}{words}{after}", style=STYLES[origin])
    text.append("  ")
  console.print(text)


def show_summary(
  console: rich.console.Console, summary: dict, rule: Rule
) -> None:
  """Prints a table that compares speculative and autoregressive decoding.

  A lossy rule's distance from the target is shown with every speed-up.
  """
  loss = loss_in_words(rule.name, rule.lossless, summary["total_variation"])
  console.print(rich.text.Text(f"rule {rule.name}: {loss}"), soft_wrap=True)
  table = rich.table.Table(box=rich.box.SIMPLE)
  table.add_column("")
  table.add_column("speculative", justify="right")
  table.add_column("autoregressive", justify="right")

  def row(label, value, baseline=None, digits=2):
    text = lambda x: "" if x is None else f"{x:.{digits}f}"
    table.add_row(label, text(value), text(baseline))

  plain = summary["baseline_num_tokens"]
  row("tokens", summary["num_tokens"], plain, 0)
  plain_calls = summary["baseline_num_target_calls"]
  row("target calls", summary["num_target_calls"], plain_calls, 0)
  row(
    "block efficiency (tokens per target call)",
    summary["block_efficiency"],
    plain / plain_calls if plain_calls else None,
  )
  row("accepted of drafted tokens", summary["acceptance_rate"])
  row("accepted (expected)", summary["expected_acceptance_rate"])
  row(
    "tokens per second",
    summary["tokens_per_second"],
    summary["baseline_tokens_per_second"],
    1,
  )
  console.print(table)
  if summary["speedup"] is not None:
    interval = summary["speedup_ci"]
    tail = (
      f"(no interval from fewer than {intervals.LEAST} prompts or batches)"
      if interval is None
      else f"(95% interval {interval[0]:.2f} to {interval[1]:.2f}, paired)"
    )
    if not rule.lossless:
      tail += f", {loss}"
    console.print(f"speed-up {summary['speedup']:.2f} {tail}")
