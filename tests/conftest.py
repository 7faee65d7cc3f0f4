"""Shared by all tests: `toys` and `files` are importable by name."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
