"""Rules that tell apart the kinds of thoughts in the texts of the bundled reasoners."""
