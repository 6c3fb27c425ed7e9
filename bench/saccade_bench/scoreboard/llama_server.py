"""Start llama.cpp's own server from the package xllamacpp. Runs in that package's environment, so
it imports nothing else.

    python llama_server.py FOLDER PORT [--cold]

FOLDER has model.gguf and mmproj-model.gguf, as `peers.llama_convert` writes them.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import xllamacpp


def main() -> None:
    folder, port = Path(sys.argv[1]), int(sys.argv[2])
    params = xllamacpp.CommonParams()
    params.model.path = str(folder / "model.gguf")
    params.mmproj.path = str(folder / "mmproj-model.gguf")
    params.port, params.n_parallel, params.n_ctx = port, 4, 32_768
    params.model_alias = {folder.name}
    if "--cold" in sys.argv:
        params.cache_prompt, params.cache_ram_mib = False, 0
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
