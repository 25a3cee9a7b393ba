"""Sensitivity of the bundled reasoners' layers, by `kvpolicy layers measure`."""
