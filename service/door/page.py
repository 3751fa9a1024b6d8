"""The page at `/`: one HTML file, which calls the HTTP API of its own origin."""

import base64
import hashlib
import re
from pathlib import Path

from starlette.responses import HTMLResponse, Response

_FILE = Path(__file__).with_name("page.html")


def page() -> Response:
    html = _FILE.read_text(encoding="utf-8")
    return HTMLResponse(html, headers=_headers(html))


def _headers(html: str) -> dict[str, str]:
    """Make headers that let the browser run this file's script and style, call this origin, and do nothing
    else. Trusted types keep the script from making HTML of text."""
    policy = (
        "default-src 'none'",
        f"script-src {_hash(html, 'script')}",
        f"style-src {_hash(html, 'style')}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    return {
        "content-security-policy": "; ".join(policy),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }


def _hash(html: str, element: str) -> str:
    (text,) = re.findall(f"<{element}>(.*?)</{element}>", html, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
