"""The page at `/` in a real browser, with the embedded pair behind it."""

import datetime
import re

import browsing
import pytest
from browsing import TALK, answers, begun, drawn, expect, idle, over, say

pytestmark = pytest.mark.heavy("the page in a browser")  # one share for all

ORIGINS = {"accepted": "accepted", "residual": "corrected", "bonus": "bonus"}
# Runs wherever it is taken for HTML.
WILD = (
  "<img src=x onerror=\"document.title='ran'\"></script>"
  "<script>document.title = 'ran'</script> &amp; <b>bold</b>"
)
LIVE = dict(
  is_chat=True, model="toy", drafter="model", rule="token", slots=64,
  slots_used=3, waiting=0, acceptance=None, tokens_per_second=0,
)  # fmt: skip


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


# ---------------------------------------------------------------------- tokens


def test_tokens_are_drawn_by_origin_and_counted_as_the_server_counts(
  server, page
):
  before = browsing.counted(server.address)
  body = say(page, TALK, tokens=100)
  over(page)
  after = browsing.counted(server.address)
  whole = browsing.post(server.address, body)
  (choice,) = whole["choices"]
  expected = [(x["text"], x["origin"]) for x in choice["token_origins"]]
  assert [(text, origin) for text, origin, _ in drawn(page)] == expected
  assert all(title == ORIGINS[origin] for _, origin, title in drawn(page))
  assert answers(page) == [choice["message"]["content"]]
  counts = {x: [y for _, y in expected].count(x) for x in ORIGINS}
  assert min(counts.values()) > 0
  total = whole["usage"]["completion_tokens"]
  assert total == sum(counts.values())
  assert [total, counts["accepted"]] == [
    b - a for a, b in zip(before, after, strict=True)
  ]
  expect(page.locator(".counts")).to_have_text(
    f"{total} tokens: {counts['accepted']} accepted, "
    f"{counts['residual']} corrected, {counts['bonus']} bonus"
  )


def test_colours_differ_and_can_be_read_by_day_and_by_night(page):
  say(page, TALK, tokens=100)
  over(page)
  style = lambda selector, what: page.locator(selector).first.evaluate(
    f"x => getComputedStyle(x).{what}"
  )
  grounds = set()
  for scheme in ("light", "dark"):
    page.emulate_media(color_scheme=scheme)
    ground = style("header", "backgroundColor")
    grounds.add(ground)
    colors = {x: style(f".answer .{x}", "color") for x in ORIGINS}
    assert len({*colors.values()}) == 3
    for origin, color in colors.items():
      assert browsing.contrast(color, ground) > 4.5
      assert style(f".note .{origin}", "color") == color  # the legend
      assert style(f".counts .{origin}", "color") == color
    assert browsing.contrast(style(".note", "color"), ground) > 4.5
    assert style(".note", "opacity") == "1"
  assert len(grounds) == 2


# ------------------------------------------------------------------ the header

# Keeps all that the header ever says.
_RECORD = """() => {
  window.seen = [];
  const state = document.getElementById("state");
  new MutationObserver(() => window.seen.push(Object.fromEntries(
    [...state.querySelectorAll("b")].map((x) => [x.id, x.textContent])
  ))).observe(state, {subtree: true, childList: true});
}"""


def test_slots_acceptance_and_throughput_are_live(page):
  """Of an idle server there is nothing to tell; then there is; then not."""
  rate, acceptance = page.locator("#rate"), page.locator("#acceptance")
  expect(rate).to_have_text("0.0")
  expect(acceptance).to_have_text("–")
  idle(page)
  page.evaluate(_RECORD)
  say(page, TALK, tokens=100)
  over(page)
  with page.expect_response("**/live") as told:
    pass
  live = told.value.json()
  assert live["tokens_per_second"] > 0
  expect(rate).to_have_text(f"{live['tokens_per_second']:.1f}")
  expect(acceptance).to_have_text(f"{int(100 * live['acceptance'] + 0.5)}%")
  expect(page.locator("#model")).to_have_text(browsing.PAIR)
  idle(page)
  seen = page.evaluate("window.seen")
  assert f"1 of {browsing.SLOTS}" in [one["slots"] for one in seen]
  expect(rate).to_have_text("0.0")
  expect(acceptance).to_have_text("–")


