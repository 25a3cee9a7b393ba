"""The second bundled reasoner: its traces follow what is known of DeepSeek-R1's."""
