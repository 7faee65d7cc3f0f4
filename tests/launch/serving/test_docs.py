"""docs/serving.md: its lines work as they are printed."""

import json
import pathlib
import re
import shlex
import signal
import subprocess

import pytest
import served
import server_process
from absl import flags

from launch import serve
from launch.serving import schemas

_ROOT = pathlib.Path(__file__).parents[3]
_PAGE = (_ROOT / "docs" / "serving.md").read_text("utf-8")


@pytest.fixture(scope="module")
def address():
  with served.http_service(served.text_slots()) as (_, actual):
    yield actual


def lines():
  (block,) = re.findall(r"```bash\n(.*?)```", _PAGE, re.DOTALL)
  return block.strip().split("\n\n")


def check_curl_lines(address):
  actual = lines()
  assert len(actual) == 6
  for line in actual:
    assert "localhost:8000" in line
    line = line.replace("http://localhost:8000", address)
    line = line.replace("localhost:8000", address)
    done = subprocess.run(
      ["bash", "-c", line.replace("curl ", "curl -sS --fail ", 1)],
      capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, (line, done.stderr, done.stdout)
    if "metrics" in line:
      assert "vllm:spec_decode_num_drafts_total" in done.stdout
    elif "stream" in line:
      events = done.stdout.strip().split("\n\n")
      assert events[-1] == "data: [DONE]"
      usage = json.loads(events[-2].removeprefix("data: "))["usage"]
      assert 0 < usage["completion_tokens"] <= 48
    else:
      answer = json.loads(done.stdout)
      assert answer.keys() & {"choices", "data", "status"}
      if '"n": 2' in line:
        assert len(answer["choices"]) == 4


def test_curl_lines_are_answered(address):
  """As printed, but for the port."""
  check_curl_lines(address)


@pytest.mark.slow
def test_the_pair_that_comes_with_the_code_is_served_as_printed():
  """The line that starts it, but for the port, and then all others."""
  (line,) = re.findall(
    r"    python -m launch\.serve (--config=configs/embedded\.py \\\n.*)", _PAGE
  )
  command = shlex.split(line.replace("\\\n", " "))
  with server_process.serving(*command, "--port=0", "--slots=2") as server:
    check_curl_lines(server.address)
    server.processes[0].send_signal(signal.SIGTERM)
    codes, said = server.ended()
  assert codes == [0], said


def test_the_page_names_what_the_server_has():
  """Every metric and field, and no flag that the command does not read."""
  fields = schemas.Completion.model_fields | schemas.Chat.model_fields
  for name in fields:
    if name != "model":
      assert f"`{name}`" in _PAGE or f"`{name}." in _PAGE, name
  read = {
    flag.name for flag in flags.FLAGS.get_key_flags_for_module(serve.__name__)
  }
  ours = "".join(
    re.split(r"## Clients\n.*?\n(?=## Several)", _PAGE, flags=re.DOTALL)
  )
  named = set(re.findall(r"--(\w+)", ours)) - {"config"}
  assert named <= read
  assert len(named) > 8
