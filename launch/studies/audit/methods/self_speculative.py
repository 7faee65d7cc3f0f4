"""Self-speculative decoding (Zhang et al., 2024): its release, by default."""

from launch.studies.audit.shape import Method, greedy_told_sampled

METHODS = (
  Method(
    name="Self-speculative sampling, defaults",
    source="github.com/dilab-zju/self-speculative-decoding, decoding.py "
    "(self_speculative_sample) at f69f2a7; arXiv 2309.08168",
    finding="the likeliest token, divided by its softmax",
    rounds=greedy_told_sampled,
  ),
)
