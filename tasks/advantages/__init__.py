"""Stage 3: stored scores become advantages."""
