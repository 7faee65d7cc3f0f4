r"""Writes prompts from Python files that no embedded model was trained on.

  python -m launch.tools.held_out_prompts --output=P.jsonl --count=200
  python -m launch.evaluate --config=configs/embedded.py --prompts=P.jsonl \
    --output=E.json

A prompt is a few lines from inside a file of `launch.training.corpus`'s test
split of the standard library and the packages whose other files trained the
embedded pair. The same installed versions always give the same prompts.
"""

from absl import flags

from launch import cli, results
from launch.training import corpus

cli.reads(cli.OUTPUT, cli.COUNT)
_NUM_LINES = flags.DEFINE_integer(
  "num_lines", 8, "Lines per prompt.", lower_bound=1
)


def run(_) -> int:
  """The command."""
  results.check(cli.OUTPUT.value)
  texts = corpus.held_out_prompts(
    cli.COUNT.value or 200, num_lines=_NUM_LINES.value
  )
  lines = [{"id": i, "prompt": text} for i, text in enumerate(texts)]
  results.write(cli.OUTPUT.value, results.dumps(lines))
  out = results.messages(cli.OUTPUT.value)
  print(f"{len(lines)} prompts in {cli.OUTPUT.value}", file=out)
  return 0


if __name__ == "__main__":
  cli.run(run, required=("output",))
