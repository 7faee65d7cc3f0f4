"""Command lines as functions."""

from absl.testing import flagsaver

from launch import cli


def execute(command, *args):
  """The exit code of a command that runs in this process."""
  with flagsaver.flagsaver():
    return cli.execute(command, ["test", *map(str, args)])
