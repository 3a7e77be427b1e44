"""The look: Gradio's theme, the style sheet and the page's own script, read from assets."""

from pathlib import Path

import gradio as gr

from app.methods import colour_sheet

ASSETS = Path(__file__).resolve().parent.parent / "assets"
SANS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "Noto Sans", "DejaVu Sans", "sans-serif")
MONO = ("ui-monospace", "SF Mono", "Menlo", "Consolas", "Noto Sans Mono", "DejaVu Sans Mono", "monospace")


def theme() -> gr.themes.Base:
    """Quiet greys; the colours of the page belong to the methods. Fonts of the reader's own machine, none fetched."""
    return gr.themes.Base(
        primary_hue="slate", secondary_hue="slate", neutral_hue="slate", font=SANS, font_mono=MONO, radius_size="sm", spacing_size="sm"
    ).set(
        body_background_fill="#fbfbfc",
        body_background_fill_dark="#0e1117",
        block_background_fill="#ffffff",
        block_background_fill_dark="#161b22",
        body_text_color_subdued="#475467",
        body_text_color_subdued_dark="#b6c0ce",
        link_text_color="#1d4ed8",
        link_text_color_dark="#8ab4ff",
        link_text_color_hover="#1e3a8a",
        link_text_color_hover_dark="#b9d1ff",
        link_text_color_visited="#1d4ed8",
        link_text_color_visited_dark="#8ab4ff",
        input_background_fill="#ffffff",
        input_background_fill_dark="#0e1117",
        input_border_width="1px",
        input_border_color="#d5dae2",
        input_border_color_dark="#3a4352",
        checkbox_label_background_fill="#f5f6f8",
        checkbox_label_background_fill_dark="#1c232d",
        checkbox_label_background_fill_selected="#e4e7ec",
        checkbox_label_background_fill_selected_dark="#2f3845",
        table_odd_background_fill_dark="#1c232d",
        table_even_background_fill_dark="#161b22",
        button_secondary_background_fill="#eceff3",
        button_secondary_background_fill_dark="#262d38",
        button_secondary_background_fill_hover="#dfe3ea",
        button_secondary_background_fill_hover_dark="#3a4352",
        button_secondary_text_color="#101828",
        button_secondary_text_color_dark="#f0f2f5",
        button_primary_background_fill="#1d2939",
        button_primary_background_fill_hover="#344054",
        button_primary_background_fill_dark="#e4e7ec",
        button_primary_background_fill_hover_dark="#ffffff",
        button_primary_text_color="#ffffff",
        button_primary_text_color_dark="#101828",
    )


def style_sheet() -> str:
    """The colours of the methods and the style sheet."""
    return colour_sheet() + (ASSETS / "style.css").read_text(encoding="utf-8")


def page_head() -> str:
    """The page's own style and script for the document's head (Gradio's own `css` would drop container queries)."""
    script = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ASSETS / "js").glob("*.js")))
    return f"<style>{style_sheet()}</style><script>{script}</script>"
