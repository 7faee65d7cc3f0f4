"""Shared by all tests: the toy models are importable as `toys`."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
