"""The router is small: it starts without torch, and without any package of the extras."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in %r:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
import glm5sdk.serve, glm5sdk.serve.transfer, glm5sdk.serve.router.front, glm5sdk.serve.router.ray_replicas
from glm5sdk.core.errors import UnavailableError
from glm5sdk.serve.router import RouterSettings, create_router
assert "torch" not in sys.modules
try:
    create_router(RouterSettings(replicas=("http://a:1",)))
except UnavailableError as error:
    assert 'pip install "glm5sdk[serve]"' in str(error), error
    print("refused")
"""


def test_no_torch_and_a_clear_word_about_the_extra() -> None:
    extras = ("fastapi", "starlette", "uvicorn", "httpx", "msgspec", "prometheus_client", "ray")
    done = subprocess.run([sys.executable, "-c", SCRIPT % (extras,)], capture_output=True, text=True)
    assert done.stdout == "refused\n", done.stderr
