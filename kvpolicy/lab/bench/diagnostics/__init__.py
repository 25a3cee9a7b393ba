"""What is measured of the engine alone, without other contenders."""
