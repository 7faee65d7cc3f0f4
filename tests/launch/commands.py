"""Command lines as functions."""

import sys

from absl.testing import flagsaver

from launch import cli


def execute(command, *args):
  """The exit code of a command that runs in this process."""
  # config_flags looks for overrides (`--config.x=1`) in sys.argv.
  outer, sys.argv = sys.argv, ["test", *map(str, args)]
  with flagsaver.flagsaver():
    try:
      rest = cli._parse(command, sys.argv)
    except cli.UserError as error:
      return cli.fail(str(error))
    finally:
      sys.argv = outer
    return cli._guarded(command, rest)
