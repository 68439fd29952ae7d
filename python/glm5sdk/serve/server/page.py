"""The chat page at /: one file, under a policy that lets nothing in that is not in it."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from glm5sdk.serve.server.service import Service

__all__ = ["page"]

_FILE = Path(__file__).with_name("page.html")


async def page(service: Service, request: Request) -> Response:
    """A page to talk with the model."""
    text, policy = _page()
    return Response(
        text,
        media_type="text/html; charset=utf-8",
        headers={
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cross-origin-opener-policy": "same-origin",
            "cache-control": "no-cache",
        },
    )


@cache
def _page() -> tuple[str, str]:
    """The file, and a policy that names its own script and style by their hashes and calls this server alone."""
    text = _FILE.read_text(encoding="utf-8")
    hashes = {}
    for tag in ("script", "style"):
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        hashes[tag] = " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'" for part in found
        )
    return text, (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
