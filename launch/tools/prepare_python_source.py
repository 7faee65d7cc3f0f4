"""Prepares the dataset `python_source`, which training else does by itself.

python -m launch.tools.prepare_python_source --data_dir=DIR
"""

from absl import flags

from launch import cli
from launch.training import python_source

cli.reads()
_DATA_DIR = flags.DEFINE_string(
  "data_dir", None, "Where datasets are; a folder of this user by default."
)


def run(_) -> int:
  """The command."""
  folder = _DATA_DIR.value or python_source.default_dir()
  builder = python_source.prepare(folder)
  for name, split in builder.info.splits.items():
    print(f"{name}: {split.num_examples} files, {split.num_bytes:,} bytes")
  print(f"in {builder.data_path}")
  return 0


if __name__ == "__main__":
  cli.run(run, required=())
