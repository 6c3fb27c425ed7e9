"""`make gpu-check`: run everything that needs a GPU in one command. See `__main__.py`."""
