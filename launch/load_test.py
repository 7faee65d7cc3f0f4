r"""What a server does under load: times, goodput and acceptance.

  python -m launch.load_test --url=http://127.0.0.1:8000 --rates=0.5,1,2 \
    --num_requests=64 --output=L.json
  python -m launch.load_test --url=http://127.0.0.1:8000 --clients=1,2,4,8 \
    --prompts=IN.jsonl --max_tokens=128 --tpot_ms=60 --output=L.json

--rates are open loops (Poisson arrivals, so many requests a second, whatever
becomes of them), --clients closed ones (each asks again as soon as it is
answered): different experiments. Lines of IN.jsonl are {"prompt": ...} or
{"messages": [...]} with whatever else /v1/completions takes; by default they
are the built-in code prompts. Requests are sent in an order and at times that
follow from --seed. --tpot_ms and --ttft_ms are objectives that answers are
judged by; --send_objective asks the server to keep the first
(slo_ms_per_token). L.json has one run a load; L.md and L.svg show it.

The token is $SPECJAX_API_KEY, if the server asks for one. Nothing else should
run beside: client and server share the machine if they are on one.
"""

import asyncio
import json
import os
import pathlib
import sys
import urllib.error
import urllib.request
from typing import Any

import numpy as np
from absl import flags

from launch import (
  cli,
  figures,
  jsonl,
  prompts,
  provenance,
  results,
  terminal,
)
from launch.loading import arrivals, client, page, summary

cli.reads(cli.PROMPTS, cli.OUTPUT, cli.SEED)
_URL = flags.DEFINE_string("url", None, "The server, http://HOST:PORT.")
_RATES = flags.DEFINE_list("rates", None, "Requests a second, each a run.")
_CLIENTS = flags.DEFINE_list("clients", None, "Clients, each number a run.")
_REQUESTS = flags.DEFINE_integer(
  "num_requests", 64, "Requests of a run.", lower_bound=1
)
_TOKENS = flags.DEFINE_integer(
  "max_tokens", 64, "Tokens of an answer, where a line does not say.",
  lower_bound=1,
)  # fmt: skip
_TEMPERATURE = flags.DEFINE_float(
  "temperature", 0.0, "Where a line does not say.", lower_bound=0.0
)
_TTFT = flags.DEFINE_float(
  "ttft_ms", None, "Objective: milliseconds to the first token.",
  lower_bound=0.0,
)  # fmt: skip
_TPOT = flags.DEFINE_float(
  "tpot_ms", None, "Objective: milliseconds a token after it.", lower_bound=0.0
)
_SEND = flags.DEFINE_bool(
  "send_objective", False, "Ask the server to keep --tpot_ms."
)


def bodies() -> list[dict[str, Any]]:
  """The requests of a run, in their order."""
  lines: list[dict[str, Any]] = [{"prompt": x} for x in prompts.BUILT_IN]
  if cli.PROMPTS.value:
    lines = [line for _, line in jsonl.read(cli.PROMPTS.value)]
  if not lines or not all(
    isinstance(x, dict) and ("prompt" in x or "messages" in x) for x in lines
  ):
    raise cli.UserError(
      f'{cli.PROMPTS.value}: lines must be {{"prompt": ...}} or '
      '{"messages": [...]}'
    )
  usual: dict[str, Any] = {
    "max_tokens": _TOKENS.value,
    "temperature": _TEMPERATURE.value,
  }
  if _SEND.value:
    if _TPOT.value is None:
      raise cli.UserError("--send_objective sends --tpot_ms: give it")
    usual["slo_ms_per_token"] = _TPOT.value
  order = np.random.default_rng(cli.SEED.value or 0).integers(
    len(lines), size=_REQUESTS.value
  )
  return [
    {k: v for k, v in {**usual, **lines[i]}.items() if k != "id"}
    for i in order.tolist()
  ]


def numbers(flag: flags.FlagHolder, kind: type) -> list:
  """The positive numbers of a list flag."""
  try:
    found = [kind(text) for text in flag.value or ()]
  except ValueError:
    found = [0]
  if any(not 0 < x < 1e6 for x in found):
    raise cli.UserError(
      f"--{flag.name} must be numbers above 0, got {','.join(flag.value)!r}"
    )
  return found


def read(path: str) -> str:
  """What the server says at a path.

  Raises:
    UserError: if it says nothing.
  """
  if not _URL.value.startswith(("http://", "https://")):
    raise cli.UserError(
      f"--url must be http://... or https://..., got {_URL.value!r}"
    )
  try:
    with urllib.request.urlopen(_URL.value + path, timeout=30) as answer:
      return answer.read().decode()
  except (urllib.error.URLError, OSError, ValueError) as error:
    raise cli.UserError(f"{_URL.value}{path}: {error}") from None


def measure(
  asked: list[dict[str, Any]], rate: float | None, clients: int | None
) -> dict[str, Any]:
  """One run."""
  token = os.environ.get("SPECJAX_API_KEY") or None

  async def send(body: dict[str, Any]) -> client.Timed:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return await client.ask(_URL.value, path, body, token=token)

  before = read("/metrics")
  if rate is not None:
    times = arrivals.poisson(len(asked), rate, cli.SEED.value or 0)
    found = asyncio.run(arrivals.open_loop(asked, times.tolist(), send))
  else:
    assert clients is not None
    found = asyncio.run(arrivals.closed_loop(asked, clients, send))
  return {
    "rate": rate,
    "clients": clients,
    **summary.summarize(found, ttft=_seconds(_TTFT), tpot=_seconds(_TPOT)),
    "acceptance": summary.acceptance(before, read("/metrics")),
  }


def _seconds(flag: flags.FlagHolder) -> float | None:
  return None if flag.value is None else flag.value / 1000


def run(_) -> int:
  """The command."""
  rates, clients = numbers(_RATES, float), numbers(_CLIENTS, int)
  if not rates and not clients:
    raise cli.UserError("give --rates or --clients")
  output = cli.OUTPUT.value
  stem = pathlib.Path(output).with_suffix("") if output else None
  drawn = {}
  if stem:
    drawn = {"the page": f"{stem}.md", "the figure": f"{stem}.svg"}
  results.check({"--output": output}, drawn=drawn)
  asked = bodies()
  read("/health")
  result: dict[str, Any] = {
    "settings": {
      "num_requests": len(asked),
      "ttft": _seconds(_TTFT),
      "tpot": _seconds(_TPOT),
      "sends_objective": _SEND.value,
    },
    "server": json.loads(read("/live")),
    "runs": [],
    **provenance.record(models={}, prompts=cli.PROMPTS.value, texts=[]),
  }
  for rate, count in (
    *((rate, None) for rate in rates),
    *((None, count) for count in clients),
  ):
    result["runs"].append(measure(asked, rate, count))
    print(page.label(result["runs"][-1]), file=sys.stderr, flush=True)
  if stem:
    results.write_json(output, result)
    figures.save(lambda: page.figure(result), f"{stem}.svg")
    results.write(
      f"{stem}.md", page.text(result, stem.name, f"{stem.name}.svg")
    )
  terminal.console().print(
    page.table({output or "load": result}), soft_wrap=True, markup=False
  )
  failed = sum(r["num_requests"] - r["num_finished"] for r in result["runs"])
  if failed:
    return cli.fail(f"{failed} requests were not answered", 1)
  return 0


if __name__ == "__main__":
  cli.run(run, required=("url",))
