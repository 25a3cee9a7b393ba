"""Rules that classify the thoughts in traces of the bundled reasoners."""
