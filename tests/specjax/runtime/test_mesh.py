"""The loop on a mesh gives the tokens of one device.

`mesh_decoding` decodes on 8 simulated devices, in one process and in
two, and alone on one.
"""

import dataclasses
import json
import os
import sys

import jax
import mesh_decoding
import numpy as np
import pytest
import several
from jax.sharding import PartitionSpec as P

from specjax import cache as cache_lib
from specjax.runtime.mesh import MeshDecoder

# Each way to lay out a draft, a draft with an axis of its own, and each kind of
# state: cut, shared, counted over all rows, with rows along another axis, made
# of inputs. Key/value heads are fewer than 'model' in 1x8 and 2x4.
USUAL = (
  "paths:2x2x2", "depth:2x4", "eagle3:4x2", "tables:8x1", "shared:8x1",
  "counted:8x1", "inputs:8x1",
)  # fmt: skip
# All other ways to draft, and the other factorizations of eight devices.
MORE = (
  "paths:1x8", "layer_skip:2x4", "ngram:2x4", "plain:8x1", "eagle3:2x2x2",
  "eagle2:1x8", "medusa:4x2", "dflash:2x4", "dflash2:2x4", "dspark:2x4",
  "mtp:2x4", "t5:2x4", "mixture:2x4", "lookahead:8x1", "ladder:8x1",
)  # fmt: skip
# Models that are cut across both processes, and rows that are.
ON_TWO_PROCESSES = (
  "paths:1x8", "tables:8x1", "counted:8x1", "inputs:8x1", "eagle3:1x8",
  "t5:2x4", "mixture:1x8",
)  # fmt: skip
# Layers of several kinds, cut over both.
FAMILIES = tuple(f"{x}:1x8" for x in mesh_decoding.FAMILIES)


def decoded(folder, runs, *, processes, devices):
  """Output of the program, run by several processes of some devices each."""
  output = folder / "decoded.json"
  command = [mesh_decoding.__file__, output, *runs]
  for code, _, errors in several.finish(
    several.start(
      [command] * processes,
      devices=devices,
      PYTHONPATH=os.pathsep.join(sys.path),
    ),
    patience=600,
  ):
    assert code == 0, errors[-3000:]
  return json.loads(output.read_text())


def cases_of(runs):
  return sorted({run.partition(":")[0] for run in runs})


def in_one_process(folder, runs):
  """Cases on one device without a mesh, and on meshes, in float64."""
  alone = (f"{case}:alone" for case in cases_of(runs))
  return decoded(folder, (*alone, *runs), processes=1, devices=8)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
  return in_one_process(tmp_path_factory.mktemp("one"), USUAL)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
  folder = tmp_path_factory.mktemp("two")
  return decoded(folder, ON_TWO_PROCESSES, processes=2, devices=4)


@pytest.fixture(scope="module")
def alone(one_process, tmp_path_factory):
  """Without a mesh, what two processes decode."""
  missing = (
    f"{case}:alone"
    for case in cases_of(ON_TWO_PROCESSES)
    if f"{case}:alone" not in one_process
  )
  folder = tmp_path_factory.mktemp("alone")
  return one_process | decoded(folder, missing, processes=1, devices=8)


def on_one_device(actual, run):
  """Result of the case of a run without a mesh."""
  return actual[f"{run.partition(':')[0]}:alone"]


@pytest.mark.parametrize("run", USUAL)
def test_eight_devices_match_one_device(one_process, run):
  assert one_process[run] == on_one_device(one_process, run)


def assert_some_are_accepted(actual):
  accepted = np.array(actual["num_accepted"])
  assert 0 < accepted.sum() < 2 * 8 * actual["num_steps"]


@pytest.mark.slow  # a process each: together they take minutes
@pytest.mark.parametrize("run", MORE)
def test_eight_devices_match_one_device_for_every_drafter(tmp_path, run):
  actual = in_one_process(tmp_path, [run])
  assert actual[run] == on_one_device(actual, run)
  if run != "plain:8x1":
    assert_some_are_accepted(actual[run])


@pytest.mark.slow  # one run for all
@pytest.mark.parametrize("run", ON_TWO_PROCESSES)
def test_two_processes_match_one_device(two_processes, alone, run):
  assert two_processes[run] == on_one_device(alone, run)


@pytest.mark.slow  # three processes each
@pytest.mark.parametrize("run", FAMILIES)
def test_two_processes_match_one_device_for_each_family(tmp_path, run):
  actual = decoded(tmp_path, [run], processes=2, devices=4)
  case = run.partition(":")[0]
  actual |= decoded(tmp_path, [f"{case}:alone"], processes=1, devices=1)
  assert actual[run] == on_one_device(actual, run)
  assert_some_are_accepted(actual[run])


@pytest.mark.parametrize("case", cases_of(USUAL))
def test_cases_accept_some_tokens_and_reject_others(one_process, case):
  assert_some_are_accepted(one_process[f"{case}:alone"])


def test_every_mesh_case_is_covered():
  assert {*cases_of(USUAL + MORE + FAMILIES)} == {*mesh_decoding.CASES}


def one_device_mesh(axis="data"):
  auto = (jax.sharding.AxisType.Auto,)
  return jax.make_mesh((1,), (axis,), axis_types=auto)


def begun(decoder, params):
  """A state's shapes."""
  return jax.eval_shape(
    lambda: decoder.init(
      params, mesh_decoding.PROMPTS, mesh_decoding.LENGTHS, jax.random.key(5),
      buffer_length=32, max_new_tokens=2,
    )
  )  # fmt: skip


def test_mesh_admit_validates_requests():
  decoder, params = mesh_decoding.table_pair(None)
  state = begun(decoder, params)
  mapped = MeshDecoder.of(decoder, mesh=one_device_mesh())
  ask = lambda length, budget: mapped.admit(
    params, state, 0, mesh_decoding.PROMPTS[0], length, jax.random.key(1),
    max_new_tokens=budget,
  )  # fmt: skip
  with pytest.raises(ValueError, match="lengths must be in"):
    ask(0, 1)
  with pytest.raises(ValueError, match="must fit into buffer_length"):
    ask(7, 30)


def test_drafter_declares_row_axes_of_its_state():
  decoder, params = mesh_decoding.shared_pair(None)
  state = begun(decoder, params)

  def specs(**changes):
    drafter = dataclasses.replace(decoder.drafter, **changes)
    changed = dataclasses.replace(decoder, drafter=drafter)
    mapped = MeshDecoder.of(changed, mesh=one_device_mesh())
    return mapped.specs(state).drafter_state

  assert specs() == {"table": P(), "done": P(None, "data")}
  silent = cache_lib.row_axes  # what a drafter has that says nothing
  with pytest.raises(ValueError, match=r"known only for a Cache.*\(2, 8\)"):
    specs(row_axes=silent)
  with pytest.raises(ValueError, match=r"axis 0 must be the 8 rows.*'shared'"):
    specs(row_axes=lambda state: {"table": None, "done": 0})
