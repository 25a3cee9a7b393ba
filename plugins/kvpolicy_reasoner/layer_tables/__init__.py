"""Sensitivity of the bundled reasoners' layers, by `kvpolicy layer-sensitivity measure`."""
