"""CPU seconds of tests, their subprocesses included."""

import resource

import pytest


def add_option(parser) -> None:
  parser.addoption(
    "--dearest",
    type=int,
    default=0,
    metavar="N",
    help="print the N tests and files that took the most CPU seconds",
  )


def configure(config) -> None:
  config.pluginmanager.register(_Plugin(config), "CPU seconds")


def cpu_seconds() -> float:
  used = map(
    resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
  )
  return sum(one.ru_utime + one.ru_stime for one in used)


class _Plugin:
  def __init__(self, config):
    self.config, self.seconds_of = config, {}

  @pytest.hookimpl(wrapper=True)
  def pytest_runtest_protocol(self, item):
    self.start = cpu_seconds()
    return (yield)

  @pytest.hookimpl(wrapper=True)
  def pytest_runtest_makereport(self, item, call):
    if call.when == "teardown":
      spent = cpu_seconds() - self.start
      item.user_properties.append(("cpu_seconds", spent))
    return (yield)

  def pytest_runtest_logreport(self, report):
    """In the controller: the last report of a test carries its seconds."""
    if seconds := dict(report.user_properties).get("cpu_seconds"):
      self.seconds_of[report.nodeid] = seconds

  def pytest_terminal_summary(self, terminalreporter):
    line = terminalreporter.write_line
    line(f"tests took {sum(self.seconds_of.values()) / 60:.1f} CPU minutes")
    count = self.config.getoption("dearest")
    files = {}
    for name, seconds in self.seconds_of.items():
      file = name.partition("::")[0]
      files[file] = files.get(file, 0) + seconds
    for title, seconds_of in (("files", files), ("tests", self.seconds_of)):
      if count:
        line(f"the dearest {title}, in CPU seconds:")
      for name in sorted(seconds_of, key=seconds_of.get, reverse=True)[:count]:
        line(f"{seconds_of[name]:7.1f} {name}")
