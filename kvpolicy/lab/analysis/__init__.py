"""Tables, comparisons and exports of stored samples."""
