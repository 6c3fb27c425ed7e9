"""Converts Pillow images to RGB pixels.

The front end of a server never imports this module, because it receives encoded bytes, and image
workers decode them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import PIL.Image
import PIL.ImageOps

from saccade.media.content import encode_array


def encode_image(image: PIL.Image.Image) -> bytes:
    """Encode a Pillow image in Saccade's own format.

    The image is rotated upright and converted to RGB, with transparency blended over white.
    """
    return encode_array(to_rgb(PIL.ImageOps.exif_transpose(image)))


def to_rgb(image: PIL.Image.Image) -> npt.NDArray[np.uint8]:
    """Return RGB pixels [height, width, 3], with transparency blended over white.

    This is the conversion of transformers' `convert_to_rgb`. Raises ValueError for a mode that
    Pillow cannot convert.
    """
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = PIL.Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = PIL.Image.alpha_composite(white, image)
    return np.asarray(image.convert("RGB"))
