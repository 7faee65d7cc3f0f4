r"""Writes inputs and answers of tasks whose data a machine makes.

  python -m launch.tools.machine_tasks --split=train --num_pairs=200000 \
    --output=TRAIN.jsonl

A line is {"id", "task", "input", "output"}: a pair to train an encoder-decoder
on (configs/train_t5.py), and a prompt for `launch.decode`. The tasks are in
launch/training/t5_tasks.py.
"""

from absl import flags

from launch import cli, jsonl, results
from launch.training import t5_tasks

cli.reads(cli.OUTPUT, cli.SEED)
_SPLIT = flags.DEFINE_enum(
  "split", "train", ("train", "validation", "test"), "Which of them."
)
_NUM_PAIRS = flags.DEFINE_integer("num_pairs", 1000, "How many.", lower_bound=1)


def run(_) -> int:
  """The command."""
  results.check({"--output": cli.OUTPUT.value}, stdout=True)
  made = t5_tasks.pairs(
    _SPLIT.value, _NUM_PAIRS.value, seed=cli.SEED.value or 0
  )
  lines = [
    {"id": i, "task": task, "input": given, "output": answer}
    for i, (task, (given, answer)) in enumerate(made)
  ]
  results.write(cli.OUTPUT.value, jsonl.dumps(lines))
  return 0


if __name__ == "__main__":
  cli.run(run, required=("output",))
