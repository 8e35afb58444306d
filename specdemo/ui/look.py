"""How the page looks and what is served besides it: the theme, the style sheets, the scripts, all of them local."""

from __future__ import annotations

from typing import Any

import gradio as gr
from starlette.middleware import Middleware

from .health import health_routes
from .mcp import ToolCalls
from .replay.routes import replay_routes
from .runs import Runs
from .serving.head import PageHead, files_route, script_tag, style_tag
from .serving.request_guard import RequestGuard
from .serving.stream import status_route, stream_route
from .watch.routes import watch_routes

FONT = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "Arial", "sans-serif")
MONO = ("ui-monospace", "SF Mono", "Cascadia Mono", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace")

# Until Gradio loads them with the theme.
FONTS = f"<style>:root {{ --font: {', '.join(FONT)}; --font-mono: {', '.join(MONO)} }}</style>"


def launch_options(runs: Runs, proxied: bool = False, tools: bool = False, metrics: bool = False) -> dict[str, Any]:
    """What `Blocks.launch` needs for the page of these runs, besides where to serve it.

    Args:
        proxied: whether all visitors come through a proxy that says who they are, as on a Space.
        tools: whether language models may use the page, see `mcp`.
        metrics: whether the counters of `health` can be read.
    """
    runs.line.proxied = proxied
    return {
        "mcp_server": tools,
        "app_kwargs": {
            "routes": [
                stream_route(runs),
                status_route(runs),
                files_route(),
                *health_routes(runs, metrics),
                *replay_routes(),
                *watch_routes(runs, style_tag() + FONTS),
            ],
            "middleware": [
                Middleware(RequestGuard),
                *([Middleware(ToolCalls)] if tools else []),
                Middleware(PageHead, first=script_tag(), last=style_tag() + FONTS, runs=runs),
            ],
        },
        "theme": theme(),
        "footer_links": [],
        "run_history": False,
        "enable_monitoring": False,
        "ssr_mode": False,
        "show_error": False,  # of what is not ours: `gr.Error`, which holds a sentence, is shown all the same
        "max_file_size": "1kb",  # the page takes no files: a trace comes as a text, see replay
    }


COLOURS = {  # of the page, dark and light: page.css says what they are
    "body_text_color": "ink",
    "body_text_color_subdued": "soft",
    "background_fill_primary": "card",
    "block_background_fill": "card",
    "block_border_color": "line",
    "block_label_text_color": "soft",
    "block_title_text_color": "ink",
    "block_info_text_color": "soft",
    "input_background_fill": "card",
    "input_border_color": "line",
    "input_placeholder_color": "soft",
    "border_color_primary": "line",
    "button_primary_background_fill": "accent",
    "button_primary_background_fill_hover": "accent",
    "button_primary_text_color": "accent-ink",
    "button_secondary_background_fill": "card",
    "button_secondary_border_color": "line",
    "button_secondary_text_color": "ink",
    "slider_color": "accent",
}


def theme() -> gr.Theme:
    """Gradio's plain theme with system fonts, one accent and the page's own colours."""
    accent = gr.themes.Color(*(["#0072b2"] * 11), name="accent")
    return gr.themes.Base(
        primary_hue=accent, neutral_hue="slate", radius_size="lg", font=list(FONT), font_mono=list(MONO)
    ).set(
        body_background_fill="#f6f7f8",  # as in page.css, which comes later than the first paint
        body_background_fill_dark="#0e1113",
        block_shadow="none",
        block_padding="9px 14px",
        input_border_width="1px",
        input_padding="7px 10px",
        **{f"{part}{dark}": f"var(--sd-{name})" for part, name in COLOURS.items() for dark in ("", "_dark")},
    )
