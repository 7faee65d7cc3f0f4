"""Stores a target's features of a text: see `launch.training.features`."""

from launch import cli
from launch.training.features import run

if __name__ == "__main__":
  cli.run(run, required=("config", "output"))
