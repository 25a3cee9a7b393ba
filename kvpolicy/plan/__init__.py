"""What each layer does: plan files and what they resolve to."""
