"""Whether the Hugging Face hub can be asked at all, found out without waiting for it."""

import socket
from urllib.parse import urlsplit
from urllib.request import getproxies


def hub_can_be_reached() -> bool:
    """Whether the hub's address can be looked up, or there is a proxy that may know it.

    Without this, the hub's clients try again and again for half a minute.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if getproxies():
        return True
    try:
        socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True
