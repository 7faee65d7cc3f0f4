"""The page at `/`: whole, self-contained, and of what the server sends."""

import html.parser
import json
import re
import shutil
import subprocess

import pytest

from launch.serving import page


class Parsed(html.parser.HTMLParser):
  """Tags with their attributes, and what the script is."""

  def __init__(self):
    super().__init__()
    self.tags, self.script, self._in = [], "", None
    self.feed(page.text())

  def handle_starttag(self, tag, attrs):
    self.tags.append((tag, dict(attrs)))
    self._in = tag

  def handle_endtag(self, tag):
    self._in = None

  def handle_data(self, data):
    if self._in == "script":
      self.script += data


def test_it_loads_nothing_from_elsewhere():
  parsed = Parsed()
  for tag, attrs in parsed.tags:
    assert not {"src", "href", "srcset", "action"} & attrs.keys(), tag
  assert not re.search(r"https?://|@import|url\(", page.text())
  policy = page.response().headers["content-security-policy"]
  assert "default-src 'none'" in policy
  assert "connect-src 'self'" in policy
  assert "unsafe" not in policy  # but its own script and style, by their hashes


def test_its_script_names_only_elements_that_are_there():
  parsed = Parsed()
  ids = [attrs["id"] for _, attrs in parsed.tags if "id" in attrs]
  assert len(ids) == len({*ids})
  asked = set(re.findall(r'\$\("(\w+)"\)', parsed.script))
  assert asked <= {*ids}
  assert len(asked) > 8


def test_it_knows_the_servers_paths_and_the_origins_of_tokens():
  """And writes what models say as text, never as HTML."""
  text = page.text()
  for name in ("/live", "/v1/chat/completions", "/v1/completions"):
    assert f'"{name}"' in text
  for origin in ("accepted", "residual", "bonus"):
    assert f".{origin} {{" in text
  assert "innerHTML" not in text
  assert "insertAdjacentHTML" not in text


@pytest.mark.skipif(not shutil.which("node"), reason="there is no node")
def test_its_script_is_one(tmp_path):
  file = tmp_path / "page.js"
  file.write_text(Parsed().script)
  subprocess.run(["node", "--check", str(file)], check=True, timeout=60)


# Enough of a browser for the script: elements, and a server whose answers come
# when the test says so.
_BROWSER = """
const made = {};
class Element {
  constructor() {
    this.children = []; this.heard = {}; this.textContent = ""; this.value = "";
  }
  append(...more) { this.children.push(...more); }
  replaceChildren(...all) { this.children = all; }
  addEventListener(what, call) { this.heard[what] = call; }
  focus() {}
}
globalThis.document = {
  getElementById: (id) => made[id] ??= new Element(),
  createElement: () => new Element(), addEventListener() {},
  documentElement: {scrollHeight: 0, clientHeight: 0},
};
globalThis.scrollY = 0;
globalThis.scrollTo = () => {};
globalThis.setTimeout = () => {};
const asked = [];
const live = {is_chat: true, slots: 2, slots_used: 0, acceptance: null,
  tokens_per_second: 0};
const bytes = (text) => new TextEncoder().encode(text);
globalThis.fetch = async (path, options) => {
  if (path === "/live") return {ok: true, json: async () => live};
  const one = {body: JSON.parse(options.body), pieces: [], left: false};
  asked.push(one);
  one.say = (text) => one.pieces.shift()({value: bytes("data: " +
    JSON.stringify({choices: [{delta: {content: text}, token_origins: [
      {text, origin: "accepted"}]}]}) + "\\n\\n")});
  one.end = () => one.pieces.shift()({value: bytes("data: [DONE]\\n\\n")});
  const read = () => new Promise((give, fail) => {
    one.pieces.push(give);
    options.signal.addEventListener("abort", () => {
      one.left = true;
      fail(Object.assign(new Error("gone"), {name: "AbortError"}));
    });
  });
  return {ok: true, body: {getReader: () => ({read})}};
};
const settle = async () => { for (let i = 0; i < 20; i++) await null; };
const send = async (text) => {
  made.text.value = text;
  made.form.heard.submit({preventDefault() {}});
  await settle();
};
"""
_TALK = """
(async () => {
  await settle();
  await send("one");
  asked[0].say("first"); await settle();
  const busy = made.send.textContent;
  made.reset.heard.click(); await settle();
  const after = made.send.textContent;
  await send("two");
  asked[1].say("second"); await settle();
  asked[1].end(); await settle();
  await send("three");
  asked[2].end(); await settle();
  console.log(JSON.stringify({busy, after, last: made.send.textContent,
    asked: asked.map((one) => one.body.messages.map((m) => m.content)),
    left: asked.map((one) => one.left), turns: made.talk.children
      .filter((one) => /user|answer/.test(one.className)).length}));
})();
"""


@pytest.mark.skipif(not shutil.which("node"), reason="there is no node")
def test_new_during_an_answer_begins_anew(tmp_path):
  """The answer is given up, and nothing of it comes back."""
  file = tmp_path / "page.js"
  file.write_text(_BROWSER + Parsed().script + _TALK)
  done = subprocess.run(
    ["node", str(file)], capture_output=True, text=True, timeout=60
  )
  assert done.returncode == 0, done.stderr
  record = json.loads(done.stdout)
  assert (record["busy"], record["after"], record["last"]) == (
    "Stop", "Send", "Send",
  )  # fmt: skip
  assert record["asked"] == [["one"], ["two"], ["two", "second", "three"]]
  assert record["left"] == [True, False, False]
  assert record["turns"] == 4  # of both sides, twice
