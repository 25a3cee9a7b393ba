"""Training of the bundled reasoners."""
