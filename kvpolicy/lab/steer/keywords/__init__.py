"""Rules that tell kinds of thoughts apart: ``--rules NAME`` reads NAME.toml of this folder."""
