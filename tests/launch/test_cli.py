"""`launch.cli`: flags that are read and no others, help, and honest errors."""

import importlib
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from launch import cli, processes
from specjax import rules

_ROOT = pathlib.Path(__file__).parents[2]
_SOURCES = {
  ".".join(path.relative_to(_ROOT).with_suffix("").parts): path.read_text()
  for path in sorted((_ROOT / "launch").rglob("*.py"))
}
_RUNS = re.compile(r"^  cli\.run\(", re.MULTILINE)
COMMANDS = [name for name, text in _SOURCES.items() if _RUNS.search(text)]


def execute(command, *args):
  with flagsaver.flagsaver():
    return cli.execute(command, ["test", *args])


def command_of(name):
  for other in COMMANDS:  # one process with the flags of all
    importlib.import_module(other)
  return importlib.import_module(name).run


def own_flags():
  return {
    flag.name: flag
    for module, defined in flags.FLAGS.flags_by_module_dict().items()
    if module.startswith("launch.")
    for flag in defined
  }


def read_by(command):
  return {
    f.name for f in flags.FLAGS.get_key_flags_for_module(command.__module__)
  }


def test_all_commands_are_found():
  assert len(COMMANDS) == 37
  assert {"launch.decode", "launch.tools.machine_tasks"} < {*COMMANDS}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_flag_that_a_command_does_not_read_is_refused(name, capsys):
  command = command_of(name)
  others = own_flags().keys() - read_by(command)
  assert len(others) > 20
  for other in sorted(others):
    for written in (f"--{other}=1", f"-{other}", f"--no{other}"):
      assert execute(command, written) == 2
      error = capsys.readouterr().err
      assert error.count("\n") == 1
      assert f"does not read {written.partition('=')[0]};" in error


@pytest.mark.parametrize("name", COMMANDS)
def test_help_lists_what_a_command_reads_and_nothing_else(name, capsys):
  command = command_of(name)
  with pytest.raises(SystemExit) as end:
    execute(command, "--help")
  assert end.value.code == 0
  shown = capsys.readouterr().out
  assert f"python -m {name.removesuffix('.__main__')} " in shown
  listed = set(re.findall(r"^ +--(?:\[no\])?(\w+):", shown, re.M))
  assert listed == read_by(command)


@pytest.mark.parametrize("name", COMMANDS)
def test_what_a_command_declares_it_reads(name):
  command_of(name)
  declared = re.search(r"^cli\.reads\((.*?)\)", _SOURCES[name], re.M | re.S)
  names = set(re.findall(r"cli\.([A-Z_]+)", declared[1]))
  rest = _SOURCES[name].replace(declared[0], "")
  assert names == set(re.findall(r"cli\.([A-Z_]+)\b", rest)) - {"UNFINISHED"}
  several = "*processes.FLAGS" in declared[1]
  assert several == ("several_processes=True" in rest)
  assert processes.DISTRIBUTED.name in read_by(command_of(name))


def test_help_shows_the_settings_of_the_config_that_is_named(capsys):
  with pytest.raises(SystemExit):
    execute(
      command_of("launch.decode"), "--help", "--config=configs/embedded.py",
      "--config.temperature=0.5",
    )  # fmt: skip
  shown = capsys.readouterr().out
  assert "settings of configs/embedded.py" in shown
  assert "\n  drafter='model(tokens=6)'\n" in shown
  assert "\n  temperature=0.5\n" in shown
  with pytest.raises(SystemExit):
    execute(
      command_of("launch.train"), "--config=configs/train_embedded.py:tiny",
      "--help",
    )  # fmt: skip
  assert "\n  model.embed_dim=32\n" in capsys.readouterr().out
  assert execute(command_of("launch.decode"), "--help", "--config=no.py") == 2
  assert "no.py" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("name", "given", "message"),
  [
    ("theory", ["--chain=c.npz", "--workdir=w"],
     "--workdir: not read with --chain"),
    ("theory", ["--figure=all", "--workdir=w", "--num_drafts=2", "--seed=1"],
     "--num_drafts, --seed: not read with --figure"),
    ("rules", ["--target=1", "--draft=1", "--max_contexts=3"],
     "--max_contexts: not read with two laws"),
  ],
)  # fmt: skip
def test_a_flag_of_another_mode_is_refused(name, given, message, capsys):
  assert execute(command_of(f"launch.studies.{name}.__main__"), *given) == 2
  assert message in capsys.readouterr().err


def test_consoles_are_made_in_one_place():
  """Elsewhere one would write past `launch.terminal`, or be shown by it."""
  for name, text in _SOURCES.items():
    assert (name == "launch.terminal") == ("Console(" in text), name


# ------------------------------------------------------------------ the errors


def own_check():
  rules.get("nonsense")


def no_such_file():
  pathlib.Path("/nowhere/at/all").read_text()


def somebodys_rule():
  raise ValueError("my rule expected two tokens")


def a_check_while_a_program_is_traced():
  jax.jit(lambda x: (rules.get("nonsense"), x)[1])(1.0)


def jax_itself():
  jax.jit(lambda x: jnp.broadcast_to(x, 3))(np.ones(2))


@pytest.mark.parametrize("act", [own_check, no_such_file])
def test_a_users_mistake_is_one_line(act, capsys):
  assert execute(lambda _: act()) == 2
  error = capsys.readouterr().err
  assert error.startswith("error: ")
  assert error.count("\n") == 1


@pytest.mark.parametrize(
  "act", [somebodys_rule, a_check_while_a_program_is_traced, jax_itself]
)
def test_everything_else_keeps_its_traceback(act):
  with pytest.raises(ValueError):  # noqa: PT011
    execute(lambda _: act())
