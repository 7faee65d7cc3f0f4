"""`launch.studies.rules.sweep`: cells of one pair, and of one alone."""

import json

import pytest

from launch import provenance
from launch.studies.rules import on_pair, sweep


def test_a_sweep_goes_on_with_the_same_pair_alone(
  cli, tmp_path, monkeypatch, capsys
):
  output, measured = tmp_path / "s.json", []
  command = (
    sweep.run, "--shapes=1x2", "--num_prompts=2", "--rules=token,match",
    f"--output={output}",
  )  # fmt: skip

  def dies_at_the_second(rows, _, config, *__, **___):
    measured.append(([row.name for row in rows], config.temperature))
    if len(measured) == 2:
      raise KeyboardInterrupt
    return {}

  monkeypatch.setattr(on_pair, "measure", dies_at_the_second)
  with pytest.raises(KeyboardInterrupt):
    cli(*command)
  with monkeypatch.context() as patched:  # trained again, at the same path
    patched.setattr(provenance, "hash_checkpoint", lambda _: "another")
    assert cli(*command) == 2
  assert "checkpoints.draft was" in capsys.readouterr().err
  assert cli(*command) == 0
  rules = ["token", "match"]
  assert measured == [(rules, 0.5), (rules, 1.0), (rules, 1.0)]
  cells = json.loads(output.read_text())["cells"]
  assert [cell["temperature"] for cell in cells] == [0.5, 1.0]
