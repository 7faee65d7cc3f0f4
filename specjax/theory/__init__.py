"""The mathematics that predicts what the decoder measures, in NumPy float64.

`transport` has the optimal transport of multi-draft verification.
"""

from specjax.theory import transport

__all__ = ["transport"]
