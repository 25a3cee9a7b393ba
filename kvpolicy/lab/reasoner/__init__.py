"""A small reasoning model trained for the project: its task, tokenizer, weights and training."""
