"""Scripts of the workers, with fakes of Python, gcloud and the metadata."""

import pathlib
import shutil

import pytest

pytestmark = pytest.mark.slow
WORKER = pathlib.Path(__file__).parents[3] / "launch" / "tpu" / "worker.sh"


@pytest.fixture
def checkout(machine):
  """A checkout on a worker whose .venv is there already."""
  folder = machine.folder / "specjax"
  (folder / "launch" / "tpu").mkdir(parents=True)
  shutil.copy(WORKER, folder / "launch" / "tpu")
  machine.fake("python3")
  machine.fake("curl")
  (folder / ".venv" / "bin").mkdir(parents=True)
  shutil.copy(
    machine.folder / "bin" / "python3", folder / ".venv" / "bin" / "python"
  )
  return folder


def _worker(machine, checkout, *args, **environment):
  return machine.run(
    checkout / "launch" / "tpu" / "worker.sh", *args,
    cwd=machine.folder, PAUSE="0.05", **environment,
  )  # fmt: skip


def _mains(machine):
  return [call[2:] for call in machine.calls() if call[:2] == ["python", "-m"]]


_STORE = "gs://b/my-tpu"


def _storage(machine):
  return [
    call[2:] for call in machine.calls() if call[:2] == ["gcloud", "storage"]
  ]


def test_job_fetches_data_retries_and_saves_results(machine, checkout):
  machine.answer(**{"curl": ["0"], "launch.decode": [134, ""]})
  done = _worker(
    machine, checkout, "job", _STORE, "gs://data", "decode", "--output=a b"
  )
  assert done.returncode == 0, done.stderr
  assert _mains(machine)[1:] == [["launch.decode", "--output=a b"]] * 2
  storage = _storage(machine)
  assert storage[:3] == [
    ["rsync", "--recursive", "gs://data", "data"],
    ["ls", f"{_STORE}/results/"],
    ["rsync", "--recursive", f"{_STORE}/results", "results"],
  ]
  assert ["rsync", "--recursive", "results", f"{_STORE}/results"] in storage
  assert ["cp", "-", f"{_STORE}/exit_code", "0\n"] in storage


def test_usage_errors_are_not_retried(machine, checkout):
  machine.answer(**{"curl": ["0"], "launch.decode": [2]})
  done = _worker(machine, checkout, "job", _STORE, "", "decode")
  assert done.returncode == 2
  assert len(_mains(machine)) == 2  # pip, and decode once
  assert ["cp", "-", f"{_STORE}/exit_code", "2\n"] in _storage(machine)


def test_preempted_training_is_resumed_until_it_finishes(machine, checkout):
  machine.answer(**{"curl": ["0"], "launch.train": [75, 75, ""]})
  done = _worker(machine, checkout, "job", _STORE, "", "train", TRIES="1")
  assert done.returncode == 0, done.stderr
  assert _mains(machine)[1:] == [["launch.train"]] * 3
  codes = [call for call in _storage(machine) if call[0] == "cp"]
  assert codes == [["cp", "-", f"{_STORE}/exit_code", "0\n"]]
