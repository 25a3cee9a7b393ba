"""Functions over slabs of rows that a decode step consists of."""
