"""From the URLs of images in a body to images: decoded with limits, and fetched from nowhere.

A header of a few bytes can promise an image of gigabytes, so sizes are checked before pixels are
decoded. Formats are those of OpenAI's interface: others, such as PostScript, run programs.
"""

import base64
import binascii
import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import attrs

from kvpolicy.errors import error_summary
from kvpolicy.serve.api_errors import ApiError
from kvpolicy.serve.bodies import ImagePart, Message

if TYPE_CHECKING:
    from PIL.Image import Image

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_NAMES = "PNG, JPEG, WebP or GIF"
_URL = re.compile(r"data:(?P<type>[^,]*?)(?P<is_base64>;base64)?,", re.IGNORECASE)


@attrs.define
class ImageReader:
    """Reads the images of one body.

    Attributes:
        max_pixels: The most pixels that all of them may have together.
    """

    max_pixels: int
    _num_pixels: int = attrs.field(default=0, init=False)

    def read(self, messages: Sequence[Message]) -> "list[Image]":
        """The images of messages, in order: in RGB, and turned as they are to be seen.

        Args:
            messages: The messages.

        Raises:
            ApiError: One is no image, or they are too large.
        """
        return [
            self._read(part, f"messages[{message}].content[{number}].image_url.url")
            for message, one in enumerate(messages)
            for number, part in one.images
        ]

    def _read(self, part: ImagePart, param: str) -> "Image":
        from PIL import Image, ImageOps, UnidentifiedImageError

        content = _content_of(part.url, param)
        try:
            with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
                self._count(image.size, param)
                if getattr(image, "is_animated", False):
                    _refuse(param, "has several frames; send one of them as a PNG")
                # As transformers does with what it fetches itself.
                return ImageOps.exif_transpose(image).convert("RGB")
        except ApiError:
            raise
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            self._refuse_size("more pixels than can be", param)
        except UnidentifiedImageError:
            _refuse(param, f"is no image that can be read; send a {_NAMES}")
        except Exception as error:  # of decoders, for content that is damaged on purpose or not
            _refuse(param, f"cannot be decoded: {error_summary(error)}; send the whole file")

    def _count(self, size: tuple[int, int], param: str) -> None:
        width, height = size
        self._num_pixels += width * height
        if self._num_pixels > self.max_pixels:
            self._refuse_size(f"{width:,} x {height:,} pixels", param)

    def _refuse_size(self, size: str, param: str) -> NoReturn:
        what = (
            f"has {size}, and the images of a request may have {self.max_pixels:,} pixels "
            "together; send smaller ones"
        )
        _refuse(param, what)


def _content_of(url: str, param: str) -> bytes:
    """The bytes of a ``data:`` URL."""
    found = _URL.match(url)
    if found is None or not found["is_base64"]:
        _refuse(param, 'is no data in base64; send "data:image/png;base64,..."')
    try:
        return base64.b64decode(url[found.end() :], validate=True)
    except (binascii.Error, ValueError) as error:  # ValueError: letters beyond ASCII
        _refuse(param, f"is not in base64: {error}; encode the whole file in one line")


def _refuse(param: str, what: str) -> NoReturn:
    raise ApiError(400, f"{param} {what}", param=param, code="invalid_image")
