"""One server for all tests that need no settings of their own."""

import pytest
import served


@pytest.fixture(scope="session")
def text_slots():
  """Compiled slots of `served.text_decoder`, for one scheduler at a time."""
  return served.text_slots()


@pytest.fixture(scope="session")
def server(text_slots):
  """The `Service` over them and its address."""
  with served.http_service(text_slots) as actual:
    yield actual
