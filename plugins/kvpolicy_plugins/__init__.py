"""Published systems and add-ons that combine with any policy: a file or a package each."""

# In figures; names of kvpolicy.lab.looks.COLOURS. Other add-ons keep the colour of what they wrap.
COLOURS = {
    "epicache": "pink",
    "expected_attention": "olive",
    "keydiff": "brown",
    "laq": "sky",
    "lazy_eviction": "grey",
    "mix": "wine",
    "obcache": "teal",
    "obcache_history": "teal",
    "trimkv": "amber",
}
