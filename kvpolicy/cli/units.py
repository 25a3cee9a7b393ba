"""Numbers for people."""


def human_bytes(num_bytes: float) -> str:
    """A number of bytes, such as ``1.5 MiB``.

    Args:
        num_bytes: The number.
    """
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        num_bytes /= 1024
        if num_bytes < 1000:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} TiB"


def clock(seconds: float) -> str:
    """A duration as one reads it off a clock, such as ``0:05`` or ``1:02:03``.

    Args:
        seconds: The duration.
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
