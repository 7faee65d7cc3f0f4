"""The page at `/`: whole, self-contained, and of what the server sends."""

import html.parser
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
