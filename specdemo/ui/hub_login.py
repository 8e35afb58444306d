"""The login by the hub on a Space, for models whose licence a visitor has accepted there.

Gradio keeps the token in a signed cookie of the visitor's browser. Here it is read when a preset is asked for, and
used for that alone, see `models.hub_token`.
"""

from __future__ import annotations

import time
from typing import Any

import gradio as gr
from gradio.context import LocalContext


def add_login() -> None:
    """Add the button to the page that is being built. It says who is logged in, and logs out."""
    gr.LoginButton("Sign in with Hugging Face for gated models (experimental)", size="sm", elem_id="hub-login")


def visitor_token() -> str | None:
    """The token of whoever sent the request that is being handled; None if nobody is logged in."""
    request = LocalContext.request.get(None)
    scope: Any = getattr(getattr(request, "request", None) or request, "scope", None)
    login = scope.get("session", {}).get("oauth_info") if isinstance(scope, dict) else None
    if not login or login.get("expires_at", 0) < time.time():
        return None
    return str(login["access_token"])
