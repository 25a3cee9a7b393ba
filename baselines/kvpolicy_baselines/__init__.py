"""Published eviction policies, one file each."""

DEFAULT_POLICY = "full"
DEFAULT_EVICTION_POLICY = "rkv"  # made for the long generations of reasoning models

# In figures; names of kvpolicy.lab.looks.COLOURS.
COLOURS = {
    "full": "ink",
    "streaming": "amber",
    "h2o": "blue",
    "h2o_last": "sky",
    "h2o_shared": "olive",
    "tova": "indigo",
    "knorm": "brown",
    "random": "grey",
    "pyramidkv": "teal",
    "snapkv": "green",
    "rkv": "vermilion",
}
