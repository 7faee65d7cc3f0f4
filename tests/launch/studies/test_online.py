"""The study of drafts that learn: its prompts, its numbers, a small run."""

import json

import numpy as np
import pytest

from launch import provenance, tables
from launch.studies import online as study

pytestmark = pytest.mark.usefixtures("quick_to_compile")


def batch(tokens, offered, taken, **more):
  return {"tokens": tokens, "offered": offered, "taken": taken, **more}


def test_acceptance_is_of_tokens_that_were_offered():
  records = [batch(10, 8.0, 6.0), batch(10, 2.0, 0.5)]
  assert study.acceptance(records) == pytest.approx(0.65)


def test_late_batches_begin_beyond_so_many_tokens():
  records = [batch(n, 1.0, 1.0) for n in (60, 30, 20, 5)]
  assert study.late(records, 90) == records[2:]
  assert study.late(records, 91) == records[3:]
  assert study.late(records, 0) == records


def test_a_difference_has_an_interval_that_knows_its_noise():
  rng = np.random.default_rng(1)
  draw = lambda p: [
    batch(100, 50.0, float(rng.binomial(50, p))) for _ in range(40)
  ]
  value, low, high = study.above(draw(0.7), draw(0.5))
  assert low < 0.2 < high
  assert low < value < high
  assert 0.03 < high - low < 0.12
  assert study.above(draw(0.7)[:4], draw(0.5))[1:] == (None, None)
  equal = draw(0.6)
  assert study.above(equal, equal)[0] == 0


def test_prose_is_prose_and_what_is_trained_on_is_not_asked():
  take = lambda **more: [
    t for t, _ in zip(study.texts("prose", **more), range(100), strict=False)
  ]
  asked, trained = take(training=False), take(training=True)
  assert not set(asked) & set(trained)
  assert len(set(asked)) == 100
  letters = [sum(c.isalpha() or c == " " for c in t) / len(t) for t in asked]
  assert min(letters) > 0.85
  with pytest.raises(ValueError, match="no questions of poetry"):
    study.texts("poetry", training=False)


CONFIG = """
from configs import online_study


def get_config():
  config = online_study.get_config()
  config.target, config.checkpoints.draft = {pair!r}
  config.max_new_tokens, config.prompt_tokens = 8, 6
  config.batch_size, config.offline_tokens, config.after = 2, 16, 16
  config.drafter = "online(model(tokens=4), rounds=2, entries=24)"
  config.streams = dict(
    there=dict(domains=("code", "prose"), tokens=32),
    back=dict(domains=("code",), tokens=24),
  )
  return config
"""


def test_a_study_is_run_resumed_and_drawn(
  cli, pair, tmp_path, monkeypatch, capsys
):
  config = tmp_path / "config.py"
  config.write_text(CONFIG.format(pair=tuple(pair)))
  out, real, made = tmp_path / "study.json", study.run_stream, []

  def dies(*args):
    made.append(args[2])
    if len(made) == 3:
      raise KeyboardInterrupt
    return real(*args)

  monkeypatch.setattr(study, "run_stream", dies)
  command = (study.run, f"--output={out}")
  with pytest.raises(KeyboardInterrupt):
    cli(*command, config=config)
  with monkeypatch.context() as patched:  # trained again, at the same path
    patched.setattr(provenance, "hash_checkpoint", lambda _: "another")
    assert cli(*command, config=config) == 2
  assert "checkpoints.draft was" in capsys.readouterr().err
  assert cli(*command, config=config) == 0
  names = ["frozen", "online", "offline"]
  assert made == [*names, "offline", *names]
  record = json.loads(out.read_text())["streams"]
  assert [b["domain"] for b in record["there"]["blocks"]] == ["code", "prose"]
  for stream in record.values():
    assert set(stream["runs"]) == {"frozen", "online", "offline"}
    for blocks in stream["runs"].values():
      for records in blocks:
        assert sum(r["tokens"] for r in records) >= 24
    assert stream["whole"]["frozen"]["update_share"] == 0
    assert stream["whole"]["online"]["update_share"] > 0
  same, other = (
    [r["taken"] for b in record["there"]["runs"][name] for r in b]
    for name in ("frozen", "online")
  )
  assert same != other
  assert "<svg" in (tmp_path / "study.svg").read_text()
  capsys.readouterr()
  assert tables.main(["tables", "online", str(out)]) == 0
  shown = capsys.readouterr().out
  assert "online above frozen, after 16 tokens" in shown
