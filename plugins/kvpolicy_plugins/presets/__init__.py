"""Ready-made comparisons: `kvpolicy ablate --preset NAME` reads NAME.toml of this folder."""
