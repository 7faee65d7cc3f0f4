"""Checkpoints that are broken, missing or half written."""

import itertools

import grain
import jax.numpy as jnp
import numpy as np
import pytest

from launch.training.checkpoints import Checkpoints

pytestmark = pytest.mark.usefixtures("quick_to_compile")


def numbers():
  return iter(grain.MapDataset.range(100).to_iter_dataset())


def state(value):
  return {"w": jnp.full((64, 64), value, jnp.float32), "step": jnp.int32(value)}


@pytest.fixture
def folder(tmp_path):
  """With checkpoints of steps 2 and 4."""
  saved = Checkpoints(tmp_path / "checkpoints", every=2)
  iterator = numbers()
  for step in range(1, 5):
    next(iterator)
    saved.save(step, state(step), iterator)
  saved.close()
  return tmp_path / "checkpoints"


def test_state_and_place_in_the_data_come_back(folder):
  iterator = numbers()
  step, found = Checkpoints(folder, every=2).restore(state(0), iterator)
  assert (step, int(found["step"])) == (4, 4)
  np.testing.assert_array_equal(found["w"], state(4)["w"])
  assert next(iterator) == 4


def test_without_checkpoints_the_given_state_is_the_first(tmp_path):
  step, found = Checkpoints(tmp_path / "c", every=2).restore(
    state(7), numbers()
  )
  assert (step, int(found["step"])) == (0, 7)


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
    step, found = saved.restore(state(0), iterator)
  assert (step, int(found["step"])) == (2, 2)
  assert next(iterator) == 2
  assert "checkpoint of step 4 cannot be read" in caplog.text
  assert "going back to the checkpoint of step 2" in caplog.text
  assert (folder.parent / "broken-checkpoints-4").is_dir()
  # Its step can be saved again.
  saved.save(4, state(40), iterator, force=True)
  step, found = Checkpoints(folder, every=2).restore(state(0), numbers())
  assert (step, int(found["step"])) == (4, 40)


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
  saved = Checkpoints(tmp_path / "c", every=10, keep=2)
  iterator = numbers()
  for step in (10, 13, 20):
    saved.save(step, state(step), iterator, force=step == 13)
  saved.save(20, state(20), iterator, force=True)  # is there: nothing to do
  saved.close()
  kept = [int(p.name) for p in (tmp_path / "c").iterdir() if p.name.isdigit()]
  assert sorted(kept) == [13, 20]
  assert list(itertools.islice(iterator, 1)) == [0]
