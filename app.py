"""Draftscope: `python app.py` opens the page; `gradio app.py` does the same and reloads it when a file changes."""

import sys

from app.zero import ZERO_GPU

if ZERO_GPU:
    import spaces  # before anything asks torch for a GPU

from app.cli import models_of, parse
from app.device import Device
from app.operator import Operator
from app.page import build
from app.server import launch_options, serve

arguments = parse(sys.argv[1:] if __name__ == "__main__" else [])
models, operator = models_of(arguments), Operator.of(arguments)
device = Device(operator.max_waiting)
demo = build(models, operator=operator, device=device, gpu=spaces.GPU if ZERO_GPU else None)

if __name__ == "__main__":
    options = launch_options(models, device, operator)
    serve(demo, device, server_name=arguments.host, server_port=arguments.port, mcp_server=arguments.mcp or None, **options)
