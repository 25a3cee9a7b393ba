"""Gates that were trained for the bundled reasoners; README.md says how."""
