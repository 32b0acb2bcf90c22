"""Stage 2: one task scores stored rollouts with one reward."""
