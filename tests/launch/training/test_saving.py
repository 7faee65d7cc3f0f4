"""Checkpoints that are broken, missing or half written."""

import errno
import itertools
import json
import os
import sys
import threading

import grain
import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging

from launch.training.saving import Checkpoints
from models.formats import checksums

pytestmark = pytest.mark.usefixtures("quick_to_compile")


def numbers():
  return iter(grain.MapDataset.range(100).to_iter_dataset())


def state(value):
  noise = np.random.default_rng(value).normal(size=(64, 64))
  return {"w": jnp.asarray(noise, jnp.float32), "step": jnp.int32(value)}


@pytest.fixture
def folder(tmp_path):
  """With checkpoints of steps 2 and 4."""
  iterator = numbers()
  with Checkpoints(tmp_path / "checkpoints", every=2) as saved:
    for step in range(1, 5):
      next(iterator)
      saved.save(step, state(step), iterator)
  return tmp_path / "checkpoints"


def test_state_and_place_in_the_data_come_back(folder):
  iterator = numbers()
  step, actual = Checkpoints(folder, every=2).restore(state(0), iterator)
  assert (step, int(actual["step"])) == (4, 4)
  np.testing.assert_array_equal(actual["w"], state(4)["w"])
  assert next(iterator) == 4


def test_without_checkpoints_the_given_state_is_the_first(tmp_path):
  step, actual = Checkpoints(tmp_path / "c", every=2).restore(
    state(7), numbers()
  )
  assert (step, int(actual["step"])) == (0, 7)


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_broken_checkpoint_gives_way_to_the_one_before(
  folder, damage, caplog
):
  data = [f for f in (folder / "4" / "state").rglob("d/*") if f.is_file()]
  assert data
  for file in data:
    if damage == "missing":
      file.unlink()
    else:
      file.write_bytes(file.read_bytes()[:50])
  iterator = numbers()
  saved = Checkpoints(folder, every=2)
  with caplog.at_level("WARNING"):
    step, actual = saved.restore(state(0), iterator)
  assert (step, int(actual["step"])) == (2, 2)
  assert next(iterator) == 2
  assert "checkpoint of step 4 cannot be read" in caplog.text
  assert "going back to the checkpoint of step 2" in caplog.text
  assert (folder.parent / "broken-checkpoints-4").is_dir()
  # Its step can be saved again.
  saved.save(4, state(40), iterator, force=True)
  step, actual = Checkpoints(folder, every=2).restore(state(0), numbers())
  assert (step, int(actual["step"])) == (4, 40)


def test_a_lost_place_in_the_data_breaks_a_checkpoint(folder):
  for file in (folder / "4" / "data").rglob("*.json"):
    file.write_text("{")
  iterator = numbers()
  step, _ = Checkpoints(folder, every=2).restore(state(0), iterator)
  assert step == 2
  assert next(iterator) == 2


def test_where_no_checkpoint_can_be_read_nothing_begins_anew(folder):
  for file in folder.rglob("d/*"):
    if file.is_file():
      file.unlink()
  with pytest.raises(ValueError, match=r"none of the checkpoints.*steps 4, 2"):
    Checkpoints(folder, every=2).restore(state(0), numbers())
  assert {"2", "4"} <= {path.name for path in folder.iterdir()}


def test_a_state_of_another_shape_touches_no_checkpoint(folder):
  other = {"w": jnp.zeros((3, 3)), "step": jnp.int32(0)}
  with pytest.raises(ValueError, match="none of the checkpoints"):
    Checkpoints(folder, every=2).restore(other, numbers())
  assert Checkpoints(folder, every=2).restore(state(0), numbers())[0] == 4


def test_an_unfinished_checkpoint_is_not_seen(folder):
  (folder / "4").rename(folder / "4.orbax-checkpoint-tmp")
  step, _ = Checkpoints(folder, every=2).restore(state(0), numbers())
  assert step == 2


def test_only_the_newest_are_kept_and_force_saves_any_step(tmp_path):
  iterator = numbers()
  with Checkpoints(tmp_path / "c", every=10, keep=2) as saved:
    for step in (10, 13, 20):
      saved.save(step, state(step), iterator, force=step == 13)
    saved.save(20, state(20), iterator, force=True)  # is there: nothing to do
  kept = [int(p.name) for p in (tmp_path / "c").iterdir() if p.name.isdigit()]
  assert sorted(kept) == [13, 20]
  assert list(itertools.islice(iterator, 1)) == [0]


