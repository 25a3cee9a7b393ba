"""Run folders: records, JSON lines, locks, reading and writing."""