def test_an_answer_of_less_than_a_second_is_seen_in_its_slot(page):
  """The page's clock stands, so it does not look for the time that passes."""
  page.clock.install()
  page.clock.pause_at(datetime.datetime.now() + datetime.timedelta(hours=1))
  idle(page)
  page.wait_for_timeout(1500)  # of a timer that was begun before
  say(page, TALK, tokens=100)
  expect(page.locator("#slots")).to_have_text(f"1 of {browsing.SLOTS}")
  over(page)


def test_the_requests_of_others_are_in_the_slots_and_wait(server, page):
  slots, dots = browsing.SLOTS, page.locator("#dots")
  idle(page)
  expect(dots).to_have_text("○" * slots)
  with browsing.crowd(server.address, 40):
    expect(page.locator("#slots")).to_have_text(f"{slots} of {slots}")
    expect(dots).to_have_text("●" * slots)
    expect(page.locator("#waiting")).to_have_text(re.compile("[1-9]"))
  idle(page)
  expect(page.locator("#waiting")).to_have_text("0")
  expect(dots).to_have_text("○" * slots)


# --------------------------------------------------------------- conversations


def test_a_second_turn_keeps_the_first_and_new_begins_afresh(server, page):
  one = say(page, "import a module")
  assert one["messages"] == [{"role": "user", "content": "import a module"}]
  over(page)
  two = say(page, "and use it")
  over(page)
  first, second = answers(page)
  assert two["messages"] == [
    *one["messages"],
    {"role": "assistant", "content": first},
    {"role": "user", "content": "and use it"},
  ]
  actual = browsing.post(server.address, two)
  assert second == actual["choices"][0]["message"]["content"]
  assert first != second
  users = page.locator(".user")
  assert users.all_text_contents() == ["import a module", "and use it"]
  page.get_by_role("button", name="New").click()
  assert answers(page) == users.all_text_contents() == []
  expect(page.get_by_label("Message")).to_be_focused()
  anew = say(page, "import a module")
  over(page)
  assert anew == one
  assert answers(page) == [first]


def test_new_during_an_answer_frees_its_slot_and_nothing_of_it_comes_back(
  server, page
):
  before, _ = browsing.counted(server.address)
  say(page, TALK, tokens=browsing.LONG)
  begun(page)
  expect(page.locator("#slots")).to_have_text(f"1 of {browsing.SLOTS}")
  page.get_by_role("button", name="New").click()
  idle(page)
  after, _ = browsing.counted(server.address)
  assert 0 < after - before < browsing.LONG
  assert answers(page) == []
  body = say(page, "import a module")
  over(page)
  assert len(body["messages"]) == 1
  assert 0 < len(drawn(page)) <= 24


def test_a_server_without_a_chat_template_is_asked_for_completions(
  server, page
):
  def answer(route):
    actual = route.fetch()
    route.fulfill(response=actual, json={**actual.json(), "is_chat": False})

  page.route("**/live", answer)
  expect(page.get_by_label("Message")).to_have_attribute(
    "placeholder", "The beginning of a text"
  )
  for prompt in ("def main(", "import "):
    body = say(page, prompt)
    over(page)
    assert body["prompt"] == prompt
    whole = browsing.post(server.address, body, place="completions")
    assert answers(page)[-1] == whole["choices"][0]["text"]


# ---------------------------------------------------------------- text is text


def test_html_in_messages_answers_errors_and_names_is_text(page):
  """Texts of the user and the server are shown, and not run."""
  say(page, WILD)
  over(page)
  told = browsing.events(browsing.chunk(WILD), {"error": {"message": WILD}})
  browsing.answers_instead(page, "**/v1/**", **told)
  browsing.answers_instead(page, "**/live", json={**LIVE, "model": WILD})
  say(page, "and now you")
  over(page)
  assert page.locator(".user").first.text_content() == WILD
  assert answers(page)[-1] == WILD
  assert page.locator(".error").all_text_contents() == [WILD]
  expect(page.locator("#model")).to_have_text(f"{WILD} · model · token")
  expect(page.locator("#slots")).to_have_text("3 of 64")  # too many for dots
  assert page.locator("#dots").text_content() == ""
  assert page.locator("img, b:not(header b)").count() == 0
  assert page.locator("script").count() == 1


