"""Builds the page and launches it, for `python app.py` and `python -m specdemo serve`."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import psutil

from ..errors import BadInput
from ..models.hub_token import login_is_offered
from ..models.presets import find_preset, fitting_first, load_presets, load_prompts
from ..settings import check_dtype_name
from . import health, hub_login, zero
from . import mcp as mcp_tools
from .budgets import Budgets
from .engine import Backend, Engine
from .look import launch_options
from .page import build_page
from .runs import Runs
from .serving.request_guard import LOOPBACK


def serve(
    preset: str | None = None,
    port: int | None = None,
    host: str | None = None,
    open_browser: bool = False,
    auth: Path | None = None,
    dtype: str = "auto",
    mcp: bool = False,
    metrics: bool = False,
) -> None:
    """Serve the page until the process ends.

    Args:
        preset: the preset that is loaded first and that the page opens with; the first one by default.
        port: by default the first free one from 7860 on, or `GRADIO_SERVER_PORT`.
        host: by default the page is for this machine alone, or at `GRADIO_SERVER_NAME`. A Space sets its own address.
        auth: a file that says who may log in, see `read_logins`; without it there is no login.
        dtype: of the weights of all presets, see `loaded.load`.
        metrics: whether the counters of `health` can be read.
        mcp: whether language models may use the page, see `mcp`; also if `GRADIO_MCP_SERVER` is true.
    """
    zero.prepare()
    check_dtype_name(dtype)
    logins = read_logins(auth) if auth else None
    if mcp := mcp or os.environ.get("GRADIO_MCP_SERVER", "").lower() == "true":
        mcp_tools.check_available()
        if logins:
            raise BadInput("Language models cannot log in: leave out --mcp or --auth.")
    if metrics:
        health.check_available()
    presets, notes = load_presets()
    presets = fitting_first(presets, psutil.virtual_memory().total)
    if preset is not None:
        found = presets.get(preset) or find_preset(preset)
        presets = {found.name: found, **presets}
    if not presets:
        raise BadInput(" ".join(notes) or "There are no presets.")
    try:
        prompts = load_prompts()
    except BadInput as error:
        prompts, notes = {}, [*notes, str(error)]
    on_space = bool(os.environ.get("SPACE_ID"))
    if host is None and not on_space:
        host = os.environ.get("GRADIO_SERVER_NAME", "127.0.0.1")
    trusted = on_space or bool(logins) or host in LOOPBACK  # a Space has its own list of models
    budgets = replace(Budgets.of(os.environ), own_models=trusted)
    backend = zero.ZeroBackend(dtype, budgets) if zero.is_zero(os.environ) else Backend(dtype)
    engine, runs = Engine(presets, backend, hub_login.visitor_token), Runs()
    page = build_page(engine, runs, prompts, notes, budgets, mcp, login_is_offered(os.environ))
    health.log_races()
    engine.begin_loading(next(iter(presets)))
    address = {"server_name": host, "server_port": port, "inbrowser": open_browser, "auth": logins}
    try:
        page.launch(**address, **launch_options(runs, proxied=on_space, tools=mcp, metrics=metrics))
    except OSError as error:
        where = f"{host} has no free port" if port is None else f"port {port} of {host} is in use or not allowed"
        raise BadInput(f"The page cannot be served: {where}.") from error


def read_logins(file: Path) -> list[tuple[str, str]]:
    """The names and passwords of those who may log in, from a file of `user:password` lines."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"The file of logins {file} cannot be read: it is missing, locked or not a text.") from error
    logins = []
    for number, line in enumerate(lines, start=1):
        user, _, password = line.strip().partition(":")
        if user and password:
            logins.append((user, password))
        elif line.strip():
            raise BadInput(f"Line {number} of the file of logins {file} is not of the form user:password.")
    if not logins:
        raise BadInput(f"The file of logins {file} is empty: it needs a line of the form user:password.")
    return logins
