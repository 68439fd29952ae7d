"""`python -m glm5sdk.testing --backend NAME`: the suite, also where its pytest plugin is not installed as one."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

import pytest

PLUGIN = "glm5sdk.testing.plugin"
installed = any(entry.value == PLUGIN for entry in entry_points(group="pytest11"))
sys.exit(pytest.main([*([] if installed else ["-p", PLUGIN]), "--pyargs", "glm5sdk.testing", *sys.argv[1:]]))
