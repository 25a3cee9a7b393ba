"""Small reasoning models trained for the project: tasks, tokenizers, weights and training."""