def test_no_script_but_the_pages_own_would_run(page):
  """Were there a way in, the policy would still be there."""
  page.evaluate(
    """text => {
      const made = document.createElement("div");
      made.innerHTML = text;
      document.body.append(made);
      const script = document.createElement("script");
      script.textContent = "document.title = 'ran'";
      document.body.append(script);
    }""",
    WILD,
  )
  expected = ("inline event handler", "Loading the image", "inline script")
  refused = lambda: {x for x in expected if x in " ".join(page.errors)}
  for _ in range(100):
    if len(refused()) < len(expected):
      page.wait_for_timeout(100)
  assert refused() == {*expected}
  assert all("Content Security Policy" in error for error in page.errors)
  assert page.title() == "specjax"
  page.errors.clear()


# ------------------------------------------------------- windows and keyboards


@pytest.mark.parametrize("width, height", [(320, 568), (360, 740)])
def test_a_narrow_window_does_not_scroll_sideways(
  server, browser, width, height
):
  options = dict(
    viewport={"width": width, "height": height}, is_mobile=True, has_touch=True
  )
  wide = dict(
    model="a_name_without_an_end_" * 4, slots=16, slots_used=9, waiting=12345,
    acceptance=0.5, tokens_per_second=123456.7,
  )  # fmt: skip
  with browsing.window(browser, server.address, **options) as page:
    page.evaluate("document.getElementById('key').hidden = false")
    browsing.answers_instead(page, "**/live", json=LIVE | wide)
    expect(page.locator("#waiting")).to_have_text("12345")
    say(page, "word" * 40, tokens=100)
    over(page)
    sides = page.evaluate(
      """[...document.querySelectorAll("body *")]
        .map((x) => x.getBoundingClientRect())
        .filter((x) => x.width).map((x) => [x.left, x.right])"""
    )
    assert min(left for left, _ in sides) >= 0
    assert max(right for _, right in sides) <= width
    widths = "[document.documentElement.scrollWidth, visualViewport.width]"
    assert page.evaluate(widths) == [width, width]
    for selector in ("#text", "#send", "#slots", "#rate"):
      expect(page.locator(selector)).to_be_in_viewport(ratio=1)


def test_who_reads_further_up_stays_there_and_who_reads_the_end_follows(
  server, browser
):
  view = {"width": 500, "height": 420}
  left = "document.documentElement.scrollHeight - innerHeight - scrollY"
  with browsing.window(browser, server.address, viewport=view) as page:
    say(page, TALK, tokens=150)
    over(page)
    assert page.evaluate("scrollY") > 100
    assert page.evaluate(left) < 2
    say(page, "and another", tokens=150)
    begun(page)
    page.evaluate("scrollTo(0, 0)")
    over(page)
    assert page.evaluate("scrollY") == 0
    assert page.evaluate(left) > 100
    for selector in ("#slots", "#text", "#send"):  # wherever one reads
      expect(page.locator(selector)).to_be_in_viewport(ratio=1)


def test_all_can_be_done_by_keyboard(page):
  text, press = page.get_by_label("Message"), page.keyboard.press
  budget = page.get_by_label("tokens", exact=True)
  expect(text).to_be_focused()
  for _ in range(2):
    press("Tab")
  expect(budget).to_be_focused()
  press("Control+a")
  page.keyboard.type(str(browsing.LONG))
  for _ in range(2):
    press("Shift+Tab")
  expect(text).to_be_focused()
  press("Enter")  # nothing is said, and nothing asked
  page.keyboard.type("one")
  press("Shift+Enter")
  page.keyboard.type("two")
  press("Enter")
  begun(page)
  assert page.locator(".user").all_text_contents() == ["one\ntwo"]
  page.keyboard.type("meanwhile")
  press("Enter")  # it waits until one can send it
  expect(text).to_have_value("meanwhile")
  expect(page.locator("#send")).to_have_text("Stop")
  press("Escape")
  over(page)
  assert 0 < len(drawn(page)) < browsing.LONG
  assert page.locator(".error").count() == 0
  for label in ("temperature", "tokens"):
    press("Tab")
    expect(page.get_by_label(label, exact=True)).to_be_focused()
  press("Tab")
  expect(page.get_by_role("button", name="Send")).to_be_focused()
  with page.expect_request("**/v1/**") as asked:
    press("Space")
  messages = asked.value.post_data_json["messages"]
  assert [x["content"] for x in messages[::2]] == ["one\ntwo", "meanwhile"]
  press("Tab")
  expect(page.get_by_role("button", name="New")).to_be_focused()
  press("Enter")
  assert answers(page) == []
  expect(text).to_be_focused()
