"""Files of prompts: answered once each, in any order, on one machine or many; written in order."""