def flip(file, bit=None):
  data = bytearray(file.read_bytes())
  bit = 4 * len(data) if bit is None else bit
  data[bit // 8] ^= 1 << bit % 8
  file.write_bytes(data)


def test_every_file_of_a_checkpoint_has_a_checksum(folder):
  """One bit is enough, in any file but those that nothing is read from."""
  files = [file for file in (folder / "4").rglob("*") if file.is_file()]
  later = ("_CHECKPOINT_METADATA", "commit_success.txt")
  checked = [f for f in files if f not in [folder / "4" / n for n in later]]
  assert len(checked) == len(files) - 2
  assert {"manifest.ocdbt", "_METADATA", "checksums.json"} <= {
    file.name for file in checked
  }
  checksums.check(folder / "4")
  for file in checked:
    for bit in (0, 8 * file.stat().st_size - 6):
      flip(file, bit)
      with pytest.raises(ValueError, match=f"{file.name} |is damaged|changed"):
        checksums.check(folder / "4")
      flip(file, bit)
  checksums.check(folder / "4")
  (folder / "4" / "state" / "more").touch()
  with pytest.raises(ValueError, match="state/more changed"):
    checksums.check(folder / "4")


def test_a_flipped_bit_in_the_weights_is_found_by_checksums_alone(
  folder, caplog
):
  """Orbax reads altered weights without a word: hence our own checksums."""
  flip(max((folder / "4" / "state").rglob("d/*"), key=os.path.getsize))
  kept = (folder / "4" / "checksums.json").read_bytes()
  (folder / "4" / "checksums.json").unlink()  # as from before there were any
  step, actual = Checkpoints(folder, every=2).restore(state(0), numbers())
  assert step == 4
  assert np.any(actual["w"] != state(4)["w"])
  (folder / "4" / "checksums.json").write_bytes(kept)
  with caplog.at_level("WARNING"):
    step, actual = Checkpoints(folder, every=2).restore(state(0), numbers())
  assert step == 2
  np.testing.assert_array_equal(actual["w"], state(2)["w"])
  assert "checkpoint of step 4 cannot be read (ValueError: state/" in (
    caplog.text
  )


def test_a_changed_place_in_the_data_is_found(folder):
  (place,) = (folder / "4" / "data").rglob("*.json")
  text = place.read_text()
  assert text.count("4") == 1
  place.write_text(text.replace("4", "5"))
  iterator = numbers()
  assert Checkpoints(folder, every=2).restore(state(0), iterator)[0] == 2
  assert next(iterator) == 2


def test_a_full_disk_is_an_os_error_and_nothing_else_is_said(
  folder, monkeypatch, capsys, caplog
):
  """As tensorstore raises it in a thread, and as Orbax then logs it."""
  saved = Checkpoints(folder, every=1)
  words = "RESOURCE_EXHAUSTED: ... No space left on device [os_error_code='28']"

  def fails():
    try:
      raise ValueError(words)
    except ValueError as error:
      logging.exception("in a thread")
      raise RuntimeError("Event loop is closed") from error

  def save(*_, **__):
    thread = threading.Thread(target=lambda: sys.excepthook(
      RuntimeError, RuntimeError("Event loop is closed"), None
    ))  # fmt: skip
    thread.start()
    thread.join()
    fails()

  hook = sys.excepthook
  monkeypatch.setattr(saved._manager, "save", save)
  with pytest.raises(OSError, match="No space left") as raised, saved:
    saved.save(7, state(7), numbers())
  assert raised.value.errno == errno.ENOSPC
  assert raised.value.filename == str(folder)
  assert sys.excepthook is hook
  assert os.strerror(errno.ENOSPC) not in caplog.text
  assert capsys.readouterr().err == ""


def test_another_error_of_saving_stays_itself(folder, monkeypatch):
  with Checkpoints(folder, every=1) as saved:
    monkeypatch.setattr(
      saved._manager, "save", lambda *_, **__: json.loads("{")
    )
    with pytest.raises(json.JSONDecodeError):
      saved.save(7, state(7), numbers())
