"""`python -m glm5sdk.testing --backend NAME`: the suite where pytest does not find the plugin by itself."""

from __future__ import annotations

import sys

import pytest

sys.exit(pytest.main(["-p", "glm5sdk.testing.plugin", "--pyargs", "glm5sdk.testing", *sys.argv[1:]]))
