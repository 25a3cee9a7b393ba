"""Plans by name: `kvpolicy plan show NAME` reads NAME.toml of this folder."""
