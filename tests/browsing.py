"""The page of `launch.serve` in Chromium, as a user sees it.

Tests that import this are skipped where there is no `pip install -e
'.[browser]'`, or no Chromium or Chrome of this machine.
"""

import contextlib
import http.client
import json
import re
import shutil
import urllib.request

import pytest
import server_process
import several

_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, _NAMES)), None)
if CHROMIUM is None:
  pytest.skip("there is no Chromium", allow_module_level=True)
sync_api = pytest.importorskip(
  "playwright.sync_api", reason="no playwright: pip install -e '.[browser]'"
)
expect = sync_api.expect

PATIENCE = 120_000  # milliseconds, for what a user waits for
SLOTS, LONG = 2, 600  # of the server, and tokens of its longest answer
FLAGS = (
  "--config=configs/embedded.py", "--chat_template=configs/as_comments.jinja",
  f"--slots={SLOTS}", "--max_prompt=256", f"--config.max_new_tokens={LONG}",
)  # fmt: skip
PAIR = "target · model · token"  # what the page says of it
TALK = "a function that reads a file"  # its answer has tokens of every origin


def serving(port=0):
  """A server of the embedded pair, which has a whole file's time."""
  return server_process.serving(
    *FLAGS, f"--port={port}", patience=3 * several.PATIENCE
  )


@contextlib.contextmanager
def chromium():
  """The browser, which draws on no screen."""
  expect.set_options(timeout=PATIENCE)
  with sync_api.sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=CHROMIUM)
    yield browser
    browser.close()


@contextlib.contextmanager
def window(browser, address, **options):
  """A page that was opened, of a server that answers.

  Its `errors` are what Chromium writes into its console, and what the page's
  script raises. At the end there must be none, nothing must have been asked of
  any other address, and nothing must have given the page another title.
  """
  with contextlib.closing(browser.new_context(**options)) as context:
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    page.errors, elsewhere = [], []

    def hear(message):
      if message.type in ("error", "warning"):
        page.errors.append(message.text)

    def see(request):
      if not request.url.startswith(f"{address}/"):
        elsewhere.append(request.url)

    page.on("console", hear)
    page.on("pageerror", lambda error: page.errors.append(str(error)))
    page.on("request", see)
    page.goto(f"{address}/")
    expect(page.locator("#slots")).not_to_have_text("–")
    yield page
    page.unroute_all(behavior="wait")
    assert page.errors == []
    assert elsewhere == []
    assert page.title() == "specjax"


# -------------------------------------------------------- what is done and seen


def say(page, text, *, tokens=24):
  """Sends a message; returns the page's request to the server."""
  page.get_by_label("tokens", exact=True).fill(str(tokens))
  page.get_by_label("Message").fill(text)
  with page.expect_request("**/v1/**") as asked:
    page.keyboard.press("Enter")
  return asked.value.post_data_json


def begun(page):
  """Waits for the first tokens of the newest answer."""
  expect(page.locator(".answer").last.locator("span").first).to_be_attached()


def over(page):
  """Waits for its end."""
  expect(page.locator("#send")).to_have_text("Send")


def idle(page):
  """Waits until no answer is running."""
  expect(page.locator("#slots")).to_have_text(f"0 of {SLOTS}")


def answers(page):
  """The text of every answer."""
  return page.locator(".answer").all_text_contents()


def drawn(page):
  """Tokens of the newest answer: text, class, and what hovering tells."""
  tokens = page.locator(".answer").last.locator("span")
  return tokens.evaluate_all(
    "all => all.map(x => [x.textContent, x.className, x.title])"
  )


def contrast(one, other):
  """WCAG's contrast of two colours `rgb(r, g, b)`: 1 to 21; text needs 4.5."""

  def brightness(color):
    parts = [int(x) / 255 for x in re.findall(r"\d+", color)[:3]]
    red, green, blue = (
      x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue

  low, high = sorted([brightness(one), brightness(other)])
  return (high + 0.05) / (low + 0.05)


def failed(page):
  """Chromium's lines on answers that are errors, removed from `errors`."""
  failures = [x for x in page.errors if x.startswith("Failed to load resource")]
  page.errors[:] = [x for x in page.errors if x not in failures]
  return failures


# ------------------------------------------------------- what the page is told


def answers_instead(page, place, **answer):
  """Replaces the server's answer at one of its places."""
  page.route(place, lambda route: route.fulfill(**answer))


def events(*told):
  """A stream of these, as an answer of `answers_instead`."""
  return dict(
    content_type="text/event-stream",
    body="".join(f"data: {json.dumps(x)}\n\n" for x in told),
  )


def chunk(text):
  """A token of a stream."""
  token = {"text": text, "origin": "accepted"}
  return {"choices": [{"delta": {"content": text}, "token_origins": [token]}]}


# -------------------------------------------------------------- beside the page


def post(address, body, *, place="chat/completions"):
  """Sends the page's request again, for a whole answer."""
  body = {key: value for key, value in body.items() if key != "stream"}
  request = urllib.request.Request(
    f"{address}/v1/{place}", json.dumps(body).encode(),
    {"Content-Type": "application/json"},
  )  # fmt: skip
  with urllib.request.urlopen(request, timeout=several.PATIENCE) as answer:
    return json.loads(answer.read())


def counted(address):
  """Emitted tokens, and accepted ones among them, that `/metrics` knows of."""
  with urllib.request.urlopen(f"{address}/metrics", timeout=60) as answer:
    text = answer.read().decode()
  return [
    float(re.search(rf"^vllm:{name}_total{{.*}} (\S+)$", text, re.M)[1])
    for name in ("generation_tokens", "spec_decode_num_accepted_tokens")
  ]


@contextlib.contextmanager
def crowd(address, count):
  """Has other clients ask for long answers until the block ends."""
  body = dict(prompt="x = ", max_tokens=LONG, temperature=1.5, stream=True)
  with contextlib.ExitStack() as last:
    for _ in range(count):
      connection = http.client.HTTPConnection(
        address.removeprefix("http://"), timeout=several.PATIENCE
      )
      last.callback(connection.close)
      connection.request(
        "POST", "/v1/completions", json.dumps(body),
        {"Content-Type": "application/json"},
      )  # fmt: skip
      last.callback(connection.getresponse().close)
    yield
