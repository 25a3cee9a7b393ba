"""Whether the Hugging Face hub can be reached, found out without waiting for its time-outs."""

import socket
from urllib.parse import urlsplit
from urllib.request import getproxies


def hub_reachable() -> bool:
    """Whether the hub's host name resolves, or a proxy may resolve it.

    Without this check, the hub's clients retry for half a minute.
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
