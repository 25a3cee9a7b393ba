"""Sweeps on the bundled reasoners: `kvpolicy ablate --preset NAME` reads NAME.toml here."""
