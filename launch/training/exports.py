"""Exports of a run: a model that is there is replaced with --overwrite only."""

from launch import results


def check(export: str | None) -> None:
  """Raises, before any work is done, if a model cannot go into a folder."""
  if export:
    results.check(f"{export}/config.json", f"{export}/model.safetensors")
