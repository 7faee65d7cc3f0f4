r"""Trains a small transformer from scratch, or as the draft of a target.

  python -m launch.train --config=configs/train_embedded.py:target \
    --workdir=/tmp/specjax/target --export=models/pretrained/target --overwrite

The same command, or `--workdir` alone, resumes from the last checkpoint and
ends with the same parameters, bit for bit, as an uninterrupted run. SIGTERM or
Ctrl-C saves a checkpoint and exits with code 75, unfinished. At the end the
model is exported as Llama files to `--export`. An existing model, and a run
with other settings in WORKDIR, are replaced only with --overwrite. The number
of steps, rates and logging may change within a run. WORKDIR gets

  config.json      the settings
  metrics.jsonl    every `log_every` steps the objective's loss (as in
                   `forward_kl_loss`) and tokens per second; every
                   `validate_every` steps the text's cross-entropy
                   (`validation_next_token_loss`), bits per byte and, with a
                   teacher, the acceptance of a drafted token
  checkpoints/     the newest two

Checkpoints load onto any mesh: the same command resumes with another
`--config.mesh` or on other devices, but needs the same number of processes,
because each has its own position in the data. `--workdir` and `--export` alone
export a finished run.

It also trains heads on a target's features (configs/train_head.py), and
encoder-decoders and SpecDec's block drafters (configs/train_t5.py), which are
exported in T5's format.
"""

from absl import flags

from launch import cli, results
from launch.training import run as run_lib
from launch.training.step import log

cli.reads(cli.CONFIG, cli.WORKDIR)
_EXPORT = flags.DEFINE_string(
  "export", None, "Where to write the trained model (Llama files)."
)


def run(_) -> int:
  """The command."""
  run_lib.quiet()
  workdir, export = cli.WORKDIR.value, _EXPORT.value
  if export:
    results.check(f"{export}/config.json", f"{export}/model.safetensors")
  config = cli.CONFIG.value or run_lib.read_config(workdir)
  if cli.OVERWRITE.value:
    run_lib.discard_other(config, workdir)
  one = run_lib.Run(config, workdir)
  module, finished = one.train()
  if export and finished and one.chief:
    one.export(module, export)
    log(f"exported to {export}")
  return 0 if finished else cli.UNFINISHED


if __name__ == "__main__":
  cli.run(
    run, required=("workdir",), several_processes=True, preemption_notice=True
  )
