r"""Block efficiency of every rule on a pair, over shapes and temperatures.

  python -m launch.studies.rules.sweep --config=configs/embedded.py \
    --output=docs/measurements/rules/embedded.json

K x G drafted tokens in 1x8, 2x4, 4x2 (equal numbers) and 8x8, or in --shapes,
at temperatures 0.5 and 1.0, along completions of held-out prompts, or answers
to short questions where the target chats (`launch.studies.rules.on_pair`). What
drafts is the config's: a model, a head, or the target itself. A stopped sweep
goes on with the same command.
"""

import json

from absl import flags

from launch import cli, provenance, results, terminal
from launch.results import Journal
from launch.studies.rules import cases, on_pair

cli.reads(
  cli.CONFIG, cli.OUTPUT, cases.RULES, on_pair.NUM_PROMPTS, on_pair.NUM_CONTEXTS
)

_SHAPES = flags.DEFINE_list(
  "shapes", ["1x8", "2x4", "4x2", "8x8"], "Each KxG, paths and their tokens."
)
_TEMPERATURES = (0.5, 1.0)


def of_rule(name: str, num_drafts: int, depth: int, models) -> cases.Case:
  """The row of a rule with parameters, as `block_transport(bins=16)`."""
  ((row,), _) = cases.cases(
    name, num_drafts=num_drafts, num_speculative_tokens=depth,
    vocab_size=models.tokenizer.vocab_size,
  )  # fmt: skip
  return row


def run(_) -> int:
  """The command."""
  config = cli.CONFIG.value
  results.check({"--output": cli.OUTPUT.value}, resumes=True)
  shapes = [_shape(text) for text in _SHAPES.value]
  models = on_pair.build_pair(config)
  texts, batches = on_pair.held_out(models)
  made_by = provenance.of_config(config, texts=texts)
  asked = {
    "num_prompts": on_pair.NUM_PROMPTS.value,
    "contexts_per_prompt": on_pair.NUM_CONTEXTS.value,
    **({"rules": cases.RULES.value} if cases.RULES.value else {}),
    **({"shapes": _SHAPES.value} if _SHAPES.present else {}),
  }
  read = made_by["provenance"]["checkpoints"]
  read |= provenance.hashes(
    provenance.modules("rules", ",".join(cases.RULES.value))
  )
  settings = provenance.settings(
    config, read, prompts=provenance.hash_texts(texts), **asked
  )
  cells = [(s, t) for s in shapes for t in _TEMPERATURES]
  with Journal(cli.OUTPUT.value, settings) as journal:
    for number, ((num_drafts, depth), temperature) in enumerate(cells):
      if number in journal.batches:
        continue
      rows, left_out = cases.cases(
        "all",
        num_drafts=num_drafts,
        num_speculative_tokens=depth,
        vocab_size=models.tokenizer.vocab_size,
      )
      if cases.RULES.value:
        by_name = {row.name: row for row in rows}
        rows = [
          by_name.get(name) or of_rule(name, num_drafts, depth, models)
          for name in cases.RULES.value
          if name not in left_out
        ]
      config.temperature = temperature
      measured = on_pair.measure(
        rows, models, config, batches, max_contexts=on_pair.NUM_CONTEXTS.value
      )
      journal.add(
        {
          "batch": number,
          "num_drafts": num_drafts,
          "num_speculative_tokens": depth,
          "temperature": temperature,
          "rules": measured,
          "left_out": left_out,
        }
      )
    done = [journal.batches[i] for i in range(len(cells))]
    result = {"cells": done, **made_by, **asked}
    results.write_json(cli.OUTPUT.value, result)
    journal.finish()
  terminal.console().print_json(json.dumps(result))
  return 0


def _shape(text: str) -> tuple[int, int]:
  count, _, depth = text.partition("x")
  if not (count.isdecimal() and depth.isdecimal()):
    raise cli.UserError(f"--shapes are written KxG, as in 4x2, got {text!r}")
  return int(count), int(depth)


if __name__ == "__main__":
  cli.run(run, required=("config", "output"))
