"""Ask about a screen or a camera every few seconds while it is being recorded to a folder of
frames, with the unchanged openai SDK.

    saccade serve                              # in another terminal
    mkdir frames; ffmpeg -f x11grab -framerate 2 -i :0 frames/%06d.jpg   # or anything else
    python examples/live_screen.py frames "What has just changed?"

Each frame is uploaded once, and the list of all frames is sent with each request. Frames that the
server has cached only cost a hash. `max_pixels` fixes the size of frames: without it, a model may
divide one budget among all frames, so that each new one would change their size. Old frames are
dropped in pairs, because the server caches frames in pairs.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import openai

KINDS = {".jpg", ".jpeg", ".png", ".webp"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("question")
    parser.add_argument("--fps", type=float, default=2.0, help="frames a second in the folder")
    parser.add_argument("--every", type=float, default=5.0, help="seconds between questions")
    parser.add_argument("--window", type=int, default=120, help="frames that are kept (even)")
    parser.add_argument("--max-pixels", type=int, default=262_144)
    parser.add_argument("--rounds", type=int, default=0, help="questions; 0: without end")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="the server's URL")
    parser.add_argument("--key", default="none")
    given = parser.parse_args()

    client = openai.OpenAI(
        base_url=f"{given.base_url.rstrip('/').removesuffix('/v1')}/v1", api_key=given.key
    )
    model = client.models.list().data[0].id
    seen: set[Path] = set()
    frames: list[dict[str, str]] = []
    asked = 0
    while not given.rounds or asked < given.rounds:
        for path in sorted(set(given.folder.iterdir()) - seen):
            seen.add(path)
            if path.suffix.lower() in KINDS:
                file = client.files.create(file=(path.name, path.read_bytes()), purpose="vision")
                frames.append({"file_id": file.id})
        while len(frames) > given.window:
            del frames[:2]
        if frames:
            video = {"type": "video", "video": frames, "fps": given.fps}
            video |= {"max_pixels": given.max_pixels}
            content: list[Any] = [video, {"type": "text", "text": given.question}]
            begun = time.monotonic()
            answer = client.chat.completions.create(
                model=model, messages=[{"role": "user", "content": content}], max_tokens=64
            )
            seconds = time.monotonic() - begun
            print(f"{len(frames)} frames, {seconds:.2f} s: {answer.choices[0].message.content}")
            asked += 1
        time.sleep(given.every)


if __name__ == "__main__":
    try:
        main()
    except openai.APIConnectionError as error:
        raise SystemExit(f"nobody answers at {error.request.url}: is `saccade serve` up?") from None
