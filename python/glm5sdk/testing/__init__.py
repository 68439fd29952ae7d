"""The conformance suite, shipped: each (op, implementation) pair of any backend, in tree or not, is checked alike.

    pytest --pyargs glm5sdk.testing --backend cpu --tier test

or, where the pytest plugin is not registered, `python -m glm5sdk.testing --backend cpu`. In a program:

    from glm5sdk.testing import check_pair
    check_pair(get_op("rms_norm"), "mine.v1")
"""

from __future__ import annotations

from glm5sdk.testing.failure import CheckFailed
from glm5sdk.testing.inputs import Example, arguments
from glm5sdk.testing.pair import check_pair
from glm5sdk.testing.tiers import TIERS, Tier

__all__ = ["TIERS", "CheckFailed", "Example", "Tier", "arguments", "check_pair"]
