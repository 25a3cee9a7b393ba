"""SkipKV: evict redundant sentences first, and steer away from non-execution thoughts."""

# In figures; a name of kvpolicy.lab.looks.COLOURS.
COLOURS = {"skipkv": "pink"}
