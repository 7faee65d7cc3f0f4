"""`launch.serve` as a command: alone, and as two processes of one model."""

import signal
from concurrent import futures

import pytest
import server_process

ASKED = [
  dict(prompt=prompt, max_tokens=12, **settings)
  for prompt in ("def main(", "import os\n")
  for settings in (
    dict(temperature=0),
    dict(temperature=0.8, seed=1),
    dict(temperature=1, seed=2, top_k=40, n=2),
  )
]


def serving(pair, count, *more):
  target, draft = pair
  return server_process.serving(
    "--port=0", "--max_prompt=32",
    f"--config=configs/huggingface.py:target={target},draft={draft}",
    "--config.drafter=model(tokens=2)", "--config.max_new_tokens=200", *more,
    count=count,
  )  # fmt: skip


def ask_all(server):
  with futures.ThreadPoolExecutor(len(ASKED)) as pool:
    return list(pool.map(server.ask, ASKED))


@pytest.fixture(scope="module")
def alone(pair):
  """The answers of one process; told to end, it ends well."""
  with serving(pair, 1, "--slots=2") as server:
    actual = ask_all(server)
    again = server.ask(ASKED[1])
    server.processes[0].send_signal(signal.SIGTERM)
    codes, said = server.ended()
  assert again == actual[1]
  return actual, codes, said


def test_a_server_that_is_told_to_end_ends_well(alone):
  actual, codes, said = alone
  assert codes == [0], said
  assert len({text for texts in actual for text in texts}) > 4
  assert "Traceback" not in said[0]


def test_two_processes_answer_as_one_does(alone, pair):
  """Each holds two of four slots; both end when the leader is told to."""
  mesh = ("--slots=4", "--config.mesh=data:2,model:1")
  with serving(pair, 2, *mesh) as server:
    assert ask_all(server) == alone[0]
    server.processes[0].send_signal(signal.SIGTERM)
    codes, said = server.ended()
  assert codes == [0, 0], said
  assert "serving" in said[0]
  assert "serving" not in said[1]
