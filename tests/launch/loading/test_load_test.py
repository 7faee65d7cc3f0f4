"""`launch.load_test`: its numbers by hand, and a server that it loads."""

import asyncio
import json
import time

import numpy as np
import pytest
import served
from absl.testing import flagsaver

from launch import cli, load_test
from launch.loading import arrivals, client, page, summary
from launch.loading.client import Timed

pytestmark = pytest.mark.usefixtures("quick_to_compile")

FOUND = [
  Timed(sent=10.0, chunks=[10.5, 11.0, 12.0], ended=12.0, num_tokens=7),
  Timed(sent=11.0, chunks=[12.0], ended=12.0, num_tokens=1),
  Timed(sent=12.0, chunks=[12.1, 14.1], ended=14.1, num_tokens=3),
  Timed(sent=12.0, ended=15.0, error="status 429"),
]


def test_times_by_hand():
  found = summary.summarize(FOUND, ttft=0.7, tpot=0.5)
  assert found["num_finished"] == 3
  assert found["errors"] == {"status 429": 1}
  assert found["seconds"] == 5.0
  assert found["tokens_per_second"] == pytest.approx(11 / 5)
  assert found["ttft_ms"]["p50"] == pytest.approx(500)
  # 1.5 s for six tokens, 2 s for two; one token has no time between.
  assert found["tpot_ms"]["mean"] == pytest.approx((250 + 1000) / 2)
  assert found["itl_ms"]["mean"] == pytest.approx((500 + 1000 + 2000) / 3)
  assert found["e2el_ms"]["p50"] == pytest.approx(2000)
  # The first keeps both, the second comes too late, the third is too slow.
  assert found["attainment"] == 0.25
  assert found["goodput"] == pytest.approx(1 / 5)
  assert summary.summarize(FOUND)["attainment"] == 0.75


def test_acceptance_between_two_readings():
  reading = lambda *values: "".join(
    f"vllm:spec_decode_{name} {value}\n"
    for name, value in zip(
      (
        'num_drafts_total{model_name="m"}',
        'num_draft_tokens_total{model_name="m"}',
        'num_accepted_tokens_total{model_name="m"}',
        'num_accepted_tokens_per_pos_total{model_name="m",position="0"}',
        'num_accepted_tokens_per_pos_total{model_name="m",position="1"}',
      ),
      values,
      strict=True,
    )
  )
  before, after = reading(10, 20, 5, 3, 2), reading(20, 40, 17, 11, 6)
  found = summary.acceptance(before, after)
  assert found == {
    "acceptance": 12 / 20, "block_efficiency": 1 + 12 / 10,
    "by_position": [0.8, 0.4],
  }  # fmt: skip
  assert summary.acceptance(before, before) is None


def test_poisson_arrivals():
  times = arrivals.poisson(4000, 5.0, seed=1)
  gaps = np.diff(times)
  assert times[0] == 0
  assert gaps.mean() == pytest.approx(0.2, rel=0.1)
  assert gaps.std() == pytest.approx(0.2, rel=0.1)
  np.testing.assert_array_equal(times, arrivals.poisson(4000, 5.0, seed=1))


def test_loops_send_as_they_say():
  most, now = [0], [0]

  async def send(body):
    now[0] += 1
    most[0] = max(most[0], now[0])
    await asyncio.sleep(0.01)
    now[0] -= 1
    return Timed(sent=0.0, num_tokens=body["n"])

  bodies = [{"n": i} for i in range(9)]
  found = asyncio.run(arrivals.closed_loop(bodies, 2, send))
  assert most == [2]
  assert sorted(one.num_tokens for one in found) == list(range(9))
  found = asyncio.run(arrivals.open_loop(bodies, [0.0] * 9, send))
  assert most == [9]
  assert [one.num_tokens for one in found] == list(range(9))


@pytest.fixture(scope="module")
def server(quick_to_compile):
  with served.http_service(served.text_slots()) as found:
    yield found


def execute(*args):
  with flagsaver.flagsaver():
    return cli.execute(load_test.run, ["test", *args])


def test_a_server_is_loaded_and_what_was_found_is_written(
  server, tmp_path, capsys
):
  output = tmp_path / "L.json"
  code = execute(
    f"--url={server[1]}", "--rates=50", "--clients=2", "--num_requests=6",
    "--max_tokens=20", "--tpot_ms=1000", f"--output={output}",
  )  # fmt: skip
  assert code == 0, capsys.readouterr().err
  result = json.loads(output.read_text())
  by_rate, by_clients = result["runs"]
  assert (by_rate["rate"], by_clients["clients"]) == (50, 2)
  for run in result["runs"]:
    assert run["num_finished"] == run["num_requests"] == 6
    assert run["attainment"] == 1.0
    assert 0 < run["acceptance"]["acceptance"] < 1
    assert len(run["acceptance"]["by_position"]) == 3
    assert run["ttft_ms"]["p50"] <= run["e2el_ms"]["p50"]
  # Greedy answers to the same six requests, whatever the load.
  assert by_rate["num_tokens"] == by_clients["num_tokens"] > 6
  assert (
    "launch.load_test" in result["provenance"]["command"]
    or (result["provenance"]["command"])
  )
  text = (tmp_path / "L.md").read_text()
  assert page.table({"L": result}) in text
  assert (tmp_path / "L.svg").read_text().startswith("<?xml")


def test_answers_that_fail_are_counted(server, capsys):
  assert execute(
    f"--url={server[1]}", "--clients=1", "--num_requests=2",
    "--max_tokens=100000",
  ) == 1  # fmt: skip
  assert "2 requests were not answered" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("args", "message"),
  [
    ([], "give --rates or --clients"),
    (["--rates=0"], "--rates must be numbers above 0"),
    (["--clients=x"], "--clients must be numbers above 0"),
    (["--clients=1", "--send_objective"], "sends --tpot_ms"),
    (["--clients=1"], "http://127.0.0.1:1/health"),
  ],
)
def test_mistakes_are_one_line(args, message, capsys):
  assert execute("--url=http://127.0.0.1:1", *args) == 2
  error = capsys.readouterr().err
  assert message in error
  assert error.count("\n") == 1


def test_a_stream_that_breaks_off_is_no_answer(server):
  """Also one whose error comes in the middle."""
  body = {"prompt": "x", "max_tokens": 5}
  good = asyncio.run(client.ask(server[1], "/v1/completions", body))
  assert good.error is None
  assert good.num_tokens == 5
  assert good.sent <= good.chunks[0] <= good.ended

  async def broken():
    async def half(reader, writer):
      await reader.read(100)
      writer.write(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
        b'data: {"choices": [{"text": "a"}]}\n\n'
      )
      writer.close()

    server = await asyncio.start_server(half, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    found = await client.ask(f"http://127.0.0.1:{port}", "/", body)
    server.close()
    return found

  found = asyncio.run(broken())
  assert "ended before" in found.error
  assert len(found.chunks) == 1


def test_a_client_that_lags_is_no_excuse():
  """Requests of an open loop count from when they were to be sent."""

  async def busy(body):
    sent = client.Timed(sent=time.monotonic())
    time.sleep(0.03)  # nothing else is sent meanwhile
    return sent

  found = asyncio.run(arrivals.open_loop([{}] * 4, [0.0] * 4, busy))
  assert len({timed.sent for timed in found}) == 1
