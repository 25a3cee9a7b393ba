"""ProtectImages: keep the tokens of images under any policy."""

import attrs
from torch import Tensor

from kvpolicy import hookimpl


@attrs.define(eq=False)
class ProtectImages:
    """Keep the rows of images under any policy: ``["h2o", "protect_images"]``.

    The budget includes them. If there are more than fit beside what the other policies declare to
    protect, the newest of them stay.

    **Source.** None; which rows belong to images is what the engine tells policies.
    """

    @hookimpl
    def protect(self, is_image: Tensor) -> Tensor:
        """Every row of an image."""
        return is_image
