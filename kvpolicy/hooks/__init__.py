"""Discovery of policies, stacks, hook calls and checks of their answers."""
