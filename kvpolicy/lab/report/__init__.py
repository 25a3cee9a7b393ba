"""The report of runs: one page that opens anywhere, without a network."""
