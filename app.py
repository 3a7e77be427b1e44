"""Draftscope: `python app.py` opens the page; `gradio app.py` does the same and reloads it when a file changes."""

import sys

from app.zero import ZERO_GPU

if ZERO_GPU:
    import spaces  # before anything asks torch for a GPU

from app.cli import models_of, parser
from app.page import build
from app.theme import page_head, theme

arguments = parser().parse_args(sys.argv[1:] if __name__ == "__main__" else [])
models = models_of(arguments)
demo = build(models, gpu=spaces.GPU if ZERO_GPU else None)

if __name__ == "__main__":
    demo.queue(max_size=32).launch(
        server_name=arguments.host,
        server_port=arguments.port,
        theme=theme(),
        head=page_head(),
        footer_links=["api", "gradio", "settings"],
        mcp_server=arguments.mcp or None,
    )
