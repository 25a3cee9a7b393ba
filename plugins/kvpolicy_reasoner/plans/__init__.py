"""Plans for the bundled reasoners; `kvpolicy plan show NAME` reads NAME.toml here."""
