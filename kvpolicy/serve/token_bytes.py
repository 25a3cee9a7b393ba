"""The bytes that a token stands for, which may be a part of a character."""

from functools import cache
from typing import Any

from kvpolicy.engine.requests.detokenize import BYTE_TOKEN, decode

_BROKEN = "\ufffd"  # what a tokenizer makes of a part of a character


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """The UTF-8 bytes of a token in the middle of a text; a special token has those of its name.

    Args:
        tokenizer: Its tokenizer.
        token: Its id.

    Raises:
        RequestError: The tokenizer raises.
    """
    name_of = getattr(tokenizer, "convert_ids_to_tokens", None)
    name = None if name_of is None else name_of(token)
    alone = decode(tokenizer, [token], skip_special_tokens=False)
    if isinstance(name, str):
        if (byte := BYTE_TOKEN.fullmatch(name)) and alone != name:
            return bytes([int(byte[1], 16)])
        if _BROKEN in alone and set(name) <= _byte_of().keys():
            return bytes(_byte_of()[letter] for letter in name)
    # A token at the beginning of a text may lack its space.
    twice = decode(tokenizer, [token, token], skip_special_tokens=False)
    return twice[len(alone) :].encode()


@cache
def _byte_of() -> dict[str, int]:
    """The byte that each letter stands for in the names of byte-level tokens.

    As in GPT-2's encoder: printable letters of Latin-1 stand for their own code, those from U+0100
    on for the other bytes, in order.
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    plain += range(ord("®"), ord("ÿ") + 1)
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {
        chr(256 + number): byte for number, byte in enumerate(others)
    }
