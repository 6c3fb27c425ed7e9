"""`make gpu-check`: everything that needs a GPU, in one command. `__main__.py` says how."""
