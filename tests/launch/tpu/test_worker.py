"""Scripts of the workers, with fakes of Python, gcloud and the metadata."""

import pathlib
import shutil

import pytest

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


def test_install_takes_the_pinned_versions(machine, checkout):
  done = _worker(machine, checkout, "install")
  assert done.returncode == 0, done.stderr
  (call,) = _mains(machine)
  assert call[:2] == ["pip", "install"]
  assert call[-4:] == ["-c", "requirements.lock", "-e", ".[experiments,tpu]"]


def test_install_makes_an_environment_with_a_python_that_suits(
  machine, checkout
):
  shutil.rmtree(checkout / ".venv")
  done = _worker(machine, checkout, "install")
  assert done.returncode != 0  # the fake makes none
  made = [call for call in machine.calls() if "venv" in call]
  assert made == [["python3", "-m", "venv", "--clear", ".venv"]]


def test_run_passes_arguments_on_and_keeps_a_log(machine, checkout):
  machine.answer(launch=["tokens"])
  words = ["decode", "--config=c", "a b", "it's", ""]
  done = _worker(machine, checkout, "run", *words)
  assert done.returncode == 0, done.stderr
  assert _mains(machine) == [["launch.decode", *words[1:]]]
  assert done.stdout == "tokens\n"
  assert (checkout / "results" / "run.log").read_text() == "tokens\n"


def test_run_fails_as_its_main_does(machine, checkout):
  machine.answer(launch=[3])
  done = _worker(machine, checkout, "run", "decode")
  assert done.returncode == 3
  assert "fake failure" in (checkout / "results" / "run.log").read_text()


_STORE = "gs://b/my-tpu"


def _storage(machine):
  return [
    call[2:] for call in machine.calls() if call[:2] == ["gcloud", "storage"]
  ]


def test_a_job_fetches_runs_again_and_saves(machine, checkout):
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


def test_a_mistake_in_the_command_is_not_tried_again(machine, checkout):
  machine.answer(**{"curl": ["0"], "launch.decode": [2]})
  done = _worker(machine, checkout, "job", _STORE, "", "decode")
  assert done.returncode == 2
  assert len(_mains(machine)) == 2  # pip, and decode once
  assert ["cp", "-", f"{_STORE}/exit_code", "2\n"] in _storage(machine)


def test_a_job_that_always_dies_is_given_up(machine, checkout):
  machine.answer(**{"curl": ["0"], "launch.decode": [134]})
  done = _worker(machine, checkout, "job", _STORE, "", "decode", TRIES="3")
  assert done.returncode == 134
  assert len(_mains(machine)) == 4
  assert ["cp", "-", f"{_STORE}/exit_code", "134\n"] in _storage(machine)


def test_a_training_that_was_stopped_goes_on_and_is_not_over(machine, checkout):
  machine.answer(**{"curl": ["0"], "launch.train": [75, 75, ""]})
  done = _worker(machine, checkout, "job", _STORE, "", "train", TRIES="1")
  assert done.returncode == 0, done.stderr
  assert _mains(machine)[1:] == [["launch.train"]] * 3
  codes = [call for call in _storage(machine) if call[0] == "cp"]
  assert codes == [["cp", "-", f"{_STORE}/exit_code", "0\n"]]


@pytest.mark.parametrize(
  "fails", ["pip install", "gs://data", "my-tpu/results results"]
)
def test_a_job_that_cannot_be_prepared_leaves_an_exit_code(
  machine, checkout, fails
):
  """Or nobody would delete the slice."""
  machine.answer(**{"curl": ["0"], fails: [1]})
  done = _worker(
    machine, checkout, "job", _STORE, "gs://data", "decode", TRIES="2"
  )
  assert done.returncode == 1
  assert [call[:2] for call in _mains(machine)] == [["pip", "install"]] * 2
  assert _storage(machine)[-1] == ["cp", "-", f"{_STORE}/exit_code", "1\n"]


def test_a_preparation_is_tried_again_and_the_exit_code_too(machine, checkout):
  machine.answer(**{"curl": ["0"], "pip install": [1, ""], "cp -": [1, ""]})
  done = _worker(machine, checkout, "job", _STORE, "", "decode")
  assert done.returncode == 0, done.stderr
  assert _mains(machine)[2:] == [["launch.decode"]]
  copies = [call for call in _storage(machine) if call[0] == "cp"]
  assert copies == [["cp", "-", f"{_STORE}/exit_code", "0\n"]] * 2


def test_the_first_start_has_nothing_to_fetch(machine, checkout):
  machine.answer(**{"curl": ["0"], "storage ls": [404]})
  assert _worker(machine, checkout, "job", _STORE, "", "decode").returncode == 0
  assert ["rsync", "--recursive", f"{_STORE}/results", "results"] not in (
    _storage(machine)
  )


def test_only_worker_0_saves(machine, checkout):
  machine.answer(curl=["3"])
  done = _worker(machine, checkout, "job", _STORE, "", "decode")
  assert done.returncode == 0, done.stderr
  assert _storage(machine) == []
  assert len(_mains(machine)) == 2
