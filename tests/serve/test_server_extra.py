"""Without the extra's packages everything imports, and the server says what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"fastapi", "starlette", "uvicorn", "msgspec", "prometheus_client", "llguidance"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import glm5sdk, glm5sdk.serve, glm5sdk.serve.server, glm5sdk.cli.app
from glm5sdk.core.errors import UnavailableError
from glm5sdk.serve.server import ServerSettings, create_app
try:
    create_app(None, ServerSettings(), None)
except UnavailableError as error:
    print(error)
"""


@pytest.mark.smoke
def test_a_missing_package_is_named_with_the_extra() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("server: package ") and 'pip install "glm5sdk[serve]"' in done.stdout
