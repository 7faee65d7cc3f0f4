"""The page at `/` in a real browser: what it shows of what goes wrong."""

import contextlib
import re
import signal

import browsing
import pytest
import several
from browsing import TALK, answers, begun, drawn, expect, idle, over, say

pytestmark = pytest.mark.heavy("the page in a browser")  # one share for all

GONE = "the server does not answer"


@pytest.fixture(scope="module")
def server():
  with browsing.serving() as actual:
    yield actual


@pytest.fixture(scope="module")
def browser():
  with browsing.chromium() as actual:
    yield actual


@pytest.fixture
def page(server, browser):
  with browsing.window(browser, server.address) as actual:
    yield actual


def test_what_is_refused_says_why_and_can_be_said_again(page):
  long = "x = 1\n" * 200
  say(page, long)
  over(page)
  expect(page.locator(".error")).to_have_text(
    re.compile("the prompt has .* tokens, and may have 256")
  )
  assert browsing.failed(page)
  assert page.locator(".user").count() == len(answers(page)) == 0
  expect(page.get_by_label("Message")).to_have_value(long)
  body = say(page, "import a module")
  over(page)
  assert len(body["messages"]) == 1
  assert len(answers(page)) == 1


def test_a_bearer_token_is_asked_for_where_it_is_needed(page):
  key = page.get_by_label("bearer token")
  expect(key).to_be_hidden()
  refusal = {"error": {"message": "a bearer token is needed"}}
  browsing.answers_instead(page, "**/v1/**", status=401, json=refusal)
  say(page, "import a module")
  over(page)
  expect(page.locator(".error")).to_have_text("a bearer token is needed")
  assert browsing.failed(page)
  page.unroute("**/v1/**")
  key.fill("secret")
  with page.expect_request("**/v1/**") as asked:
    page.get_by_role("button", name="Send").click()
  assert asked.value.headers["authorization"] == "Bearer secret"
  (message,) = asked.value.post_data_json["messages"]
  assert message["content"] == "import a module"
  over(page)
  assert len(answers(page)) == 1


def test_an_answer_without_its_end_is_an_error(page):
  """A proxy, say, ends a stream in good form that the server did not."""
  told = browsing.events(browsing.chunk("so"))
  browsing.answers_instead(page, "**/v1/**", **told)
  say(page, "import a module")
  over(page)
  expect(page.locator(".error")).to_have_text("The answer broke off.")
  assert answers(page) == ["so"]


def test_a_server_that_hangs_is_told_and_its_answer_can_be_stopped(
  server, page
):
  say(page, TALK, tokens=browsing.LONG)
  begun(page)
  server.processes[0].send_signal(signal.SIGSTOP)
  try:
    expect(page.locator("#model")).to_have_text(GONE)
    page.get_by_role("button", name="Stop").click()
    over(page)
  finally:
    server.processes[0].send_signal(signal.SIGCONT)
  idle(page)
  expect(page.locator("#model")).to_have_text(browsing.PAIR)
  assert page.locator(".error").count() == 0


def test_a_server_that_is_killed_mid_answer_is_an_error_and_may_come_back(
  browser,
):
  port = several.free_port()
  with contextlib.ExitStack() as last:
    with browsing.serving(port) as server:
      page = last.enter_context(browsing.window(browser, server.address))
      say(page, TALK, tokens=browsing.LONG)
      begun(page)
      server.processes[0].kill()
      over(page)
    said = page.locator(".error").all_text_contents()
    assert len(said) == 1
    assert said[0].startswith("The connection to the server broke off")
    partly = answers(page)
    assert 0 < len(drawn(page)) < browsing.LONG
    expect(page.locator("#model")).to_have_text(GONE)
    say(page, "are you there?")
    over(page)
    expect(page.get_by_label("Message")).to_have_value("are you there?")
    assert answers(page) == partly
    with browsing.serving(port):
      expect(page.locator("#model")).to_have_text(browsing.PAIR)
      with page.expect_request("**/v1/**") as asked:
        page.get_by_role("button", name="Send").click()
      over(page)
      asked = [x["content"] for x in asked.value.post_data_json["messages"]]
      assert asked == [TALK, *partly, "are you there?"]
      assert len(answers(page)) == 2
    assert browsing.failed(page)
    page.errors[:] = [x for x in page.errors if "ERR_" not in x]
